"""What the agent tells people and programs: status, events, log lines."""
