"""Lines that ranks have printed in, one sentence about each system out; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

Kind = Literal["goes on", "ends", "hangs"]
QUIET_S = 10.0  # who has printed nothing for so long at the end of the watch hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What was seen of one rank; times are of one monotonic clock, in seconds."""

    steps: Mapping[int, float]
    """When each step began."""
    weights: Mapping[int, str]
    """A hash of the weights at each step."""
    ended: float | None = None
    error: str = ""
    """What it raised, if it said so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """What one rank got from one all-reduce; neither values nor an error: it still waits."""

    size: int = 0
    values: tuple[float, ...] = ()
    """Different values of the result."""
    ended: bool = False
    error: str = ""
    after_s: float = 0.0


def kind_of(record: RankRecord, *, until: float) -> Kind:
    """What the rank did, as seen up to this time."""
    if record.ended is not None:
        return "ends"
    last = max(record.steps.values(), default=0.0)
    return "hangs" if until - last >= QUIET_S else "goes on"


def longest_pause_s(record: RankRecord, *, since: float) -> float:
    """Between two steps that follow each other, from the last one before this time on."""
    times = sorted(record.steps.values())
    before = [at for at in times if at <= since][-1:]
    after = [at for at in times if at > since]
    return max((b - a for a, b in pairwise([*before, *after])), default=0.0)


def weights_agree(records: Sequence[RankRecord]) -> bool:
    """Whether they had equal weights at the last step that all of them have reached."""
    common = set[int].intersection(*(set(record.weights) for record in records))
    return bool(common) and len({record.weights[max(common)] for record in records}) == 1


def judge_training(
    records: Mapping[int, RankRecord], *, at: float, until: float, resumed: float | None = None
) -> str:
    """What these ranks did after something had happened to another one.

    Args:
        records: by rank, without the one that it happened to.
        at: when it happened.
        until: when the watch ended.
        resumed: when the other one was continued, if it was only stopped.
    """
    kinds = {rank: kind_of(record, until=until) for rank, record in records.items()}
    if len(set(kinds.values())) > 1:
        return "; ".join(
            f"rank {rank} {_one(records[rank], kind, at=at)}" for rank, kind in kinds.items()
        )
    kind = next(iter(kinds.values()))
    if kind == "ends":
        ends = [record.ended or at for record in records.values()]
        errors = sorted({record.error for record in records.values() if record.error})
        return f"all end after {max(ends) - at:.1f} s: {errors[0] if errors else 'no error shown'}"
    if kind == "hangs":
        lasts = [max(record.steps.values(), default=at) for record in records.values()]
        return f"hang: no step from {max(0.0, max(lasts) - at):.1f} s on until {until - at:.0f} s"
    pauses = [longest_pause_s(record, since=at) for record in records.values()]
    how = "with equal weights" if weights_agree(list(records.values())) else "with unequal weights"
    if resumed is not None and max(pauses) > 0.9 * (resumed - at):
        return f"wait {max(pauses):.1f} s, then go on {how}"
    return f"go on after {max(pauses):.2f} s {how}"


def _one(record: RankRecord, kind: Kind, *, at: float) -> str:
    if kind == "ends":
        return f"ends after {(record.ended or at) - at:.1f} s: {record.error or 'no error shown'}"
    return f"{kind}, longest pause {longest_pause_s(record, since=at):.1f} s"


def judge_call(records: Mapping[int, CallRecord]) -> str:
    """What the ranks of one all-reduce got."""
    said = {rank: _got(record) for rank, record in records.items()}
    if len(set(said.values())) == 1:
        return f"all: {next(iter(said.values()))}"
    return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(said.items()))


def _got(record: CallRecord) -> str:
    if record.error:
        return f"{record.error} (after {record.after_s:.1f} s)"
    if record.values:
        values = " and ".join(f"{value:g}" for value in record.values)
        return f"a result of {record.size:,} values, {values}"
    if record.ended:
        return f"ended without a word after {record.after_s:.1f} s"
    return f"waits, {record.after_s:.0f} s so far"


def times_of(rounds: Sequence[Mapping[str, float]], base: str) -> dict[str, tuple[float, float]]:
    """Of each system the median over the rounds in seconds, and the median of its ratio to `base`.

    A ratio is of two turns of one round, which follow each other: other work on the machine
    slows both.
    """
    return {
        name: (
            median(round_[name] for round_ in rounds),
            median(round_[name] / round_[base] for round_ in rounds),
        )
        for name in rounds[0]
    }
