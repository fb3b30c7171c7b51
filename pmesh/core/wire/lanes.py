"""Messages about lanes between the ranks of a job (`pmesh.agent.lanes.rendezvous`)."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from pmesh.core.values import Id, Job, Op, RosterNumber
from pmesh.core.wire.channels import Channel, Message
from pmesh.ids import Epoch, Member

_Key = Annotated[bytes, Meta(min_length=32, max_length=32)]


class _LaneMessage(Message, frozen=True):
    channel = 3


class OfferLane(_LaneMessage, frozen=True, tag=20):
    """The sender of data offers a lane, with one key for each direction, used once."""

    lane: Annotated[bytes, Meta(min_length=16, max_length=16)]
    job: Job
    born: Epoch
    number: RosterNumber
    sender: Id
    receiver: Id
    key: _Key
    """Seals the data of the offering side."""
    return_key: _Key
    """Seals the data of the accepting side, which proves that it read this offer."""
    op: Annotated[int, Meta(ge=-(2**62), le=2**62)] = -1
    """-1: an edge of the ring. Below -1: a lane for messages between two ranks. Else the lane
    carries the retained output of this op (O2)."""
    dial: bool = False
    """True if the receiver of this message dials, False if the sender does."""
    several: bool = False
    """True if the lane runs over several connections (`pmesh.core.wire.subflows`)."""


class AskResult(_LaneMessage, frozen=True, tag=21):
    """A survivor that missed the end of an op asks a holder for its result (O2)."""

    job: Job
    born: Epoch
    number: RosterNumber
    op: Op
    holder: Id
    receiver: Id


class RestLane(_LaneMessage, frozen=True, tag=27):
    """The group of a lane rests: the lane's sender asks to close it until the next op.

    The receiver answers with the same message. It agrees, and has closed its end, unless it has
    started that op.
    """

    job: Job
    born: Epoch
    number: RosterNumber
    sender: Id
    receiver: Id
    agreed: bool | None = None
    """None: this asks."""


class Splice(_LaneMessage, frozen=True, tag=35):
    """Asks the receiver to continue a connection between the two to another member, both ways."""

    ticket: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Named by the connection's preamble, in the place of a lane."""
    to: Member
    """If it is the receiver, it takes the connection as if it had come through its door."""
    dial: bool = False
    """True if the receiver of this message dials, False if the sender does."""


LaneMessage: TypeAlias = OfferLane | Splice | RestLane | AskResult
LANES: Channel[LaneMessage] = Channel(_LaneMessage.channel, LaneMessage)
