"""A tiny random model, and data, to fine-tune by mlx-lm."""
