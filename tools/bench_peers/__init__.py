"""pmesh beside gloo and MLX's ring on the same machine, sizes and ranks, in turns."""
