"""Messages between a local program and its agent, over the Unix socket.

Length-prefixed MessagePack, tagged. Tensors never travel in them: they lie in arenas, shared memory
whose descriptor the agent passes along with `ArenaGranted`.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.core.values import Terms, Verdict, View
from pmesh.core.wire.link import Call, Envelope
from pmesh.errors import ProtocolError
from pmesh.ids import PRINTABLE, JobName, OpNumber, TrainerId

SESSION_VERSION = 7
SYNC_VALUES = 8
"""How many int64 each rank gives to a `sync`; its result has as many for every rank, in order."""

MAX_ROW_VALUES = 4096

MAX_COMPRESSION_TEXT = 256

ENTERS = -1
"""In the place of an op's number: the next `sync` of the job, in which the trainer enters it."""

MAX_SESSION_MESSAGE_BYTES = 1024 * 1024  # a status of 64 peers is 60 KiB
MAX_REQUEST_BYTES = 64 * 1024  # the largest, an all_to_all among 1024 ranks, takes 22 KiB

_MOST = 2**48  # bytes or values: more than a processor can address, and sums of 1024 stay small

WireDtype: TypeAlias = Literal["float32", "float64", "int32", "int64", "bool", "uint8"]
"""uint8: bytes of any dtype, which are moved and not added."""

ArenaKind: TypeAlias = Literal["input", "output"]

_Version = Annotated[int, Meta(ge=0, le=2**16 - 1)]
_Job = Annotated[JobName, Meta(min_length=1, max_length=64, pattern=PRINTABLE)]
_Trainer = Annotated[TrainerId, Meta(ge=0, le=2**32 - 1)]
"""Each entry into a job uses up one number: one a millisecond would take 50 days."""
_Trainers = Annotated[tuple[_Trainer, ...], Meta(max_length=1024)]
_Seconds = Annotated[float, Meta(gt=0)]
"""May be infinite, which is for ever; a NaN is not greater than 0."""
_Amount = Annotated[int, Meta(ge=0, le=_MOST)]
_Amounts = Annotated[tuple[_Amount, ...], Meta(max_length=1024)]
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Of calls, which a script numbers from 0 on: it has no reason to get near the end."""
_Arena = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_ArenaOrNone = Annotated[int, Meta(ge=-1, le=2**63 - 1)]


class _Message(msgspec.Struct, frozen=True):
    pass


class GroupOf(msgspec.Struct, frozen=True, array_like=True):
    """Which ranks of another job come together as a job of their own."""

    job: _Job
    members: _Trainers
    trainer: _Trainer
    """Which of them connects."""


class Connect(_Message, frozen=True, tag="connect"):
    """A trainer joins a job; answered by Joined or Refused, with StillWaiting between."""

    version: _Version
    job: _Job
    wait_for: Annotated[int, Meta(ge=1, le=1024)]
    timeout_s: _Seconds
    program: Annotated[str, Meta(max_length=256, pattern=PRINTABLE)]
    """What runs, for `pmesh status`."""
    terms: Terms = Terms()
    straggler_after_s: _Seconds = 60.0
    """How long the others wait for this trainer while its process is stopped."""
    group_of: GroupOf | None = None
    """If the job is a group's: it can't begin any more when one of these is lost, or has been told
    that the call failed in which they named each other."""


class WantArena(_Message, frozen=True, tag="want_arena"):
    """Asks for an input arena of at least this size; answered by ArenaGranted or Refused."""

    nbytes: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """A script may ask for what no machine has: it is told so by name."""


class DropArena(_Message, frozen=True, tag="drop_arena"):
    """The trainer is done with an input arena; or with an output arena: a message's, or lent."""

    arena: _Arena


class StartOp(_Message, frozen=True, tag="start_op"):
    """A collective call; answered by OpDone or OpFailed with the same number."""

    op: Annotated[OpNumber, Meta(ge=ENTERS, le=2**63 - 1)]
    """ENTERS for the `sync` in which the trainer enters its job, or comes back to it (O6)."""
    call: Call
    """`shape` is what the user passed; the arena holds it flat, in `wire_dtype`."""
    wire_dtype: WireDtype
    count: _Amount
    """Values of this rank; where there are `parts`, they say it. See `pmesh.core.ops.kinds`."""
    arena: _ArenaOrNone
    """The input arena, filled; -1 when this rank has no input (a broadcast's other ranks)."""
    timeout_s: _Seconds
    parts: _Amounts = ()
    """By rank, how many values: what each gives to a `gather` or an `all_gather`, what each gets of
    a `scatter` or a `reduce_scatter`, and of an `all_to_all` what this rank gives to each. They lie
    one behind the other."""
    parts_in: _Amounts = ()
    """Of an `all_to_all`: what this rank gets from each."""
    residual: _ArenaOrNone = -1
    """Of a compressed all-reduce: an input arena with `count` float32, which are added to this
    rank's values. -1: none."""
    residual_out: _ArenaOrNone = -1
    """Likewise, another: each attempt writes there what it rounds away here. -1: it is lost."""
    offset: _Amount = 0
    """Where in the input arena the values begin, in bytes: a multiple of what a value takes."""
    borrows: bool = False
    """Whether the trainer would keep the result where it lies, until DropArena."""


class Compresses(_Message, frozen=True, tag="compresses"):
    """How the trainer's values are compressed from now on, for `pmesh status`; not answered."""

    text: Annotated[str, Meta(max_length=MAX_COMPRESSION_TEXT, pattern=PRINTABLE)]


class Leave(_Message, frozen=True, tag="leave"):
    """The trainer ends on purpose; without it a closed socket is a crash."""


class Attach(_Message, frozen=True, tag="attach"):
    """Another connection of a trainer that has joined, for its messages; before any other request.

    Answered by Attached or Refused. Then SendMessage and ReceiveMessage, several at a time, each
    answered in its time: beside one another, and beside the ops of the trainer's first connection.
    """

    version: _Version
    job: _Job
    trainer: _Trainer


class SendMessage(_Message, frozen=True, tag="send"):
    """Sends an array to one rank; answered by MessageSent once that has received it."""

    call: _Count
    """The trainer's number for this call: the answer names it."""
    to: _Trainer
    envelope: Envelope
    arena: _ArenaOrNone
    """The input arena, filled; -1 when there are no values."""
    timeout_s: _Seconds


class ReceiveMessage(_Message, frozen=True, tag="receive"):
    """Receives an array; answered by MessageReceived."""

    call: _Count
    sources: _Trainers
    """Whose messages will do."""
    tag: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    timeout_s: _Seconds


class AskStatus(_Message, frozen=True, tag="ask_status"):
    """Asks for the agent's picture; answered by Status."""


class AskEvents(_Message, frozen=True, tag="ask_events"):
    """Asks what has happened; answered by Events."""

    after: Annotated[int, Meta(ge=-1, le=2**48)]
    """The number of the last event that the asker has; -1 for all that are kept."""


class StopAgent(_Message, frozen=True, tag="stop_agent"):
    """Asks the agent to leave the mesh and end; answered by Stopping, then end of file."""


class World(msgspec.Struct, frozen=True):
    """The ranks of a job as a trainer sees them; after an op, those who took part in it (O5)."""

    rank: int
    """-1: the trainer has not entered the job yet, or is no longer in it."""
    trainers: tuple[TrainerId, ...]
    """By rank; a trainer keeps its number while ranks change."""
    names: tuple[str, ...]
    """By rank, the name of the machine."""


class Joined(_Message, frozen=True, tag="joined"):
    """The job begins: the roster is committed. Or it runs, and this trainer may enter it (O6)."""

    world: World
    """Its rank is -1 if the job runs already: the first op must be a `sync` then."""
    view: View
    compression: Annotated[str, Meta(max_length=64)] = ""
    """How gradients are compressed where the trainer does not say it; empty: not at all."""


class Refused(_Message, frozen=True, tag="refused"):
    """A request that can't be met. A session that asked to join ends; another may go on."""

    verdict: Verdict


class ArenaGranted(_Message, frozen=True, tag="arena_granted"):
    """An arena; its descriptor comes with the last byte of this message."""

    arena: int
    kind: ArenaKind
    nbytes: int


class ArenaGone(_Message, frozen=True, tag="arena_gone"):
    """The agent no longer uses this output arena; unmap it."""

    arena: int


class OpDone(_Message, frozen=True, tag="op_done"):
    """The op's result lies in an output arena, to be read until the trainer's next op has ended.

    Or, if it is lent, until DropArena.
    """

    op: OpNumber
    arena: int
    """-1 when there is nothing to read (a barrier, no values, a broadcast's root)."""
    world: World | None = None
    """If it has changed: whose values are in the result, and who rank i is from now on (O5)."""
    clipped: int = 0
    """Of a compressed all-reduce: how many finite values became the largest that fp16 has here."""
    lent: bool = False
    """Never unless the trainer would borrow it; not if it has borrowed much already."""


class OpFailed(_Message, frozen=True, tag="op_failed"):
    """The op failed with the same verdict at all ranks."""

    op: OpNumber
    verdict: Verdict
    consumed: bool = True
    """False: an earlier op's failure, told late (I5); this number is still to be used."""
    world: World | None = None
    """If it has changed: who rank i is from now on (O5)."""


class StillWaiting(_Message, frozen=True, tag="still_waiting"):
    """Every 10 s while a call waits: for how long, and on whom (I6)."""

    op: int
    """-1: for the job to begin."""
    waited_s: float
    on: tuple[str, ...]


class Attached(_Message, frozen=True, tag="attached"):
    """The connection is the trainer's, too."""


class MessageSent(_Message, frozen=True, tag="sent"):
    """The receiver has it."""

    call: int


class MessageReceived(_Message, frozen=True, tag="received"):
    """The values lie in an output arena, to be read until DropArena."""

    call: int
    source: TrainerId
    envelope: Envelope
    arena: int
    """-1 when there are no values."""


class MessageFailed(_Message, frozen=True, tag="message_failed"):
    """The send or receive failed, which the other side need not know: a message has no verdict."""

    call: int
    verdict: Verdict


class MessageWaits(_Message, frozen=True, tag="message_waits"):
    """Every 10 s while a send or receive waits: for how long, and on whom (I6)."""

    call: int
    waited_s: float
    on: tuple[str, ...]


class Status(_Message, frozen=True, tag="status"):
    """The agent's picture, as the JSON that `pmesh status --json` prints."""

    json: bytes


class Events(_Message, frozen=True, tag="events"):
    """What has happened, as the JSON that `pmesh events --json` prints."""

    json: bytes


class Stopping(_Message, frozen=True, tag="stopping"):
    """The agent leaves."""

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
    | AskStatus
    | AskEvents
    | StopAgent
)
Reply: TypeAlias = (
    Joined
    | Refused
    | ArenaGranted
    | ArenaGone
    | OpDone
    | OpFailed
    | StillWaiting
    | Attached
    | MessageSent
    | MessageReceived
    | MessageFailed
    | MessageWaits
    | Status
    | Events
    | Stopping
)

_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Request | Reply) -> bytes:
    """The message as bytes, without a length prefix."""
    return _encoder.encode(message)


def decode_request_untrusted(data: bytes) -> Request:
    """What a local program sent; raises ProtocolError for anything else."""
    try:
        return _request_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"not a session request: {e}") from e


def decode_reply_untrusted(data: bytes) -> Reply:
    """What the agent sent; raises ProtocolError for anything else."""
    try:
        return _reply_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"not a session reply: {e}") from e
