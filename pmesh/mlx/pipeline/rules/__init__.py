"""What each rank of a pipeline does and in which order, and which layers it has: pure."""
