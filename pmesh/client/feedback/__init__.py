"""Compressed calls, and the error feedback that they keep."""
