"""What was measured, as it lies in a file until the page is written."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

BAR = 1.01
"""Times the uncompressed loss: what a scheme with feedback may end at."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One scheme, with feedback or without."""

    case: str
    feedback: bool
    is_judged: bool
    losses: tuple[float | None, ...]
    """At the end, for the first seeds; None: it was not a finite number."""
    curve: tuple[float | None, ...]
    """Mean losses of the batches on the way, over all seeds."""

    @property
    def mean(self) -> float:
        """Infinite if one has diverged."""
        return statistics.fmean(map(_number, self.losses))

    def ratio_to(self, plain: "Row") -> float:
        """Of the means over the seeds that this row has."""
        return sum(map(_number, self.losses)) / sum(its for _, its in self._pairs(plain))

    def worst_ratio_to(self, plain: "Row") -> float:
        """Of the same seeds."""
        return max(mine / its for mine, its in self._pairs(plain))

    def is_met(self, plain: "Row") -> bool:
        """Whether the mean is within the bar."""
        return self.ratio_to(plain) <= BAR

    def _pairs(self, plain: "Row") -> list[tuple[float, float]]:
        its = plain.losses[: len(self.losses)]
        return list(zip(map(_number, self.losses), map(_number, its), strict=True))


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One model."""

    model: str
    what: str
    weights: int
    """How many."""
    ranks: int
    batch: int
    """Samples of each rank in each step."""
    steps: int
    rate: float
    seeds: tuple[int, ...]
    command: str
    """Repeats it."""
    commit: str
    machine: str
    took_cpu_s: float = 0
    plain: Row
    """Uncompressed."""
    rows: tuple[Row, ...] = ()
    """As many as were measured."""

    def found(self, case: str, *, feedback: bool) -> Row | None:
        """The row of a scheme, if it was measured."""
        rows = (row for row in self.rows if (row.case, row.feedback) == (case, feedback))
        return next(rows, None)


def write_results(path: Path, measured: Sequence[Measured]) -> None:
    """As JSON that a person can read and a diff shows."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(tuple(measured)), indent=1) + b"\n")


def read_results(path: Path) -> tuple[Measured, ...]:
    """The reverse; raises msgspec.ValidationError for anything else."""
    return msgspec.json.decode(path.read_bytes(), type=tuple[Measured, ...])


def finite(value: float) -> float | None:
    """As JSON can hold it, which has no infinity; to six digits."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.inf if value is None else value
