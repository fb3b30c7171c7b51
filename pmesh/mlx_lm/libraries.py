"""MLX and mlx-lm as modules whose names are Any: most of what is used of them has no types.

Imported only where a trainer of `mlx_lm.lora` runs.
"""

from importlib import import_module
from typing import Any

mx: Any = import_module("mlx.core")
nn: Any = import_module("mlx.nn")
trees: Any = import_module("mlx.utils")
lora: Any = import_module("mlx_lm.lora")
trainer: Any = import_module("mlx_lm.tuner.trainer")
datasets: Any = import_module("mlx_lm.tuner.datasets")
