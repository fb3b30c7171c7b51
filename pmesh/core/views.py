"""What all members agree on: the view, its seats in ring order, and the rosters of the jobs.

Values only. How a view comes about is `pmesh.core.agreement`.
"""

from collections.abc import Sequence
from typing import Self

import msgspec

from pmesh.ids import Epoch, JobName, Member, OpNumber, Rank, Slot


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """Why an op or a job failed, in a form that travels; the same for all ranks (O3)."""

    error: str
    """The name of a class in `pmesh.errors`."""
    message: str
    ranks: tuple[Rank, ...] = ()
    """The ranks at fault: lost, late, or calling something else."""


class OpOutcome(msgspec.Struct, frozen=True, array_like=True):
    """How a view change resolved one op that was not yet stable (I4)."""

    op: OpNumber
    holders: tuple[Rank, ...] = ()
    """The ranks that completed it and hold its result; empty when it failed."""
    verdict: Verdict | None = None
    """Why it failed; None when it completed."""


class Trainer(msgspec.Struct, frozen=True, array_like=True):
    """A training process: the connection `slot` of one agent's incarnation."""

    member: Member
    slot: Slot


class Roster(msgspec.Struct, frozen=True, array_like=True):
    """The trainers of a job in ring order: rank i sends to rank i + 1."""

    job: JobName
    born: Epoch
    """The view in which the job began: with the name, the job's identity."""
    number: int
    """The counter of the epoch that last resolved its ops: it grows, also from one job to the
    next of the same name, and lanes carry it (V4)."""
    trainers: tuple[Trainer, ...]
    names: tuple[str, ...]
    """For each rank the name of its machine, for messages."""
    outcomes: tuple[OpOutcome, ...] = ()
    lost: tuple[Verdict, ...] = ()
    """Ranks that are gone, and why; from then on every op that nobody completed fails."""

    @property
    def lost_ranks(self) -> frozenset[Rank]:
        """The ranks that are gone."""
        return frozenset(rank for verdict in self.lost for rank in verdict.ranks)

    def ranks_of(self, member: Member) -> tuple[Rank, ...]:
        """The ranks whose trainers are connected to this member."""
        return tuple(Rank(i) for i, t in enumerate(self.trainers) if t.member == member)


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """One member's place in a view."""

    member: Member
    name: str
    admitted: Epoch
    """The epoch in which it joined this lineage: earlier is more senior."""
    previous: Epoch | None
    """The epoch that it had installed before this one (V2); None for a newcomer."""


class View(msgspec.Struct, frozen=True, array_like=True):
    """What the members agree on; installed views with one epoch are identical (I1)."""

    epoch: Epoch
    seats: tuple[Seat, ...]
    """In ring order."""
    rosters: tuple[Roster, ...] = ()

    @property
    def members(self) -> tuple[Member, ...]:
        """The members in ring order."""
        return tuple(seat.member for seat in self.seats)

    @property
    def by_seniority(self) -> tuple[Member, ...]:
        """The members, the most senior first: who leads next if the first is lost."""
        ordered = sorted(self.seats, key=lambda seat: (seat.admitted, seat.member))
        return tuple(seat.member for seat in ordered)

    @property
    def weight(self) -> tuple[int, Epoch]:
        """Of two views that meet, the heavier one takes the other's members in (V9)."""
        return len(self.seats), self.epoch

    def seat_of(self, member: Member) -> Seat | None:
        """The member's seat; None if it has none."""
        return next((seat for seat in self.seats if seat.member == member), None)

    def previous_epoch_of(self, member: Member) -> Epoch | None:
        """The epoch that the member had installed before this view (V2)."""
        seat = self.seat_of(member)
        return None if seat is None else seat.previous

    def roster_of(self, job: JobName) -> Roster | None:
        """The job's roster; None if it has none."""
        return next((roster for roster in self.rosters if roster.job == job), None)

    @classmethod
    def of_one(
        cls, member: Member, name: str, epoch: Epoch, rosters: Sequence[Roster] = ()
    ) -> Self:
        """The view of an agent that has met nobody, or was left behind."""
        return cls(epoch, (Seat(member, name, epoch, None),), tuple(rosters))
