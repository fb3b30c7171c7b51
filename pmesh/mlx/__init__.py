"""A drop-in for `mx.distributed` and `mlx.nn.average_gradients`, over a mesh.

`import pmesh.mlx as distributed` has their names and their arguments; `pmesh mlx` runs a program
with them in MLX's place. Calls run at once, not when a result is evaluated: nothing waits for the
network in the queue of the GPU, where the system ends what takes more than some seconds.
docs/how-to/mlx-programs.md lists what differs from MLX, and why.
"""

from pmesh.mlx.groups import Group, init, is_available
from pmesh.mlx.ops import (
    all_gather,
    all_max,
    all_min,
    all_sum,
    average_gradients,
    recv,
    recv_like,
    send,
    sum_scatter,
)

__all__ = [
    "Group",
    "all_gather",
    "all_max",
    "all_min",
    "all_sum",
    "average_gradients",
    "init",
    "is_available",
    "recv",
    "recv_like",
    "send",
    "sum_scatter",
]
