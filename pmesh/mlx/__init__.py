"""A drop-in for `mx.distributed`, and training with MLX that is sharded across the ranks.

`import pmesh.mlx as distributed` has the functions of `mx.distributed` with the same arguments, and
`average_gradients` of `mlx.nn`. `pmesh mlx` runs a program with these in place of MLX's own.
A call runs at once, not when its result is evaluated. So nothing in the queue of the GPU waits for
the network; the system ends whatever takes more than some seconds there.
docs/how-to/mlx-programs.md lists the differences from MLX and their reasons.

`ShardedOptimizer` shards an optimizer's state across the ranks; `fully_shard` shards a whole model.
`SyncBatchNorm` normalizes over the values of all ranks. `Pipeline` trains a model in stages,
and `ElasticPipeline` goes on when a lost machine is back.
"""

from pmesh.mlx.batch_norm import SyncBatchNorm
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
from pmesh.mlx.pipeline.elastic import ElasticPipeline
from pmesh.mlx.pipeline.pipeline import Pipeline, PipelineReport, StageReport
from pmesh.mlx.pipeline.stages import Stage, split_layers
from pmesh.mlx.sharded_optimizer import ShardedOptimizer

__all__ = [
    "Block",
    "ElasticPipeline",
    "FullySharded",
    "Group",
    "Pipeline",
    "PipelineReport",
    "ShardedOptimizer",
    "Stage",
    "StageReport",
    "SyncBatchNorm",
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
    "split_layers",
    "sum_scatter",
]
