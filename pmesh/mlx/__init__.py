"""What pmesh does for MLX: optimizers whose state is shared out among the ranks."""

from pmesh.mlx.sharded_optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
