"""MLX and mlx-lm as modules of type Any, since most of what we use of them has no types.

Only a trainer of `mlx_lm.lora` imports this.
"""

from importlib import import_module
from typing import Any

mx: Any = import_module("mlx.core")
nn: Any = import_module("mlx.nn")
trees: Any = import_module("mlx.utils")
lora: Any = import_module("mlx_lm.lora")
trainer: Any = import_module("mlx_lm.tuner.trainer")
datasets: Any = import_module("mlx_lm.tuner.datasets")
