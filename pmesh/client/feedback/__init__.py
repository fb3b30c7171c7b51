"""Compressed calls and their error feedback."""
