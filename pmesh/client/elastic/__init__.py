"""How a trainer enters its job, leaves it and comes back."""
