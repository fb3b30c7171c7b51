"""Messages of a trainer's second session: what it sends to single ranks, and its job's store."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from pmesh.core.values import Verdict
from pmesh.core.wire.calls import Envelope
from pmesh.core.wire.session import (
    AnyVersion,
    ArenaGone,
    ArenaGranted,
    ArenaOrNone,
    Count,
    DropArena,
    JobText,
    Refused,
    Seconds,
    SessionDecoder,
    SessionMessage,
    TrainerNumber,
    TrainerNumbers,
    WantArena,
)
from pmesh.ids import TrainerId

MAX_STORE_DATA_BYTES = 32 * 1024  # half of a request
MAX_MESSAGES = 4096  # sends and receives of a trainer at a time; each is a task in the agent


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


class StoreCall(SessionMessage, frozen=True, tag="store"):
    """A part of a command for the job's store; the last one is answered by StoreAnswered."""

    call: Count
    """As in SendMessage."""
    data: Annotated[bytes, Meta(max_length=MAX_STORE_DATA_BYTES)]
    """Of the command (`pmesh.core.wire.store`)."""
    more: bool
    """True if other parts of the command follow."""
    timeout_s: Seconds


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


class MessageFailed(SessionMessage, frozen=True, tag="message_failed"):
    """The send or receive failed, only at this side: ranks need not agree on a message."""

    call: int
    verdict: Verdict


class MessageWaits(SessionMessage, frozen=True, tag="message_waits"):
    """Sent every 10 s while a send or receive waits, with the time and the ranks (I6)."""

    call: int
    waited_s: float
    on: tuple[str, ...]


class StoreAnswered(SessionMessage, frozen=True, tag="store_answered"):
    """A part of the answer to a command (`pmesh.core.wire.store`)."""

    call: int
    data: bytes
    more: bool
    """True if other parts of the answer follow."""


class StoreWaits(SessionMessage, frozen=True, tag="store_waits"):
    """Sent every 10 s while a command waits, with the time, and for what it waits (I6)."""

    call: int
    waited_s: float
    on: str


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
