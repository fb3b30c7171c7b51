"""How far all ranks have come: which ops are stable, and for which ranks an op waits."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from pmesh.core.jobs.rank import RankState
from pmesh.core.values import Roster, View
from pmesh.core.wire.views import RankProgress
from pmesh.ids import JobName, OpNumber, TrainerId

AnyRank = TypeVar("AnyRank", bound=RankState[Any])


def of_job(ranks: Iterable[AnyRank], roster: Roster) -> Iterator[AnyRank]:
    """Return the local ranks of this run of a job."""
    wanted = roster.job, roster.born
    return (rank for rank in ranks if (rank.roster.job, rank.roster.born) == wanted)


MOST_STALLS = 4
"""V11: how often, at most, a stall doubles the time that the lanes of one op may stand still."""


class Progress:
    """The progress of all ranks: what peers have reported last, and what local ranks know."""

    def __init__(self, ranks: Sequence[RankState[Any]]) -> None:
        """`ranks` is the list of local ranks, which its owner changes."""
        self._ranks = ranks
        self._reported: dict[tuple[JobName, TrainerId], RankProgress] = {}

    def hear(self, mark: RankProgress) -> RankProgress | None:
        """Store a peer's report of one of its ranks; return the report before this one."""
        before = self._reported.get((mark.job, mark.trainer))
        self._reported[mark.job, mark.trainer] = mark
        return before

    def forget(self, view: View) -> None:
        """Keep only the reports of trainers that are in a roster of the view."""
        kept = {(roster.job, trainer) for roster in view.rosters for trainer in roster.ids}
        self._reported = {at: mark for at, mark in self._reported.items() if at in kept}

    def of(self, roster: Roster, trainer: TrainerId) -> RankProgress | None:
        """Return how far a trainer of a job is known to have come; None while nothing is known."""
        for local in of_job(self._ranks, roster):
            if local.id == trainer:
                return local.progress()
        mark = self._reported.get((roster.job, trainer))
        earlier_job = mark is not None and mark.number < roster.born.counter
        return None if earlier_job else mark

    def stable(self, roster: Roster) -> int:
        """Return the op up to which every rank is known to have ended all ops (O2).

        A report under a later roster does not count: an op that ended there may have failed, and
        a local rank that took it for a success must still be told (I5).
        """
        progress = [(trainer, self.of(roster, trainer.id)) for trainer in roster.trainers]
        return min(
            t.enters - 1 if mark is None or mark.number > roster.number else mark.completed
            for t, mark in progress
        )

    def late(self, rank: RankState[Any], op: OpNumber) -> tuple[TrainerId, ...]:
        """Return the other ranks that are not known to have started the op."""
        progress = {other: self.of(rank.roster, other) for other in rank.roster.ids}
        return tuple(
            other
            for other, mark in progress.items()
            if other != rank.id and (mark is None or mark.started < op)
        )

    def stopped(self, rank: RankState[Any], op: OpNumber) -> frozenset[TrainerId]:
        """Return the ranks that an op waits for and whose processes have been stopped."""
        return frozenset(
            other
            for other in self.late(rank, op)
            if (mark := self.of(rank.roster, other)) is not None and mark.stopped
        )

    def describe_wait(self, rank: RankState[Any], op: OpNumber, newcomers: int) -> str:
        """Describe for a person which ranks an op waits for, or what it is doing (I6).

        Args:
            rank: the rank that runs the op.
            op: the op.
            newcomers: how many trainers wait to enter the job.
        """
        if shortage := rank.describe_shortage(newcomers):
            return f"missing: more ranks: {shortage}"
        stopped = self.stopped(rank, op)
        late = [
            rank.roster.describe(other) + ", whose process is stopped" * (other in stopped)
            for other in self.late(rank, op)
        ]
        if late:
            return f"missing: {', '.join(late)}"
        if rank.result_elsewhere(op) is not None:
            return "other ranks have ended it, and its result is being fetched"
        if rank.fences or rank.view_request is not None:
            return "the machines are agreeing on who takes part"
        return "all ranks have called it, and its data are on their way"

    def show_no_sync(self, roster: Roster) -> bool:
        """O6: return whether the job has run ops, but none in which others could enter it."""
        if any(trainer.enters for trainer in roster.trainers):
            return False  # one has entered, though it has not ended its first sync yet
        progress = [
            mark for trainer in roster.ids if (mark := self.of(roster, trainer)) is not None
        ]
        return any(m.started >= 0 for m in progress) and all(m.synced < 0 for m in progress)


def lanes_stand_still(
    rank: RankState[Any], progress: Progress, *, newcomers: int, now: float
) -> bool:
    """V6: return whether an op that all ranks have started has moved no data for too long.

    A lane that brings nothing is broken, even while heartbeats arrive. Call this regularly: it
    compares what has moved with the call before.

    Args:
        rank: the rank whose lanes are checked.
        progress: says which ranks have started the op.
        newcomers: how many trainers wait to enter the job.
        now: in seconds.
    """
    op = OpNumber(rank.ledger.started)
    runs = rank.rank is not None and rank.size > 1 and rank.ledger.ended < op
    # If the op waits for ranks, or for the leader's answer, its lanes are not the reason.
    if (
        not runs
        or rank.view_request
        or progress.late(rank, op)
        or rank.describe_shortage(newcomers)
    ):
        rank.last_move = None
        return False
    if rank.last_move is None or rank.last_move[0] != rank.moved:
        rank.last_move = rank.moved, now
        return False
    stalled_op, stalls = rank.stalled
    stalls *= stalled_op == op
    # V11: a ring of slow links may move nothing for longer than each of them.
    if now - rank.last_move[1] < rank.patience_s * 2.0**stalls:
        return False
    rank.stalled = op, min(stalls + 1, MOST_STALLS)
    return True
