"""How all commands print and read: lines, rows and sizes."""
