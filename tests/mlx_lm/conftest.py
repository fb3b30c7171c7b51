"""The tests of `mlx_lm.lora` are skipped where mlx-lm is missing, but not in CI."""

import importlib.util
import os

import pytest

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("mlx_lm") is None:
    if os.environ.get("CI"):
        raise pytest.UsageError("in CI these tests run: install mlx-lm")
    collect_ignore_glob = ["test_*.py"]
