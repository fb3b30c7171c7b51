"""Kills of ranks in the middle of training with torch."""
