"""`send` and `recv`: messages between two ranks."""
