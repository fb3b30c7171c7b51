"""The trainer's part: the calls, and the second connection to the agent."""
