"""Bytes: frames, messages of links and of local sessions, records of lanes."""
