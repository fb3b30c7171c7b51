"""`send` and `recv` between two ranks (O4), from the call to the lane."""
