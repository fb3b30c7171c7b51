"""The values that all members agree on: the view, its seats in ring order, the jobs' rosters.

`pmesh.core.views.agreement` decides how a view is formed.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal, Self, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.ids import (
    MAX_COUNTER,
    MAX_NAME,
    PRINTABLE,
    Epoch,
    JobName,
    Member,
    NodeId,
    OpNumber,
    Rank,
    Slot,
    TrainerId,
    tell_apart,
)
from pmesh.texts import printable

MAX_MEMBERS = 64  # a mesh at home has 8
MAX_TRAINERS = 1024  # of one job
MAX_JOBS = 256  # no job begins while this many run in the view, groups of ranks included
MAX_JOB_BYTES = (
    64  # of its name in UTF-8: a member may have 128 trainers that wait for as many jobs
)
MAX_REPORTS = 8  # numbers that one rank reports of its step: its loss, and some more
MAX_TEXT_BYTES = 2048  # of an error: 20 ranks, each with its call
SURE_TO_FIT = MAX_TEXT_BYTES // 4  # characters: UTF-8 has up to four bytes for each

MAX_ROSTERS_BYTES = 96 * 1024  # of all jobs in a view: 600 trainers of machines with short names
MAX_SEAT_BYTES = 512  # with names of 256 bytes, as 64 characters may have, and a signature
MAX_VIEW_BYTES = MAX_ROSTERS_BYTES + MAX_MEMBERS * MAX_SEAT_BYTES + 128  # its epoch, and prefixes

# Decoding checks these bounds. Numbers stay far enough below 2^63 that sums cannot overflow.
Name: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME, pattern=PRINTABLE)]
Version: TypeAlias = Annotated[str, Meta(max_length=32, pattern=PRINTABLE)]
"""Of pmesh on a machine, as `pmesh version` prints it."""
Job: TypeAlias = Annotated[JobName, Meta(max_length=64, pattern=PRINTABLE)]
Op: TypeAlias = Annotated[OpNumber, Meta(ge=0, le=2**62)]
Id: TypeAlias = Annotated[TrainerId, Meta(ge=0, le=2**62)]
Ids: TypeAlias = Annotated[tuple[Id, ...], Meta(max_length=MAX_TRAINERS)]
Members: TypeAlias = Annotated[tuple[Member, ...], Meta(max_length=MAX_TRAINERS)]
RosterNumber: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_COUNTER)]
REPORT_NAME = r"^[A-Za-z0-9_./-]{1,24}\Z"  # as of the numbers that libraries log, "eval/loss"
Reports: TypeAlias = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=24, pattern=REPORT_NAME)], float],
    Meta(max_length=MAX_REPORTS),
]
"""The numbers that a rank has reported last, by name; they may be infinite or NaN."""
MAX_DIFFERING = 3  # ranks that a comparison names, in each heartbeat; it counts the others


class Comparison(msgspec.Struct, frozen=True, array_like=True):
    """What ranks have found in one op: whether all had the same state, such as their weights."""

    op: Op
    step: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """`mesh.step` then; 0 in a job that never syncs."""
    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z", max_length=32)]
    """The hash of the state that most ranks had, or that a `sync` gave to all."""
    ranks: Annotated[int, Meta(ge=1, le=MAX_TRAINERS)]
    """How many took part."""
    differing: Annotated[int, Meta(ge=0, le=MAX_TRAINERS)] = 0
    """How many of them had another state; newcomers in a `sync` are not counted."""
    others: Annotated[tuple[Id, ...], Meta(max_length=MAX_DIFFERING)] = ()
    """The first of these."""
    mended: bool = False
    """True if they have the same state now: the op was a `sync`."""


_ELLIPSIS = "…"
_encoder = msgspec.msgpack.Encoder()


def nbytes_of(value: object) -> int:
    """Return how many bytes a value takes in a message."""
    return len(_encoder.encode(value))


def cut_text(text: str, most: int) -> str:
    """Return the text with at most this many bytes of UTF-8; an ellipsis shows that it was cut.

    >>> cut_text("naïve", 5)
    'na…'
    """
    data = text.encode("utf-8", "replace")  # names of files may have bytes that are no text
    if len(data) <= most:
        return data.decode()
    return data[: most - len(_ELLIPSIS.encode())].decode("utf-8", "ignore") + _ELLIPSIS


class SignedName(msgspec.Struct, frozen=True, array_like=True):
    """What a machine is called, in its own words (`pmesh.core.identity.names`)."""

    name: Name
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    """By its node key, over the name and the member."""


class Removal(msgspec.Struct, frozen=True, array_like=True):
    """A member's word that a node has no place in the mesh, or has one again.

    `pmesh.core.identity.removals` signs, checks and merges them.
    """

    node: Annotated[NodeId, Meta(min_length=32, max_length=32)]
    number: Annotated[int, Meta(ge=1, le=MAX_COUNTER)]
    """One higher than that of the entry about this node that it replaces."""
    out: bool
    """False: it has a place again."""
    by: Annotated[NodeId, Meta(min_length=32, max_length=32)]
    """The member that says so."""
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    """By its node key, over all other fields."""


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """Why an op or a job failed, in a serializable form; the same for all ranks (O3)."""

    error: Name
    """The name of a class in `pmesh.errors`."""
    message: Annotated[str, Meta(max_length=MAX_TEXT_BYTES)]
    trainers: Ids = ()
    """The trainers at fault: lost, late, or with a different call."""

    def __post_init__(self) -> None:
        """Make the message printable and cut it, where it is made and where it is decoded.

        It may quote what users typed, and views contain verdicts: to refuse it would punish an
        honest agent for what its trainers or others have said.

        >>> verdict = Verdict("RankLost", "x" * 5000, tuple(map(TrainerId, range(2000))))
        >>> len(verdict.message.encode()), len(verdict.trainers)
        (2048, 1024)
        """
        message = self.message
        if not (len(message) <= SURE_TO_FIT and message.isprintable()):  # a view may have 40,000
            message = cut_text(printable(message), MAX_TEXT_BYTES)
            msgspec.structs.force_setattr(self, "message", message)
        if len(self.trainers) > MAX_TRAINERS:
            msgspec.structs.force_setattr(self, "trainers", self.trainers[:MAX_TRAINERS])


class OpOutcome(msgspec.Struct, frozen=True, array_like=True):
    """How a view change resolved one op that was not yet stable (I4)."""

    op: Op
    contributors: Ids
    """In ring order: the ranks whose values the result has, or that were left if it failed (O5)."""
    holders: Ids = ()
    """The trainers that completed it and hold its result; empty if it failed."""
    verdict: Verdict | None = None
    """Why it failed; None if it completed."""


class Trainer(msgspec.Struct, frozen=True, array_like=True):
    """A training process: the connection `slot` of one agent's incarnation."""

    id: Id
    member: Member
    slot: Annotated[Slot, Meta(ge=0, le=2**62)]
    said: SignedName
    """The name of its machine, for messages."""
    enters: Op = OpNumber(0)
    """Its first op: the job's first, or the `sync` in which it entered (O6)."""

    @property
    def name(self) -> str:
        """What its machine calls itself; others may say the same."""
        return self.said.name


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """The options of a job's trainers; if they differ, the strictest applies to all."""

    min_ranks: Annotated[int, Meta(ge=1, le=MAX_TRAINERS)] = 1
    """With fewer ranks, ops wait."""
    on_loss: Literal["continue", "raise"] = "continue"
    """What an op in flight does after a loss: continue among survivors, or raise RankLost."""
    quorum: Literal["any", "majority"] = "any"
    """Which side of a partition may continue (V10)."""

    def joined_with(self, other: "Terms") -> "Terms":
        """Return the stricter value of each option."""
        return Terms(
            min_ranks=max(self.min_ranks, other.min_ranks),
            on_loss=max(self.on_loss, other.on_loss),  # "raise" sorts after "continue"
            quorum=max(self.quorum, other.quorum),  # and "majority" after "any"
        )


class Primary(msgspec.Struct, frozen=True, array_like=True):
    """The last roster of a job that had a quorum (V10)."""

    epoch: Epoch
    voters: Members
    """The machines of its trainers, in the order in which they entered."""
    needed: Annotated[tuple[Members, ...], Meta(max_length=MAX_TRAINERS)] = ()
    """The sets of voters; a majority of each voted for it. Ops run once such majorities are known
    to have installed it, or at once if there are none, as for a job's first roster."""


class Roster(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The trainers of a job in ring order: rank i sends to rank i + 1."""

    job: Job
    born: Epoch
    """The view in which the job began: with the name, the job's identity."""
    number: RosterNumber
    """The counter of the epoch that last resolved its ops. It grows, even from one job to the next
    of the same name, and lanes carry it (V4)."""
    trainers: Annotated[tuple[Trainer, ...], Meta(max_length=MAX_TRAINERS)]
    """Rank 0 has been in the job for the longest time."""
    primary: Primary
    next_id: Id
    """The id of the next trainer that enters."""
    terms: Terms = Terms()
    quorate: bool = True
    """True if it has a quorum; if the job requires one, ops run once it is in force (V10)."""
    outcomes: tuple[OpOutcome, ...] = ()
    lost_holders: tuple[Trainer, ...] = ()
    """Lost trainers; only their agents still hold some results (O2)."""
    losses: Annotated[tuple[Verdict, ...], Meta(max_length=MAX_TRAINERS)] = ()
    """The trainers lost in the view that settled it, and why."""
    lanes: Annotated[tuple[tuple[Id, Id], ...], Meta(max_length=MAX_TRAINERS**2)] = ()
    """V4: The lanes of the number before that stay, each by its sender and its receiver."""

    @cached_property  # in a view change, each rank's report on each op reads it
    def ids(self) -> tuple[TrainerId, ...]:
        """All ranks, in ring order."""
        return tuple(trainer.id for trainer in self.trainers)

    @cached_property
    def names(self) -> dict[NodeId, str]:
        """The names of all machines of the roster, no two of them the same."""
        known = self.trainers + self.lost_holders
        return tell_apart({trainer.member.node: trainer.name for trainer in known})

    def name_of(self, trainer: Trainer) -> str:
        return self.names[trainer.member.node]

    @cached_property  # whoever waits for a job asks again and again whether there is room
    def nbytes(self) -> int:
        """How many bytes it takes in a message."""
        return nbytes_of(self)

    @cached_property
    def lasting_bytes(self) -> int:
        """How many of them do not change from one view to the next while its trainers stay."""
        settled = (self.outcomes, self.lost_holders, self.losses, self.lanes)
        return self.nbytes - sum(map(nbytes_of, settled))

    def rank_of(self, trainer: TrainerId) -> Rank | None:
        """Return the trainer's index in the ring; None if it is lost."""
        return Rank(self.ids.index(trainer)) if trainer in self.ids else None

    def trainer(self, trainer: TrainerId) -> Trainer | None:
        """Return the rank or lost holder with this id."""
        return next((t for t in self.trainers + self.lost_holders if t.id == trainer), None)

    def trainers_at(self, member: Member) -> tuple[Trainer, ...]:
        return tuple(trainer for trainer in self.trainers if trainer.member == member)

    def describe(self, trainer: TrainerId) -> str:
        """Return the rank with its machine's name, for messages."""
        rank = self.rank_of(trainer)
        known = self.trainer(trainer)
        if rank is None or known is None:
            return f"a lost rank ({self.name_of(known)})" if known else "a lost rank"
        return f"rank {rank} ({self.name_of(known)})"


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """One member's place in a view."""

    member: Member
    said: SignedName
    """Nobody can give the machine another name; two machines may say the same."""
    admitted: Epoch
    """The epoch in which it joined this lineage: earlier is more senior."""
    previous: Epoch | None
    """The epoch that it had installed before this one (V2); None for a newcomer."""

    @property
    def name(self) -> str:
        """What the machine calls itself; others may say the same."""
        return self.said.name


class View(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The view that members agree on; installed views of one epoch are identical (I1)."""

    epoch: Epoch
    seats: Annotated[tuple[Seat, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]
    """In ring order."""
    rosters: Annotated[tuple[Roster, ...], Meta(max_length=MAX_JOBS)] = ()

    def __repr__(self) -> str:
        machines = ", ".join(printable(seat.name) for seat in self.seats)
        jobs = "".join(f"; job {each.job!r} of {len(each.trainers)}" for each in self.rosters)
        return f"<View {self.epoch.counter}: {machines}{jobs}>"

    @cached_property  # each message reads these two
    def members(self) -> tuple[Member, ...]:
        """The members, in ring order."""
        return tuple(seat.member for seat in self.seats)

    @cached_property
    def by_seniority(self) -> tuple[Member, ...]:
        """The members, the most senior first: each leads once those before it are lost."""
        ordered = sorted(self.seats, key=lambda seat: (seat.admitted, seat.member))
        return tuple(seat.member for seat in ordered)

    @property
    def weight(self) -> tuple[int, Epoch]:
        """When two views meet, the heavier one takes in the members of the other (V9)."""
        return len(self.seats), self.epoch

    def seat_of(self, member: Member) -> Seat | None:
        return next((seat for seat in self.seats if seat.member == member), None)

    def previous_epoch_of(self, member: Member) -> Epoch | None:
        """Return the epoch that the member had installed before this view (V2)."""
        seat = self.seat_of(member)
        return None if seat is None else seat.previous

    def roster_of(self, job: JobName) -> Roster | None:
        return next((roster for roster in self.rosters if roster.job == job), None)

    @classmethod
    def of_one(
        cls, member: Member, said: SignedName, epoch: Epoch, rosters: Sequence[Roster] = ()
    ) -> Self:
        """Return the view of an agent that has met no other, or was left behind."""
        return cls(epoch, (Seat(member, said, epoch, None),), tuple(rosters))


_view_decoder = msgspec.msgpack.Decoder(View)


def decoded(view: View) -> View:
    """Return the view as others get it; raise msgspec.MsgspecError if no bounds allow that."""
    return _view_decoder.decode(_encoder.encode(view))
