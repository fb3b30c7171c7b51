"""Trees: arrays of any library in nested containers."""
