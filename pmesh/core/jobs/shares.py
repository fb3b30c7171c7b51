"""How many rows of a batch each rank takes: as many as it computes in the time of the others.

Each rank measures how long it computes for a row. In `sync` all ranks tell each other, and from the
same figures they choose the same weights. A weight changes only if the step gets clearly shorter:
by more than chance explains, given how much the measured times vary.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from pmesh.compression.blocks import Indices
from pmesh.errors import UsageError

WHOLE = 1 << 16
"""The weight of the fastest rank."""
UNKNOWN_PPM = 10**9
"""The uncertainty of a rank that has measured too few steps since the weights changed."""

_KEPT = 256  # steps: where they vary by 20 %, the median of so many has a standard error of 1.6 %
_CHANGES = ((5, 1.8), (20, 1.35))
"""A rank has become faster or slower if the median of so many steps differs by such a factor from
that of the steps before."""
_FEW = 10  # steps, whose own deviation says little
_LEAST_DEVIATION = 0.01
_LEAST_DEVIATION_OF_FEW = 0.05
_LEAST_GAIN = 0.02
_MOST_HELD = 64  # steps: a rank that has become slower shall not wait much longer
_CALM = 8  # times as many steps as the weights held at least: then they may change at once again
_DEVIATIONS = 4.0


class Standing(NamedTuple):
    """What a rank tells the others, as int64 values."""

    ns_per_row: int = 0
    """How long it computes for a row; 0 while unknown, and in a job that deals no rows."""
    uncertainty_ppm: int = UNKNOWN_PPM
    """The standard error of that time, in millionths of it."""
    weight: int = 0
    """The weight that it has now; 0 for a rank that has just entered."""
    most_rows: int = 0
    """The most rows that fit its memory; 0 for any number."""
    even: int = 0
    """1 if it wants the same share for all ranks, which then holds for all; else 0."""


class Pace:
    """How long one rank computes for a row, measured over its last steps."""

    def __init__(self) -> None:
        self._taken: deque[float] = deque(maxlen=_KEPT)
        self._known = 0.0
        self._skips = True
        self._steps = 0
        self._holds = 1
        """For so many steps the weights stay: twice as many each time in a row. The time of a row
        may depend on their number, so that each weight shows another one to be better."""

    def note(self, seconds: float, rows: int) -> None:
        """Note the time of a step. The first with new shapes is left out: it compiles kernels."""
        if self._skips or not rows:
            self._skips = False
            return
        self._steps += 1
        self._taken.append(max(seconds, 1e-9) / rows)
        steps = list(self._taken)
        for count, factor in _CHANGES:
            if len(steps) > 2 * count:
                now, before = median(steps[-count:]), median(steps[:-count])
                if not before / factor < now < before * factor:
                    self._taken = deque(steps[-count:], maxlen=_KEPT)
        self._known = median(self._taken)

    def forget(self) -> None:
        """Measure anew, as the rank has another number of rows; what is known holds until then."""
        is_calm = self._steps >= _CALM * self._holds
        self._holds = 1 if is_calm else min(2 * self._holds, _MOST_HELD)
        self._taken.clear()
        self._skips, self._steps = True, 0

    @property
    def ns_per_row(self) -> int:
        """The median time; 0 before the first step."""
        return round(self._known * 1e9)

    @property
    def uncertainty_ppm(self) -> int:
        """The standard error of the median, by the median deviation (for normal errors)."""
        count = len(self._taken)
        if not count or self._steps < self._holds:
            return UNKNOWN_PPM
        deviation = 1.4826 * median(abs(each - self._known) for each in self._taken) / self._known
        least = _LEAST_DEVIATION_OF_FEW if count < _FEW else _LEAST_DEVIATION
        return round(1e6 * 1.2533 * max(deviation, least) / math.sqrt(count))


def choose_weights(standings: Sequence[Standing]) -> tuple[int, ...]:
    """Return the weight of each rank; its share of a batch is its part of their sum.

    Args:
        standings: of all ranks, in the order of ranks; at least one.
    """
    known = [rank.ns_per_row for rank in standings if rank.ns_per_row > 0]
    if not known or any(rank.even for rank in standings):
        return (WHOLE,) * len(standings)
    now = tuple(rank.weight for rank in standings)
    times = [rank.ns_per_row if rank.ns_per_row > 0 else median(known) for rank in standings]
    best = tuple(max(1, round(WHOLE * min(times) / time)) for time in times)
    if min(now) < 1:
        return best
    uncertainty = max(rank.uncertainty_ppm for rank in standings) / 1e6
    gain = _step_time(now, times) / _step_time(best, times) - 1
    return best if gain > _LEAST_GAIN + _DEVIATIONS * uncertainty else now


def _step_time(weights: Sequence[int], times: Sequence[float]) -> float:
    """Return how long the slowest rank computes for its part of one row."""
    return max(w * t for w, t in zip(weights, times, strict=True)) / sum(weights)


def deal_rows(rows: int, weights: Sequence[int], most: Sequence[int] = ()) -> tuple[Indices, ...]:
    """Return the rows of each rank, from 0 to `rows` - 1; each row once, spread over the batch.

    Ranks of equal weights take turns: of n ranks, the r-th takes every n-th row from row r on. If
    there are at least as many rows as ranks, each rank has one.

    Args:
        rows: of the batch of all ranks.
        weights: of all ranks, at least 1 each.
        most: how many rows each rank takes at most; 0 for any number. Empty: no rank has a limit.

    Raises:
        UsageError: all ranks together take fewer rows.
    """
    size = len(weights)
    limits = [limit if 0 < limit < rows else rows for limit in most] or [rows] * size
    if sum(limits) < rows:
        raise UsageError(
            f"a batch of {rows} rows does not fit: the ranks take at most {sum(limits)} "
            f"({', '.join(map(str, limits))}); take a smaller batch, or raise max_rows"
        )
    if len(set(weights)) == 1 and min(limits) >= -(-rows // size):
        return tuple(np.arange(rank, rows, size, dtype=np.int64) for rank in range(size))
    counts = _count_rows(rows, weights, limits)
    owners = np.repeat(np.arange(size), counts)
    # Each rank's rows lie at equal distances.
    places = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
    dealt = owners[np.argsort(places, kind="stable")]
    return tuple(np.flatnonzero(dealt == rank).astype(np.int64) for rank in range(size))


def _count_rows(rows: int, weights: Sequence[int], limits: Sequence[int]) -> list[int]:
    """Return how many rows each rank has: as its weight says, at least 1, within its limit."""
    size = len(weights)
    if rows <= size:
        return [int(rank < rows) for rank in range(size)]
    counts, free, left = [0] * size, list(range(size)), rows
    while full := [r for r in free if weights[r] * left >= limits[r] * _sum_of(weights, free)]:
        for rank in full:
            counts[rank] = limits[rank]
        free = [rank for rank in free if rank not in full]
        left = rows - sum(counts)
    share = left / max(1, _sum_of(weights, free))
    for rank in free:
        counts[rank] = max(1, int(share * weights[rank]))
    while (missing := rows - sum(counts)) != 0:  # at most one row for each rank
        step = 1 if missing > 0 else -1
        may = [r for r in range(size) if (counts[r] < limits[r] if step > 0 else counts[r] > 1)]
        nearest = [step * (weights[r] * share - counts[r]) for r in may]
        counts[may[int(np.argmax(nearest))]] += step
    return counts


def _sum_of(weights: Sequence[int], ranks: Sequence[int]) -> int:
    return sum(weights[rank] for rank in ranks)
