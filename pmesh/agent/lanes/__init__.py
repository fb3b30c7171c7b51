"""Lanes: how two agents open one, which a rank has, and what its edges cost."""
