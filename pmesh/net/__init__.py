"""Dials, accepts, reads, writes and waits, under trio; decides nothing."""
