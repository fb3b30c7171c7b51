"""The calls of a mesh, as users see them."""
