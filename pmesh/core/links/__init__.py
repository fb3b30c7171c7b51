"""Whom to dial, when, and what a silence means."""
