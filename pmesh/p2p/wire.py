"""Messages about what one rank sends to another (`pmesh.p2p.agent`)."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.core.values import Id, Job, RosterNumber
from pmesh.core.wire.calls import Envelope
from pmesh.core.wire.channels import Channel, Message
from pmesh.core.wire.session import (
    AnyVersion,
    ArenaGone,
    ArenaGranted,
    ArenaOrNone,
    Count,
    DropArena,
    JobText,
    MessageFailed,
    Refused,
    Seconds,
    SessionDecoder,
    SessionMessage,
    TrainerNumber,
    TrainerNumbers,
    WantArena,
)
from pmesh.ids import Epoch, TrainerId
from pmesh.store.wire import StoreAnswered, StoreCall, StoreWaits

MAX_MESSAGES = 4096  # sends and receives of a trainer at a time; each is a task in the agent
MAX_TAG = 2**31 - 1  # of users, as in MPI and torch; services of pmesh have those above
EAGER_BYTES = 16 * 1024  # a token's activations of the largest open models
_Count = Annotated[int, Meta(ge=0, le=2**62)]
_OpOrNone = Annotated[int, Meta(ge=-1, le=2**62)]


# --- between two agents


class MessageAddress(msgspec.Struct, frozen=True, array_like=True):
    """The unique address of a message of a job, across all views (O4)."""

    job: Job
    born: Epoch
    sender: Id
    receiver: Id
    sequence: _Count
    """Its number among all messages from this sender to this receiver, from 0, of any tag."""


class P2PLinkMessage(Message, frozen=True):
    """A message between two agents about a point-to-point message."""

    channel = 4
    address: MessageAddress


class AnnounceMessage(P2PLinkMessage, frozen=True, tag=23):
    """The sender keeps a message for the receiver; repeated until it is settled."""

    envelope: Envelope
    first: _Count
    """Every message of this pair below this number is settled: delivered or withdrawn."""
    before: _OpOrNone
    """The previous unsettled message of the same tag, to be delivered first; -1 if none."""
    values: Annotated[bytes, Meta(max_length=EAGER_BYTES)] = b""
    """All of the message's, or none."""


class RequestMessage(P2PLinkMessage, frozen=True, tag=24):
    """A trainer of the receiver waits for the message: its values may be sent."""

    number: RosterNumber
    """The roster's number, as in OfferLane."""
    lane: Annotated[int, Meta(ge=0, le=2**61)]
    """The number of the lane among the successive lanes of this pair under this roster, from 0."""
    transfer: _Count
    """Its index among the messages on this lane, from 0."""


class MessageDelivered(P2PLinkMessage, frozen=True, tag=25):
    """The receiver's trainer has the message: the send is complete."""


class MessageWithdrawn(P2PLinkMessage, frozen=True, tag=26):
    """The sender no longer keeps the message."""


P2PMessage: TypeAlias = AnnounceMessage | RequestMessage | MessageDelivered | MessageWithdrawn
P2P: Channel[P2PMessage] = Channel(P2PLinkMessage.channel, P2PMessage)


# --- between a trainer and its agent


class Attach(SessionMessage, frozen=True, tag="attach"):
    """The first request on a second connection of a joined trainer, for messages and its store.

    Answered by Attached or Refused. Several SendMessage, ReceiveMessage and StoreCall may follow at
    a time, in parallel with each other and with the ops of the trainer's first connection.
    """

    version: AnyVersion
    job: JobText
    trainer: TrainerNumber


class SendMessage(SessionMessage, frozen=True, tag="send"):
    """Sends an array to one rank; answered by MessageSent once that rank has received it."""

    call: Count
    """The trainer's number for this call, repeated in the answer."""
    to: TrainerNumber
    envelope: Envelope
    arena: ArenaOrNone
    """The input arena, filled; -1 when there are no values."""
    timeout_s: Seconds


class ReceiveMessage(SessionMessage, frozen=True, tag="receive"):
    """Receives an array; answered by MessageReceived."""

    call: Count
    sources: TrainerNumbers
    """The trainers whose messages match."""
    tag: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    timeout_s: Seconds
    borrows: bool = False
    """The trainer may keep the arena for as long as it likes, if there is room for that."""


class Attached(SessionMessage, frozen=True, tag="attached"):
    """The connection now belongs to the trainer."""


class MessageSent(SessionMessage, frozen=True, tag="sent"):
    """The receiver has the message."""

    call: int


class MessageReceived(SessionMessage, frozen=True, tag="received"):
    """The values lie in an output arena until DropArena."""

    call: int
    source: TrainerId
    envelope: Envelope
    arena: int
    """-1 if there are no values."""
    lent: bool = False
    """The trainer may keep the arena; else it drops it at once, as other messages need room."""


class MessageWaits(SessionMessage, frozen=True, tag="message_waits"):
    """Sent every 10 s while a send or receive waits, with the time and the ranks (I6)."""

    call: int
    waited_s: float
    on: tuple[str, ...]


AttachedRequest: TypeAlias = (
    Attach | SendMessage | ReceiveMessage | StoreCall | WantArena | DropArena
)
AttachedReply: TypeAlias = (
    Attached
    | Refused
    | ArenaGranted
    | ArenaGone
    | MessageSent
    | MessageReceived
    | MessageFailed
    | MessageWaits
    | StoreAnswered
    | StoreWaits
)
ATTACHED_REQUESTS: SessionDecoder[AttachedRequest] = SessionDecoder("request", AttachedRequest)
ATTACHED_REPLIES: SessionDecoder[AttachedReply] = SessionDecoder("reply", AttachedReply)
