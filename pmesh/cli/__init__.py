"""Arguments in, text out."""
