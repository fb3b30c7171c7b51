"""Codes, how many guesses they allow, and the exchange by which a code becomes the mesh key."""
