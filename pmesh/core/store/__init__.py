"""A job's store: keys and values that its ranks share (S1)."""
