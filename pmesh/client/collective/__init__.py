"""How a call becomes ops on buckets."""
