"""Kills, floods and slow terminals for `pmesh run --on`, on machines that are network namespaces.

    house     machines with agents that allow launches, and what runs in them
    kills     whom to kill, and what must be gone, or go on, then
    output    lines by the ten thousand, and terminals that do not read them
    rows      both as campaigns
    scripts   what the ranks run: torch, MLX and our own, as their users write them

Linux, root: see `tools/lab/net.py`.
"""
