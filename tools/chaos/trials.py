"""A call of the campaigns that is ready to be made, and how its result is judged."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import pmesh
from tools.chaos.pattern import PERIOD, Pattern, Values, numbers_of, own_value


class Outcome(NamedTuple):
    """What a call has come to on one rank."""

    digest: str
    """Alike on all ranks."""
    right: bool


@dataclass(frozen=True, slots=True)
class At:
    """One trainer in one step."""

    mesh: pmesh.Mesh
    pattern: Pattern
    number: int
    step: int

    @property
    def numbers(self) -> list[int]:
        """Before a call: who takes part; after it: whose values are in the result."""
        return numbers_of(self.mesh.names)

    def total(self) -> float:
        """What they have added up to, but for the places."""
        return sum(own_value(self.step, number) for number in self.numbers)

    def mine(self) -> float:
        """What this trainer adds to that."""
        return own_value(self.step, self.number)

    def input(self, number: int | None = None) -> Values:
        """What a trainer, this one unless told otherwise, gives to a sum; a copy."""
        return self.pattern.input(self.step, self.number if number is None else number).copy()

    def is_sum(self, result: Values) -> bool:
        """Whether it is the sum over those who have contributed, in every bit."""
        return self.pattern.is_right(result, self.step, self.numbers)

    def whole(self) -> Values:
        """That sum."""
        places = np.arange(PERIOD, dtype=np.float32) * np.float32(len(self.numbers))
        rows = self.pattern.nbytes // (4 * PERIOD)
        return np.tile(places + np.float32(self.total()), (rows, 1))


class Trial(NamedTuple):
    """A call that is ready to be made, and judged."""

    call: Callable[[], Any]
    judge: Callable[[Any], Outcome]
