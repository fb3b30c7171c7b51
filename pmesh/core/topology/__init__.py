"""The machines as a graph with measured edges, and what is read from it."""
