"""What the trainers call where machines have several of them.

The agents of such a job take part in an op as one rank each (`pmesh.core.ops.machines`). The size,
the dtype and the call change from step to step, equally on all ranks. What a trainer gives depends
on its id in the job, as several trainers have the name of one machine.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tools.chaos.calls import PERIOD, At, CallOutcome, CheckedCall, digest

DTYPES: Final = (np.float32, np.float32, np.float64, np.int32)
_UNITS, _SPREAD = 1021, 389  # primes: ids that are less than 1021 apart differ in what they give
_STEPS = 97


def unit_of(trainer: int) -> int:
    """Return what a trainer adds to each place, in thousands; no two of a job have the same.

    Seven of them, with places and steps, stay below 2^24, so float32 adds them without rounding.

    >>> [unit_of(trainer) for trainer in range(5)]
    [1, 390, 779, 147, 536]
    """
    return 1 + trainer * _SPREAD % _UNITS


def given(trainer: int, step: int, count: int, dtype: type[Any] = np.float32) -> NDArray[Any]:
    """Return what a trainer gives in a step: `count` whole numbers."""
    places = np.resize(np.arange(PERIOD, dtype=dtype), count)
    return (places + (step % _STEPS + 1000 * unit_of(trainer))).astype(dtype)


def total_of(
    trainers: Sequence[int], step: int, count: int, dtype: type[Any] = np.float32
) -> NDArray[Any]:
    """Return the sum of what they give, exactly."""
    total: NDArray[Any] = sum(given(each, step, count, np.float64) for each in trainers)  # type: ignore[assignment]
    return total.astype(dtype)


def bytes_in(step: int, most: int) -> int:
    """Return the size of the op: any order of magnitude up to `most` is as likely as any other."""
    return int(4 * 2 ** Random(step).uniform(0, math.log2(max(1, most / 4))))  # noqa: S311 - no secret


def prepare_call(at: At) -> CheckedCall:
    """Return the call of this step."""
    random = Random(-1 - at.step)  # noqa: S311 - the same on all ranks
    return random.choice(CALLS)(at, random.choice(DTYPES))


def _own(at: At, dtype: type[Any]) -> NDArray[Any]:
    count = max(1, bytes_in(at.step, at.pattern.nbytes) // np.dtype(dtype).itemsize)
    return given(at.mesh.trainers[at.mesh.rank], at.step, count, dtype)


def _outcome(at: At, result: NDArray[Any], *, right: bool) -> CallOutcome:
    """What all ranks must say alike: the bits, and whose values these are."""
    return CallOutcome(f"{digest(np.ascontiguousarray(result))} of {at.mesh.trainers}", right)


def _judge_sum(at: At, result: NDArray[Any]) -> CallOutcome:
    right = total_of(at.mesh.trainers, at.step, result.size, result.dtype.type)
    return _outcome(at, result, right=np.array_equal(result, right))


def _sum(at: At, dtype: type[Any]) -> CheckedCall:
    x = _own(at, dtype)
    return CheckedCall(lambda: at.mesh.all_reduce(x), partial(_judge_sum, at))


def _shared(at: At, dtype: type[Any]) -> CheckedCall:
    """Of memory that the agent has mapped; the result is read in another rank's if it is large.

    The call is made twice: what the first has brought stays while the second runs.
    """
    own = _own(at, dtype)
    x = at.mesh.empty(own.shape, dtype)
    x[:] = own

    def call() -> tuple[NDArray[Any], str, NDArray[Any]]:
        first = at.mesh.all_reduce(x, copy=False)
        before = digest(first)
        return first, before, at.mesh.all_reduce(x, copy=False)

    def judge(results: tuple[NDArray[Any], str, NDArray[Any]]) -> CallOutcome:
        first, before, second = results
        outcome = _judge_sum(at, second)
        return outcome._replace(right=outcome.right and digest(first) == before)

    return CheckedCall(call, judge)


def _average(at: At, dtype: type[Any]) -> CheckedCall:
    """Of two arrays, the mean: the number of ranks divides, not that of machines."""
    kind = np.float64 if dtype is np.float64 else np.float32  # gradients are no integers
    own = _own(at, kind)
    grads = {"w": own, "b": own[:7]}  # of one dtype: each bucket has contributors of its own

    def judge(result: Mapping[str, NDArray[Any]]) -> CallOutcome:
        mean = total_of(at.mesh.trainers, at.step, own.size, np.float64) / at.mesh.size
        both = np.concatenate([result["w"], result["b"]])
        right = np.allclose(both, np.concatenate([mean, mean[:7]]), rtol=1e-6, atol=0)
        return _outcome(at, both, right=right)

    return CheckedCall(lambda: at.mesh.average_gradients(grads), judge)


def _extreme(at: At, dtype: type[Any]) -> CheckedCall:
    x = _own(at, dtype)

    def judge(result: NDArray[Any]) -> CallOutcome:
        largest = max(at.mesh.trainers, key=unit_of)
        right = np.array_equal(result, given(largest, at.step, x.size, dtype))
        return _outcome(at, result, right=right)

    return CheckedCall(lambda: at.mesh.all_reduce(x, op="max"), judge)


def _barrier(at: At, _: type[Any]) -> CheckedCall:
    return CheckedCall(
        at.mesh.barrier, lambda _: CallOutcome(f"passed by {at.mesh.trainers}", right=True)
    )


CALLS: Final = (_sum, _sum, _shared, _shared, _average, _extreme, _barrier)
"""What trainers call; twice what matters most."""
