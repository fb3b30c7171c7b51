"""What pmesh does for MLX: a drop-in for `mx.distributed`, and training that shares its memory out.

`import pmesh.mlx as distributed` has the names of `mx.distributed` and their arguments, and
`average_gradients` of `mlx.nn`; `pmesh mlx` runs a program with them in MLX's place. Calls run at
once, not when a result is evaluated: nothing waits for the network in the queue of the GPU, where
the system ends what takes more than some seconds. docs/how-to/mlx-programs.md lists what differs
from MLX, and why.

`ShardedOptimizer` and `fully_shard` share an optimizer's state, or a whole model, out among the
ranks.
"""

from pmesh.mlx.families import language_model_blocks
from pmesh.mlx.fully_sharded import Block, FullySharded, fully_shard
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
from pmesh.mlx.sharded_optimizer import ShardedOptimizer

__all__ = [
    "Block",
    "FullySharded",
    "Group",
    "ShardedOptimizer",
    "all_gather",
    "all_max",
    "all_min",
    "all_sum",
    "average_gradients",
    "fully_shard",
    "init",
    "is_available",
    "language_model_blocks",
    "recv",
    "recv_like",
    "send",
    "sum_scatter",
]
