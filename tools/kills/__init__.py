"""Kills of ranks in the middle of training: by torch, or by `pmesh mlx -- mlx_lm.lora --train`.

    campaign    whom to kill and when, and what must hold then, whatever is trained
    workloads   what is trained, and how its lines are read
    rows        the campaigns

The ranks of torch are those of `tools/torch_ranks.py`.
"""
