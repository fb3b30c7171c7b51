"""Data connections, and what runs a plan over them."""
