"""The agent: its configuration, its nursery, and its status."""
