"""Messages between a local program and its agent, over the Unix socket.

They are tagged, length-prefixed MessagePack. Tensors never travel in them: they lie in arenas,
shared memory whose descriptor the agent passes with `ArenaGranted`.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.core.values import MAX_MEMBERS, Name, Terms, Verdict, View
from pmesh.core.wire.calls import Call, Envelope
from pmesh.core.wire.launches import LaunchReply, LaunchRequest
from pmesh.errors import ProtocolError
from pmesh.ids import PRINTABLE, JobName, OpNumber, TrainerId

SESSION_VERSION = 11
SYNC_VALUES = 8
"""The number of int64 that each rank gives to a `sync`; its result has as many for each rank."""

MAX_ROW_VALUES = 4096

MAX_COMPRESSION_TEXT = 256

ENTERS = -1
"""Instead of an op's number: the next `sync` of the job, in which the trainer enters it."""

MAX_SESSION_MESSAGE_BYTES = 1024 * 1024  # a status of 64 peers is 60 KiB
MAX_REQUEST_BYTES = 64 * 1024  # the largest, an all_to_all among 1024 ranks, takes 22 KiB

MAX_STORE_DATA_BYTES = 32 * 1024  # half of a request
MAX_MESSAGES = 4096  # sends and receives of a trainer at a time; each is a task in the agent

_MOST = 2**48  # bytes or values: no processor can address as many, and sums of 1024 fit an int64

WireDtype: TypeAlias = Literal[
    "complex128",
    "float64",
    "complex64",
    "float32",
    "int64",
    "uint64",
    "int32",
    "uint32",
    "int16",
    "uint16",
    "int8",
    "uint8",
    "bool",
]
"""Numpy's names; of each kind the widest first."""

ArenaKind: TypeAlias = Literal["input", "output"]

_Version = Annotated[int, Meta(ge=0, le=2**16 - 1)]
_Job = Annotated[JobName, Meta(min_length=1, max_length=64, pattern=PRINTABLE)]
_Trainer = Annotated[TrainerId, Meta(ge=0, le=2**32 - 1)]
"""Each entry into a job takes one number: one per millisecond would last 50 days."""
_Trainers = Annotated[tuple[_Trainer, ...], Meta(max_length=1024)]
_Seconds = Annotated[float, Meta(gt=0)]
"""May be infinite, which means forever; a NaN is not greater than 0."""
_Amount = Annotated[int, Meta(ge=0, le=_MOST)]
_Amounts = Annotated[tuple[_Amount, ...], Meta(max_length=1024)]
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A script numbers its calls from 0 and has no reason to get near the end."""
_Arena = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_ArenaOrNone = Annotated[int, Meta(ge=-1, le=2**63 - 1)]


class _Message(msgspec.Struct, frozen=True):
    pass


class GroupOf(msgspec.Struct, frozen=True, array_like=True):
    """The ranks of another job that form this job, a group."""

    job: _Job
    members: _Trainers
    trainer: _Trainer
    """The one that connects."""


class Connect(_Message, frozen=True, tag="connect"):
    """A trainer joins a job; answered by Joined or Refused, with StillWaiting between."""

    version: _Version
    job: _Job
    wait_for: Annotated[int, Meta(ge=1, le=1024)]
    timeout_s: _Seconds
    program: Annotated[str, Meta(max_length=256, pattern=PRINTABLE)]
    """The name of the program, for `pmesh status`."""
    terms: Terms = Terms()
    straggler_after_s: _Seconds = 60.0
    """How long the others wait for this trainer while its process is stopped."""
    group_of: GroupOf | None = None
    """Set if the job is a group. It can no longer begin once one of these ranks is lost, or got an
    error from the call that forms the group."""
    place: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    """Its rank among those that `pmesh run` has started, which it has if the job begins with it and
    the ring has not changed since; -1 for none."""


class WantArena(_Message, frozen=True, tag="want_arena"):
    """Requests an input arena of at least this size; answered by ArenaGranted or Refused."""

    nbytes: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """May be more than any machine has: the answer is then a named error."""
    lasting: bool = False
    """True if the trainer keeps values there between ops; else the agent may take it back while the
    trainer's group rests."""


class DropArena(_Message, frozen=True, tag="drop_arena"):
    """The trainer no longer uses an input arena, or an output arena of a message or a loan."""

    arena: _Arena


class StartOp(_Message, frozen=True, tag="start_op"):
    """A collective call; answered by OpDone or OpFailed with the same number."""

    op: Annotated[OpNumber, Meta(ge=ENTERS, le=2**63 - 1)]
    """ENTERS for the `sync` in which the trainer enters its job, or comes back to it (O6)."""
    call: Call
    """`shape` is that of the user's array; the arena holds it flat, in `wire_dtype`."""
    wire_dtype: WireDtype
    count: _Amount
    """The values of this rank; if there are `parts`, they decide. See `pmesh.core.ops.kinds`."""
    arena: _ArenaOrNone
    """The input arena, filled; -1 when this rank has no input (a broadcast's other ranks)."""
    timeout_s: _Seconds
    parts: _Amounts = ()
    """The number of values for each rank, stored one after another: what each rank gives to a
    `gather` or `all_gather`, what each gets of a `scatter` or `reduce_scatter`, and what this rank
    gives to each in an `all_to_all`."""
    parts_in: _Amounts = ()
    """In an `all_to_all`: the number of values that this rank gets from each."""
    residual: _ArenaOrNone = -1
    """In a compressed all-reduce: an input arena with `count` float32 that are added to this rank's
    values; -1 for none."""
    residual_out: _ArenaOrNone = -1
    """Another such arena: each attempt writes its rounding errors there; -1 drops them."""
    offset: _Amount = 0
    """The start of the values in the input arena, in bytes: a multiple of the size of a value."""
    borrows: bool = False
    """True if the trainer wants to keep the result in place until DropArena."""
    step: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """In a `sync`: how often the trainer has synced with this one, for `pmesh status`."""


class Compresses(_Message, frozen=True, tag="compresses"):
    """How the trainer compresses values from now on, for `pmesh status`; no answer."""

    text: Annotated[str, Meta(max_length=MAX_COMPRESSION_TEXT, pattern=PRINTABLE)]


class Leave(_Message, frozen=True, tag="leave"):
    """The trainer ends on purpose; without it a closed socket is a crash."""


class Attach(_Message, frozen=True, tag="attach"):
    """The first request on a second connection of a joined trainer, for messages and its store.

    Answered by Attached or Refused. Several SendMessage, ReceiveMessage and StoreCall may follow at
    a time, in parallel with each other and with the ops of the trainer's first connection.
    """

    version: _Version
    job: _Job
    trainer: _Trainer


class SendMessage(_Message, frozen=True, tag="send"):
    """Sends an array to one rank; answered by MessageSent once that rank has received it."""

    call: _Count
    """The trainer's number for this call, repeated in the answer."""
    to: _Trainer
    envelope: Envelope
    arena: _ArenaOrNone
    """The input arena, filled; -1 when there are no values."""
    timeout_s: _Seconds


class ReceiveMessage(_Message, frozen=True, tag="receive"):
    """Receives an array; answered by MessageReceived."""

    call: _Count
    sources: _Trainers
    """The trainers whose messages match."""
    tag: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    timeout_s: _Seconds


class StoreCall(_Message, frozen=True, tag="store"):
    """A part of a command for the job's store; the last one is answered by StoreAnswered."""

    call: _Count
    """As in SendMessage."""
    data: Annotated[bytes, Meta(max_length=MAX_STORE_DATA_BYTES)]
    """Of the command (`pmesh.core.wire.store`)."""
    more: bool
    """True if other parts of the command follow."""
    timeout_s: _Seconds


class AskStatus(_Message, frozen=True, tag="ask_status"):
    """Requests the agent's status; answered by Status."""


class AskEvents(_Message, frozen=True, tag="ask_events"):
    """Requests the agent's events; answered by Events."""

    after: Annotated[int, Meta(ge=-1, le=2**48)]
    """The number of the last event that the caller has; -1 for all that are kept."""


class AskPing(_Message, frozen=True, tag="ask_ping"):
    """Requests to try every way to a machine; answered by Refused, or WayTrieds and Pinged."""

    name: Annotated[str, Meta(max_length=256, pattern=PRINTABLE)]
    """Of the machine, as in the view."""


class AskMachines(_Message, frozen=True, tag="ask_machines"):
    """Asks whose these names are; answered by Refused or Machines."""

    names: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]
    """Each is the name of a machine, its id, or the first 8 or more characters of that."""


class ForgetName(_Message, frozen=True, tag="forget_name"):
    """Lets a machine have a name that was another one's; answered by Refused or Machines."""

    name: Name


class StopAgent(_Message, frozen=True, tag="stop_agent"):
    """Asks the agent to leave the mesh and end; answered by Stopping, then end of file."""


class World(msgspec.Struct, frozen=True):
    """The ranks of a job as a trainer sees them; after an op, its contributors (O5)."""

    rank: int
    """-1 if the trainer has not entered the job yet, or is no longer in it."""
    trainers: tuple[TrainerId, ...]
    """By rank; a trainer keeps its number while ranks change."""
    names: tuple[str, ...]
    """By rank, the name of the machine."""


class Joined(_Message, frozen=True, tag="joined"):
    """The job begins with a committed roster, or already runs and the trainer may enter it (O6)."""

    world: World
    """Its rank is -1 if the job already runs: then the first op must be a `sync`."""
    view: View
    compression: Annotated[str, Meta(max_length=64)] = ""
    """The default compression of gradients; empty for none."""


class Refused(_Message, frozen=True, tag="refused"):
    """The request cannot be met. A session that asked to join ends; another may continue."""

    verdict: Verdict


class ArenaGranted(_Message, frozen=True, tag="arena_granted"):
    """An arena; its descriptor comes with the last byte of this message."""

    arena: int
    kind: ArenaKind
    nbytes: int


class ArenaGone(_Message, frozen=True, tag="arena_gone"):
    """The agent no longer uses this output arena; unmap it.

    Or it has taken an input arena back, and does not begin the op that names it: name another.
    """

    arena: int


class OpDone(_Message, frozen=True, tag="op_done"):
    """The result lies in an output arena until the next op ends; if lent, until DropArena."""

    op: OpNumber
    arena: int
    """-1 if there is nothing to read (a barrier, no values, a broadcast's root)."""
    world: World | None = None
    """If it has changed: the contributors of the result, and the ranks from now on (O5)."""
    clipped: int = 0
    """In a compressed all-reduce: the number of finite values clipped to the largest of fp16."""
    lent: bool = False
    """Only if the trainer wants to borrow it and has not borrowed too much already."""


class OpFailed(_Message, frozen=True, tag="op_failed"):
    """The op failed with the same verdict at all ranks."""

    op: OpNumber
    verdict: Verdict
    consumed: bool = True
    """False if this reports the failure of an earlier op (I5); this number is not used up."""
    world: World | None = None
    """If it has changed: the ranks from now on (O5)."""


class StillWaiting(_Message, frozen=True, tag="still_waiting"):
    """Sent every 10 s while a call waits, with the time and the ranks waited for (I6)."""

    op: int
    """-1 while the job has not begun: then it is sent each second, and `on` says all of it."""
    waited_s: float
    on: tuple[str, ...]
    """Sentences for a person: on whom it waits, or in which step it is."""


class RanksLost(_Message, frozen=True, tag="ranks_lost"):
    """Sent before the reply of the call in which ranks were lost, or of the first after they left.

    Not where a loss raises: there the reply says it.
    """

    losses: tuple[str, ...]
    """A sentence for each."""


class Attached(_Message, frozen=True, tag="attached"):
    """The connection now belongs to the trainer."""


class MessageSent(_Message, frozen=True, tag="sent"):
    """The receiver has the message."""

    call: int


class MessageReceived(_Message, frozen=True, tag="received"):
    """The values lie in an output arena until DropArena."""

    call: int
    source: TrainerId
    envelope: Envelope
    arena: int
    """-1 if there are no values."""


class MessageFailed(_Message, frozen=True, tag="message_failed"):
    """The send or receive failed, only at this side: ranks need not agree on a message."""

    call: int
    verdict: Verdict


class MessageWaits(_Message, frozen=True, tag="message_waits"):
    """Sent every 10 s while a send or receive waits, with the time and the ranks (I6)."""

    call: int
    waited_s: float
    on: tuple[str, ...]


class StoreAnswered(_Message, frozen=True, tag="store_answered"):
    """A part of the answer to a command (`pmesh.core.wire.store`)."""

    call: int
    data: bytes
    more: bool
    """True if other parts of the answer follow."""


class StoreWaits(_Message, frozen=True, tag="store_waits"):
    """Sent every 10 s while a command waits, with the time, and for what it waits (I6)."""

    call: int
    waited_s: float
    on: str


class StatusReply(_Message, frozen=True, tag="status"):
    """The agent's status, as the JSON that `pmesh status --json` prints."""

    json: bytes


class Events(_Message, frozen=True, tag="events"):
    """The agent's events, as the JSON that `pmesh events --json` prints."""

    json: bytes


class WayTried(_Message, frozen=True, kw_only=True, tag="way_tried"):
    """One way to the machine has answered, or can't be used."""

    interface: str
    """The local one; "" if it is not known."""
    remote: str = ""
    """The machine's interface; "" if the local one leads to none."""
    kind: str = ""
    """The worse of the kinds of both."""
    address: str = ""
    """HOST:PORT of the machine."""
    speed_mbit_s: int = 0
    """The lower of what both claim; 0 if one does not say."""
    mbit_s: int = 0
    """What was measured in the slower direction; 0 while unknown."""
    rtt_ms: float | None = None
    """None if it has not answered."""
    why_not: str = ""


class Pinged(_Message, frozen=True, kw_only=True, tag="pinged"):
    """All ways have been tried; messages go over this one. Both interfaces are "" if over none."""

    interface: str = ""
    remote: str = ""
    why: str = ""


class Machines(_Message, frozen=True, tag="machines"):
    """The machines that were asked for."""

    ids: tuple[str, ...]
    """Their node ids as text, in the order of the question."""


class Stopping(_Message, frozen=True, tag="stopping"):
    """The agent leaves the mesh and ends."""

    pid: int


Request: TypeAlias = (
    Connect
    | WantArena
    | DropArena
    | StartOp
    | Compresses
    | Leave
    | Attach
    | SendMessage
    | ReceiveMessage
    | StoreCall
    | AskStatus
    | AskEvents
    | AskPing
    | AskMachines
    | ForgetName
    | StopAgent
    | LaunchRequest
)
Reply: TypeAlias = (
    Joined
    | Refused
    | ArenaGranted
    | ArenaGone
    | OpDone
    | OpFailed
    | StillWaiting
    | RanksLost
    | Attached
    | MessageSent
    | MessageReceived
    | MessageFailed
    | MessageWaits
    | StoreAnswered
    | StoreWaits
    | StatusReply
    | Events
    | WayTried
    | Pinged
    | Machines
    | Stopping
    | LaunchReply
)

_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Request | Reply) -> bytes:
    """Return the message as bytes, without a length prefix."""
    return _encoder.encode(message)


def decode_request_untrusted(data: bytes) -> Request:
    """Decode a request of a local program; raise ProtocolError for anything else."""
    try:
        return _request_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"not a session request: {e}") from e


def decode_reply_untrusted(data: bytes) -> Reply:
    """Decode a reply of the agent; raise ProtocolError for anything else."""
    try:
        return _reply_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"not a session reply: {e}") from e
