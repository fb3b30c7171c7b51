"""Checkpoints of a job: each rank writes its share to its own disk."""
