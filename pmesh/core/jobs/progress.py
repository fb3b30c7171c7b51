"""How far all ranks have come, as heartbeats report: what is stable, on whom an op waits."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from pmesh.core.jobs.rank import RankState
from pmesh.core.values import Roster, View
from pmesh.core.wire.link import RankProgress
from pmesh.ids import JobName, OpNumber, TrainerId

AnyRank = TypeVar("AnyRank", bound=RankState[Any])


def of_job(ranks: Iterable[AnyRank], roster: Roster) -> Iterator[AnyRank]:
    """The local ranks of this run of a job."""
    wanted = roster.job, roster.born
    return (rank for rank in ranks if (rank.roster.job, rank.roster.born) == wanted)


MOST_STALLS = 4
"""V11: The most times that stalls of the lanes in one op double how long they may stand still."""


class Progress:
    """What others have last reported, beside what the local ranks know."""

    def __init__(self, ranks: Sequence[RankState[Any]]) -> None:
        """`ranks` are the local ones, a list that its owner changes."""
        self._ranks = ranks
        self._reported: dict[tuple[JobName, TrainerId], RankProgress] = {}

    def hear(self, mark: RankProgress) -> RankProgress | None:
        """A peer has reported how far one of its ranks has come; returns its report before."""
        before = self._reported.get((mark.job, mark.trainer))
        self._reported[mark.job, mark.trainer] = mark
        return before

    def forget(self, view: View) -> None:
        """Keep only what is of the view's jobs, and of who is still in them."""
        kept = {(roster.job, trainer) for roster in view.rosters for trainer in roster.ids}
        self._reported = {at: mark for at, mark in self._reported.items() if at in kept}

    def of(self, roster: Roster, trainer: TrainerId) -> RankProgress | None:
        """How far any trainer of a job is known to have come; None while nothing is known."""
        for local in of_job(self._ranks, roster):
            if local.id == trainer:
                return local.progress()
        mark = self._reported.get((roster.job, trainer))
        earlier_job = mark is not None and mark.number < roster.born.counter
        return None if earlier_job else mark

    def stable(self, roster: Roster) -> int:
        """Every rank is known to have ended the ops up to this one (O2).

        Under this roster, or one before it: what has ended under a later one may have failed there,
        and a rank of ours that took it for a success has yet to learn of that (I5).
        """
        progress = [(trainer, self.of(roster, trainer.id)) for trainer in roster.trainers]
        return min(
            t.enters - 1 if mark is None or mark.number > roster.number else mark.completed
            for t, mark in progress
        )

    def late(self, rank: RankState[Any], op: OpNumber) -> tuple[TrainerId, ...]:
        """The other ranks that are not known to have started the op."""
        progress = {other: self.of(rank.roster, other) for other in rank.roster.ids}
        return tuple(
            other
            for other, mark in progress.items()
            if other != rank.id and (mark is None or mark.started < op)
        )

    def stopped(self, rank: RankState[Any], op: OpNumber) -> frozenset[TrainerId]:
        """Those on whom an op waits, and whose processes have been stopped."""
        return frozenset(
            other
            for other in self.late(rank, op)
            if (mark := self.of(rank.roster, other)) is not None and mark.stopped
        )

    def describe_wait(self, rank: RankState[Any], op: OpNumber, newcomers: int) -> str:
        """On whom an op waits, or in which step it is, for a person (I6).

        Args:
            rank: Whose op it is.
            op: The op.
            newcomers: How many trainers wait to enter the job.
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
        """O6: whether the job has run ops, but none in which others could enter it."""
        progress = [
            mark for trainer in roster.ids if (mark := self.of(roster, trainer)) is not None
        ]
        return any(m.started >= 0 for m in progress) and all(m.synced < 0 for m in progress)


def lanes_stand_still(
    rank: RankState[Any], progress: Progress, *, newcomers: int, now: float
) -> bool:
    """V6: whether an op for which all ranks are here has moved nothing for too long.

    A lane that brings nothing is broken, also while heartbeats flow. Call it again and
    again: it notes what has moved since.

    Args:
        rank: whose lanes.
        progress: who has started the op.
        newcomers: how many trainers wait to enter the job.
        now: in seconds.
    """
    op = OpNumber(rank.ledger.started)
    runs = rank.rank is not None and rank.size > 1 and rank.ledger.ended < op
    # On whom it waits is no matter of lanes; nor is what the leader has been asked about.
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
