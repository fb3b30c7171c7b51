"""What a rank knows of its ops."""
