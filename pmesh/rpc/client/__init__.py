"""The calls of `mesh.rpc`, and the threads that carry and serve them."""
