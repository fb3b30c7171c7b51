"""What the simulated lanes carry: a value of a rank on its way round the ring, and results."""

from typing import TypeAlias

import msgspec

from pmesh.core.values import Roster
from pmesh.core.wire.calls import Call
from pmesh.ids import Epoch, JobName, Member, OpNumber, TrainerId


class OpResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of an op. Two attempts differ, so that results that mix them are caught (I4)."""

    number: int
    """The roster's number under which it came about."""
    contributors: tuple[TrainerId, ...]
    """In ring order: who took part."""
    values: tuple[int, ...]
    """What each contributor put in; of a broadcast, only the root's."""


class Token(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """What one rank puts into an op, handed on from rank to rank; or a broadcast's payload."""

    job: JobName
    born: Epoch
    number: int
    host: Member
    """Whose lane brings it: that of the rank before."""
    receiver: TrainerId
    op: OpNumber
    origin: TrainerId
    call: Call
    value: int


class Retained(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A holder's result, for a survivor that missed the end of the op (O2)."""

    job: JobName
    born: Epoch
    number: int
    host: Member
    """Whose lane brings it: the holder's."""
    receiver: TrainerId
    op: OpNumber
    call: Call
    """What the holder called: who fetches compares it too, as with any record (O8)."""
    result: OpResult


LaneMessage: TypeAlias = Token | Retained


def age(message: LaneMessage, roster: Roster | None) -> int:
    """V4: below 0 the message is late, and dropped; above 0 it is early, and waits."""
    if roster is None or message.number > roster.number:
        return 1
    return 0 if (message.born, message.number) == (roster.born, roster.number) else -1
