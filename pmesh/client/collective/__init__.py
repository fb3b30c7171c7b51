"""How a call is split into ops on buckets."""
