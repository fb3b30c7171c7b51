"""What each trainer gives to an op, chosen so that any result can be checked exactly.

Values are whole numbers small enough that float32 adds them without rounding, so there is one right
sum, whatever the order. Each value depends on the trainer (a sum names its contributors), on the
step (a stale one is seen) and on the place (so is one that went astray).
"""

from collections.abc import Collection
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

Values: TypeAlias = NDArray[np.float32]

PERIOD = 4099  # a prime: a segment, 65,536 values or a multiple, that goes astray changes the phase
MOST_TRAINERS = 8
_STEPS = 997  # a prime too; two steps with the same values are as far apart
_TRAINER = 1000.0  # more than _STEPS, so that steps and trainers don't mix
_PLACES = np.arange(PERIOD, dtype=np.float32)


def own_value(step: int, number: int) -> float:
    """What trainer `number`, 1 to 8, adds to the place; any sum of them tells who is in it.

    >>> own_value(3, 1) + own_value(3, 4)
    9006.0
    """
    return step % _STEPS + _TRAINER * (1 << number - 1)


def numbers_of(names: tuple[str, ...]) -> list[int]:
    """Of the machines `mac-1`, `mac-2`, ...

    >>> numbers_of(("mac-3", "mac-1"))
    [3, 1]
    """
    return [int(name.rpartition("-")[2]) for name in names]


class Pattern:
    """The inputs of one trainer, and the right results, for ops of about `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        self._input: Values = np.empty((max(1, nbytes // (4 * PERIOD)), PERIOD), np.float32)

    @property
    def nbytes(self) -> int:
        """Of one input: a whole number of periods."""
        return self._input.nbytes

    def input(self, step: int, number: int) -> Values:
        """What the trainer gives; valid until the next call."""
        np.copyto(self._input, _PLACES + np.float32(own_value(step, number)))
        return self._input

    def is_right(self, result: Values, step: int, numbers: Collection[int]) -> bool:
        """Whether every value is the sum over exactly these trainers."""
        added = np.float32(sum(own_value(step, number) for number in numbers))
        right = _PLACES * np.float32(len(numbers)) + added
        return result.shape == self._input.shape and bool((result == right).all())


def digest(result: Values) -> str:
    """128 bits that differ where two results differ in any bit."""
    return xxhash.xxh3_128_hexdigest(result.data)
