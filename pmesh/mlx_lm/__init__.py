"""`mlx_lm.lora` on machines that come and go: mlx-lm's options and data, our training loop.

A run passes through the modules in this order: `command`, `prepared` (mlx-lm's own preparations),
`session`, `training` with `batches` (which rows a rank takes) and `halves` (the compiled
functions), `state` and `files` (what is saved). `terms` checks what all machines must share.
"""

from pmesh.mlx_lm.command import train

__all__ = ["train"]
