"""Checkpoints of a job, each rank's share on its own disk: layout, files, then what users call."""
