"""The ranks of one launch on one machine: when they are started, ended and killed."""

import math
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from pmesh.launches.rules.restarts import (
    AT_ONCE_S,
    STEADY_S,
    count_failures,
    describe_end,
    fails_by_itself,
    wait_before_start,
)
from pmesh.launches.wire.messages import Failure

JobKind: TypeAlias = Literal["", "fixed", "open"]
"""In which a rank has completed an op: none; one that nobody can enter; one that calls `sync`."""

LOST_GRACE_S = 2  # with the silence limit of a wire, nothing outlives its starter by 5 s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHere:
    """One rank: it runs, or is due to be started again, or has ended with a code."""

    began: float
    failures: int = 0
    wait_s: float = 0.0
    due: float | None = None
    code: int | None = None
    job: JobKind = ""
    failed_with: int = 0
    """The code of its last run; 0 if it has not failed, or has completed an op since."""
    is_given_up: bool = False
    """The starter does not want it any more, and it is being killed."""

    @property
    def runs(self) -> bool:
        return self.due is None and self.code is None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRanks:
    """The ranks of this machine, by number."""

    restarts: int
    """How often in a row a rank that fails is started again here."""
    grace_s: float
    generation: int = 0
    ranks: Mapping[int, RankHere] = field(default_factory=dict[int, RankHere])
    ends: bool = False
    kill_at: float | None = None

    @property
    def is_over(self) -> bool:
        return all(rank.code is not None for rank in self.ranks.values())

    @property
    def is_killed(self) -> bool:
        """Whether the grace is over."""
        return self.ends and self.kill_at is None


@dataclass(frozen=True, slots=True)
class StartRank:
    """Start the process of this rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class SignalRank:
    """Send a signal to the process group of this rank."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class ReportEnd:
    """The rank has ended for good."""

    rank: int
    code: int


@dataclass(frozen=True, slots=True)
class Say:
    """Write a note into the output."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Warn:
    """The rank fails, or does so no more; the starter may give it up."""

    rank: int
    how: Failure


PartAction: TypeAlias = StartRank | SignalRank | ReportEnd | Say | Warn


@dataclass(frozen=True, slots=True)
class PartStep:
    """The next state, and what to do."""

    part: LocalRanks
    actions: tuple[PartAction, ...] = ()


def begin(part: LocalRanks, generation: int, ranks: Iterable[int], *, now: float) -> PartStep:
    """Start these ranks; those of an earlier generation have ended."""
    begun = {rank: RankHere(began=now) for rank in ranks}
    after = replace(part, generation=generation, ranks=begun, ends=False, kill_at=None)
    return PartStep(after, tuple(map(StartRank, begun)))


def rank_ended(part: LocalRanks, rank: int, code: int, *, now: float) -> PartStep:
    """The process of a rank has ended; `code` as in `subprocess`."""
    before = part.ranks[rank]
    ran_s = now - before.began
    failures = count_failures(before.failures, ran_s=ran_s)
    if before.is_given_up:
        code = before.failed_with  # of the run that it was given up for
    if code == 0 or part.ends or before.is_given_up or failures > part.restarts:
        after = _with(part, rank, replace(before, code=code))
        report = ReportEnd(rank, code)
        if code == 0 or part.ends or before.is_given_up or not part.restarts:
            return PartStep(after, (report,))
        text = (
            f"{describe_end(code)}, and failed {failures} times in a row, each time in less than "
            f"{STEADY_S:g} s; it is not started again"
        )
        return PartStep(after, (Say(rank, text), report))
    wait_s = wait_before_start(before.wait_s, ran_s=ran_s)
    waits = replace(before, failures=failures, wait_s=wait_s, due=now + wait_s, failed_with=code)
    text = f"{describe_end(code)}; it is started again in {wait_s:g} s"
    warning: tuple[Warn, ...] = ()
    if before.job == "fixed" or (not before.job and ran_s >= STEADY_S):
        # After a minute without an op it may have waited for a rank that has finished.
        text += ", unless another rank has finished"
        warning = (Warn(rank, "in a fixed job"),)
    elif not (before.job or before.failures) and ran_s < AT_ONCE_S and fails_by_itself(code):
        text += ", unless all ranks have failed"
        warning = (Warn(rank, "at once"),)
    return PartStep(_with(part, rank, waits), (Say(rank, text), *warning))


def op_completed(part: LocalRanks, rank: int, *, syncs: bool) -> PartStep:
    """The program of a rank that runs has completed an op; `syncs` if one of them was a `sync`."""
    here = part.ranks.get(rank)
    if here is None or not here.runs:
        return PartStep(part)
    job: JobKind = "open" if syncs or here.job == "open" else "fixed"
    actions = (Warn(rank, "no more"),) if here.failed_with else ()
    return PartStep(_with(part, rank, replace(here, job=job, failed_with=0)), actions)


def give_up(part: LocalRanks, rank: int) -> PartStep:
    """The starter does not want a rank that fails to be started again."""
    here = part.ranks.get(rank)
    if here is None or here.code is not None or not here.failed_with:
        return PartStep(part)  # the question crossed its end, or its next op
    if here.due is None:  # it was started again meanwhile
        killed = replace(here, is_given_up=True)
        return PartStep(_with(part, rank, killed), (SignalRank(rank, signal.SIGKILL),))
    ended = replace(here, due=None, code=here.failed_with)
    return PartStep(_with(part, rank, ended), (ReportEnd(rank, here.failed_with),))


def end(part: LocalRanks, number: int, *, now: float, is_lost: bool = False) -> PartStep:
    """End all ranks by a signal; those that remain after the grace are killed.

    Args:
        part: The ranks.
        number: The signal.
        now: The time.
        is_lost: The starter is lost: nobody waits for the ranks, and the grace is short.
    """
    actions: list[PartAction] = []
    ranks = dict(part.ranks)
    for rank, here in part.ranks.items():
        if here.runs:
            actions.append(SignalRank(rank, number))
        elif here.due is not None:  # it fails at this moment: nobody would start it again
            ranks[rank] = replace(here, due=None, code=-number)
            actions.append(ReportEnd(rank, -number))
    kill_at = now + min(part.grace_s, LOST_GRACE_S if is_lost else math.inf)
    before = part.kill_at if part.ends else math.inf  # None: they were killed already
    kills = None if before is None else min(before, kill_at)
    return PartStep(replace(part, ranks=ranks, ends=True, kill_at=kills), tuple(actions))


def pass_time(part: LocalRanks, *, now: float) -> PartStep:
    """Start the ranks that are due, and kill those whose grace is over."""
    actions: list[PartAction] = []
    ranks = dict(part.ranks)
    for rank, here in part.ranks.items():
        if here.due is not None and now >= here.due:
            ranks[rank] = replace(here, due=None, began=now)
            actions.append(StartRank(rank))
    if part.kill_at is not None and now >= part.kill_at:
        running = [rank for rank, here in part.ranks.items() if here.runs]
        actions += [SignalRank(rank, signal.SIGKILL) for rank in running]
        part = replace(part, kill_at=None)
    return PartStep(replace(part, ranks=ranks), tuple(actions))


def next_deadline(part: LocalRanks) -> float | None:
    """Return when `pass_time` must be called; None if nothing is due."""
    due = [here.due for here in part.ranks.values() if here.due is not None]
    if part.kill_at is not None and not part.is_over:
        due.append(part.kill_at)
    return min(due, default=None)


def _with(part: LocalRanks, rank: int, here: RankHere) -> LocalRanks:
    return replace(part, ranks={**part.ranks, rank: here})
