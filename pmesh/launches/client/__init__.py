"""What programs ask the agent about launches, and the options of `pmesh mlx`."""
