"""Fine-tuning with `pmesh mlx -- mlx_lm.lora --train` while ranks are killed and come back."""
