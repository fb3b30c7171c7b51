"""The tests of what is made for MLX are skipped where MLX is missing."""

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("mlx") is None else []
