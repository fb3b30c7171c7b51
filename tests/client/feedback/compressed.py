# ruff: noqa: ANN401 - arrays of libraries that have no common type
"""What the tests of compressed calls compress, and with what."""

from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.compression.schemes import BF16, FP16, INT8, OneBit, PowerSGD, RandomK, Scheme, TopK

RANKS = 3
FEEDBACK: list[Scheme] = [
    FP16(error_feedback=True),
    BF16(error_feedback=True),
    INT8(),
    INT8(stochastic=True),
    TopK(0.05),
    TopK(0.05, compact=True),
    RandomK(0.1),
    PowerSGD(2, start_step=1),
    OneBit(),
]
EVERY = pytest.mark.parametrize("scheme", FEEDBACK, ids=str)


def gradients(rank: int, step: int) -> dict[str, Any]:
    """A matrix that pays, one that does not, vectors and nothing."""
    dice = np.random.default_rng([rank, step])
    return {
        "matrix": dice.standard_normal((40, 30)).astype(np.float32) + 1,
        "small": dice.standard_normal((2, 3)).astype(np.float32),
        "bias": dice.standard_normal(300).astype(np.float32),
        "empty": np.empty((0, 4), np.float32),
    }


def flat(tree: dict[str, Any]) -> Any:
    return np.concatenate([np.ravel(tree[key]) for key in sorted(tree)]).astype(np.float64)


def residual_of(mesh: pmesh.Mesh) -> Any:
    (found,) = [v for k, v in mesh.error_feedback_state().items() if k.endswith("|residual")]
    return found.astype(np.float64)


def gradient(rank: int, step: int) -> Any:
    """A matrix."""
    return np.random.default_rng([rank, step]).standard_normal((60, 50)).astype(np.float32)
