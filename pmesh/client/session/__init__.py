"""The connection to the local agent."""
