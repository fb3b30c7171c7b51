"""The calls that a rank has made, those that it serves, and how work is dealt to ranks."""
