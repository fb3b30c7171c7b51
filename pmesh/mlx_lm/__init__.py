"""`mlx_lm.lora` on machines that come and go: mlx-lm's options and data, a training loop of ours.

In the order in which a run passes through them: `command`, `prepared` (mlx-lm's own preparations),
`session`, `training` with `batches` (which rows a rank takes) and `halves` (what is compiled),
`state` and `files` (what is kept); `terms` is what must be the same on all machines.
"""

from pmesh.mlx_lm.command import train

__all__ = ["train"]
