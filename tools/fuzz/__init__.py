"""Hostile members and trainers that send changed messages to agents; see `tools.fuzz.run`."""
