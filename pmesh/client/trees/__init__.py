"""Arrays of any library, in nested containers."""
