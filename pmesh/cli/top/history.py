"""How the loss of each job has gone while `pmesh top` has watched, and its picture in one line."""

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from typing import Final

from pmesh.agent.schema import JobStatus

MOST_VALUES: Final = 512  # four for each cell of a wide terminal
BLOCKS: Final = "▁▂▃▄▅▆▇█"


class Series:
    """Numbers in the order of time; of a long series each is the mean of several."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._each = 1
        """How many numbers one of the values stands for."""
        self._next: list[float] = []

    def add(self, number: float) -> None:
        """Add a number; when there are too many values, make one of each two."""
        self._next.append(number)
        if len(self._next) < self._each:
            return
        self.values.append(_mean(self._next))
        self._next.clear()
        if len(self.values) == MOST_VALUES:
            pairs = zip(self.values[::2], self.values[1::2], strict=True)
            self.values = [_mean(pair) for pair in pairs]
            self._each *= 2


class Losses:
    """The series of each job that reports its loss."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Series, int, float]] = {}
        """By job; with the step and the loss that were noted last."""

    def note(self, jobs: Sequence[JobStatus]) -> None:
        """Note what the jobs report now; forget jobs that have ended, or have begun anew."""
        names = {job.name for job in jobs}
        self._known = {name: known for name, known in self._known.items() if name in names}
        for job in jobs:
            loss, step = loss_of(job), progress_of(job)
            if not isinstance(loss, float):
                continue
            series, *before = self._known.get(job.name) or (Series(), -1, loss)
            if before == [step, loss]:
                continue  # nothing has happened since
            if step < before[0]:
                series = Series()
            series.add(loss)
            self._known[job.name] = series, step, loss

    def of(self, job: JobStatus) -> Sequence[float]:
        """Return the losses that were seen, the latest last."""
        known = self._known.get(job.name)
        return () if known is None else known[0].values


def _mean(values: Sequence[float]) -> float:
    """Return the mean; a sum of what others report may be beyond all numbers."""
    return sum(value / len(values) for value in values)


def loss_of(job: JobStatus) -> float | str | None:
    """Return the mean of the ranks' losses; "nan" or so if one is; None if none is known."""
    known = [rank.reports["loss"] for rank in job.ranks if "loss" in rank.reports]
    for loss in known:
        if isinstance(loss, str):
            return loss
    numbers = [loss for loss in known if not isinstance(loss, str)]
    return _mean(numbers) if numbers else None


def progress_of(job: JobStatus) -> int:
    """Return the job's step; in a job that never syncs, how many ops have ended."""
    return job.step or max((rank.completed for rank in job.ranks), default=-1) + 1


def sparkline(values: Sequence[float], cells: int) -> str:
    """Draw the values from left to right, the lowest as ▁ and the highest as █.

    Where there are more values than cells, each cell shows the mean of several.

    >>> sparkline([8, 4, 2, 1, 1], 10), sparkline([3, 3], 10), sparkline([0, 1, 2, 3], 2)
    ('█▄▂▁▁', '▄▄', '▁█')
    """
    count = min(len(values), max(cells, 0))
    cuts = [len(values) * i // count for i in range(count + 1)] if count else []
    means = [_mean(values[start:end]) for start, end in pairwise(cuts)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = high - low
    if not span or not isfinite(span):
        return "▄" * count
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((mean - low) / span * top)] for mean in means)
