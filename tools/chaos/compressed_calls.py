"""The calls whose values are compressed, with inputs that each scheme keeps, or nearly so."""

from collections.abc import Mapping

import numpy as np

import pmesh
from tools.chaos.pattern import Values, digest
from tools.chaos.trials import At, Outcome, Trial

RATIO = 0.01
LIGHT = 2.0**-10  # of values that pass float16 in range
MATRIX_NOISE, BLOCK_NOISE, HOP_NOISE = 1e-3, 1e-5, 0.03


def cast(at: At, compression: str) -> Trial:
    """What rounds every value, at each hop or once."""
    x = at.input() * np.float32(LIGHT)
    return Trial(
        lambda: at.mesh.all_reduce(x, compression=compression),
        lambda result: _near(result, at.whole() * np.float32(LIGHT), HOP_NOISE),
    )


def average(at: At) -> Trial:
    """What feedback adds to a mean is what the call before has rounded away: as little."""
    grads = {"w": at.input() * np.float32(LIGHT), "b": np.full(3, 4, np.float32)}

    def judge(result: Mapping[str, Values]) -> Outcome:
        mean = at.whole() * np.float32(LIGHT / at.mesh.size)
        near = _near(result["w"], mean, HOP_NOISE)
        return near._replace(right=near.right and np.allclose(result["b"], 4, rtol=HOP_NOISE))

    return Trial(lambda: at.mesh.average_gradients(grads, compression="int8"), judge)


def top_k(at: At) -> Trial:
    """As many values as are kept, in places that all share: nothing is left out."""
    values = np.zeros(at.pattern.nbytes // 4, np.float32)
    places = (np.arange(int(values.size * RATIO)) * 97 + at.step) % values.size
    values[places] = 1
    x = values * np.float32(at.mine())
    return Trial(
        lambda: at.mesh.all_reduce(x, compression=pmesh.TopK(RATIO)),
        lambda result: _near(result, values * np.float32(at.total()), BLOCK_NOISE),
    )


def random_k(at: At) -> Trial:
    """What is kept is the sum, as many times as large as there are places for each that is kept."""
    x = at.input()

    def judge(result: Values) -> Outcome:
        kept = np.nonzero(result)
        right = at.whole()[kept] * np.float32(result.size / max(1, kept[0].size))
        enough = 0.09 * result.size < kept[0].size < 0.11 * result.size
        return Outcome(digest(result), enough and _near(result[kept], right, BLOCK_NOISE).right)

    return Trial(lambda: at.mesh.all_reduce(x, compression=pmesh.RandomK(0.1)), judge)


def one_bit(at: At) -> Trial:
    """All values of one magnitude: the mean magnitude of a block is theirs."""
    signs = np.where(at.input(1) % 3 == 0, np.float32(-1), np.float32(1))
    x = signs * np.float32(at.mine())
    return Trial(
        lambda: at.mesh.all_reduce(x, compression="onebit"),
        lambda result: _near(result, signs * np.float32(at.total()), BLOCK_NOISE),
    )


def power_sgd(at: At) -> Trial:
    """A matrix of rank 1, as is a sum of them."""
    row = at.input(1)[:1] * np.float32(LIGHT)
    base = row * np.arange(1, at.input().shape[0] + 1, dtype=np.float32)[:, None]
    x = base * np.float32(at.mine())
    return Trial(
        lambda: at.mesh.all_reduce(x, compression=pmesh.PowerSGD(2)),
        lambda result: _near(result, base * np.float32(at.total()), MATRIX_NOISE),
    )


def _near(result: Values, right: Values, limit: float) -> Outcome:
    error = np.linalg.norm((result - right).reshape(-1)) / np.linalg.norm(right.reshape(-1))
    return Outcome(digest(result), result.shape == right.shape and bool(error <= limit))
