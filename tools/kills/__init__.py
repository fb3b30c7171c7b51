"""Kills in the middle of training: by torch and what stands on it, or by `mlx_lm.lora --train`.

    campaign    whom to kill and when, and what must hold then, whatever is trained
    workloads   what is trained, and how its lines are read
    fewer       trainings in stages in which what was killed stays away
    calls       calls between ranks; calling is what a rank of it does
    launched    trainings by `pmesh run`, which starts all ranks again after each kill
    rows        the campaigns

The ranks of torch are those of `tools/torch_ranks.py`.
"""
