"""Keeps an agent's copies of the stores of its jobs."""
