"""What a rank reports, what a measurement has come to, and the bars."""

from collections.abc import Sequence
from typing import Literal, Self

import msgspec

from tools.lab.report import BarVerdict, at_least, at_most
from tools.lab.units import percentile


class StepLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a worker's output."""

    what: Literal["joined", "step", "said", "error"]
    at: float
    """Seconds of the machine's monotonic clock."""
    took_s: float = 0.0
    ranks: int = 0
    """How many took part in the step."""
    says: str = ""


class StepsTaken(msgspec.Struct, frozen=True, kw_only=True):
    """One system on one network, with one seed."""

    steps: int
    """At the rank that has made the fewest."""
    median_s: float
    """Of the steps of all ranks."""
    p95_s: float
    worst_s: float
    """An unfinished step counts, too."""
    alone: int
    """Steps in which not all ranks took part."""
    views: int
    """New views after the start."""
    errors: int

    @classmethod
    def of(
        cls, ranks: Sequence[Sequence[StepLine]], *, began: float, ended: float, views: int
    ) -> Self:
        """Sum up what the ranks have said from `began` to `ended`."""
        took: list[float] = []
        counts: list[int] = []
        alone = errors = 0
        for lines in ranks:
            steps = [line for line in lines if line.what == "step" and began <= line.at <= ended]
            unfinished_s = ended - max([began, *(line.at for line in steps)])
            took += [*(line.took_s for line in steps), unfinished_s]
            counts.append(len(steps))
            alone += sum(line.ranks < len(ranks) for line in steps)
            errors += sum(line.what == "error" and line.at <= ended for line in lines)
        return cls(
            steps=min(counts),
            median_s=percentile(took, 50),
            p95_s=percentile(took, 95),
            worst_s=max(took),
            alone=alone,
            views=views,
            errors=errors,
        )

    def __str__(self) -> str:
        return (
            f"{self.steps} steps; median {self.median_s:.3f}, p95 {self.p95_s:.3f}, worst "
            f"{self.worst_s:.2f} s; {self.views} views, {self.alone} steps without all ranks, "
            f"{self.errors} errors"
        )


def verdicts_of(ours: StepsTaken, gloo: StepsTaken, *, short: bool) -> list[BarVerdict]:
    """Return how pmesh's outcome holds against the bars; if short, those of safety."""
    verdicts = _of_safety(ours)
    if not short:
        verdicts += [
            at_most("views", ours.views, goal=0, form="{:.0f}"),
            at_least("steps over gloo's", ours.steps / max(gloo.steps, 1), goal=1.0, floor=0.9),
            at_most("p95 over gloo's", ours.p95_s / gloo.p95_s, goal=1.2),
            at_most("worst over gloo's", ours.worst_s / gloo.worst_s, goal=2.0),
        ]
    return verdicts


def verdicts_of_calls(
    ours: StepsTaken, gloo: StepsTaken, round_trip_s: float, *, short: bool
) -> list[BarVerdict]:
    """Return how pmesh's small calls hold against the round trip; if short, only their safety."""
    if short:
        return _of_safety(ours)
    what = (
        f"median in round trips of {round_trip_s:.4f} s (gloo {gloo.median_s / round_trip_s:.2f})"
    )
    return [*_of_safety(ours), at_most(what, ours.median_s / round_trip_s, goal=1.1)]


def _of_safety(ours: StepsTaken) -> list[BarVerdict]:
    return [
        at_most("steps without all ranks", ours.alone, goal=0, form="{:.0f}"),
        at_most("errors", ours.errors, goal=0, form="{:.0f}"),
    ]
