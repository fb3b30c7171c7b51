"""The agent's output for people and programs: status, events, log lines."""
