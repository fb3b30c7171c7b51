"""What pmesh does for MLX: optimizers, and whole models, that are shared out among the ranks."""

from pmesh.mlx.fully_sharded import Block, FullySharded, fully_shard
from pmesh.mlx.sharded_optimizer import ShardedOptimizer

__all__ = ["Block", "FullySharded", "ShardedOptimizer", "fully_shard"]
