"""What is said about a job's store: commands, their answers, and what its copies tell each other.

`pmesh.store.rules.table` carries commands out, `pmesh.store.rules.replica` exchanges the rest.
"""

from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from pmesh.core.values import MAX_TRAINERS, Id, Job
from pmesh.core.wire.channels import Channel, Message
from pmesh.core.wire.session import Count, Seconds, SessionMessage
from pmesh.core.wire.stream import PART_BYTES
from pmesh.errors import ProtocolError
from pmesh.ids import PRINTABLE

MAX_KEY_BYTES = 1024
MAX_VALUE_BYTES = 1024 * 1024
MAX_KEYS = MAX_TRAINERS  # of one call: ranks mostly wait for a key of each
MAX_COMMAND_BYTES = 2 * MAX_VALUE_BYTES + 64 * 1024  # a compare_set has two values
MAX_STORE_DATA_BYTES = 32 * 1024  # of a command, in one request: half of it
MAX_STORE_BYTES = 64 * 1024 * 1024
KEY_OVERHEAD_BYTES = 128  # what Python needs for a key and its value beside their bytes
MAX_REFUSAL = 16 * 1024  # characters; a key that is quoted in it may have ten for each of its own

NO_COPY = -1

_Key = Annotated[str, Meta(max_length=MAX_KEY_BYTES)]
_KeyList = Annotated[tuple[_Key, ...], Meta(max_length=MAX_KEYS)]
_Value = Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]
_Count = Annotated[int, Meta(ge=0, le=2**62)]
_Position = Annotated[int, Meta(ge=NO_COPY, le=2**62)]


class _StoreMessage(msgspec.Struct, frozen=True, array_like=True):
    pass


# --- what a rank asks for


class Set(_StoreMessage, frozen=True, tag=1):
    """Let the key have this value."""

    key: _Key
    value: _Value


class Add(_StoreMessage, frozen=True, tag=2):
    """Add to the number that the key has, 0 if it has none; the answer is the sum."""

    key: _Key
    amount: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class CompareSet(_StoreMessage, frozen=True, tag=3):
    """Let the key have `desired` if it has `expected`, or nothing where that is empty.

    The answer is True, or what the key has instead.
    """

    key: _Key
    expected: _Value
    desired: _Value


class Append(_StoreMessage, frozen=True, tag=4):
    """Put these bytes behind the key's value."""

    key: _Key
    value: _Value


class Delete(_StoreMessage, frozen=True, tag=5):
    """Remove the key; the answer is whether it was there."""

    key: _Key


class Get(_StoreMessage, frozen=True, tag=6):
    """Wait until the key is set; the answer is its value."""

    key: _Key


class Wait(_StoreMessage, frozen=True, tag=7):
    """Wait until all of these keys are set."""

    keys: _KeyList


class Check(_StoreMessage, frozen=True, tag=8):
    """Ask whether all of these keys are set."""

    keys: _KeyList


class Keys(_StoreMessage, frozen=True, tag=9):
    """Ask for all keys that begin so; refused if they take more than a value may."""

    prefix: _Key


Write: TypeAlias = Set | Add | CompareSet | Append | Delete
Read: TypeAlias = Get | Wait | Check | Keys
Command: TypeAlias = Write | Read


class Answer(_StoreMessage, frozen=True):
    """What came of a command."""

    value: bool | int | bytes | tuple[str, ...] | None = None
    refused: Annotated[str, Meta(max_length=MAX_REFUSAL, pattern=PRINTABLE)] = ""
    """Why it can't be done, in words; the store is as it was."""


# --- what the copies of one store say to each other


class StorePart(Message, frozen=True, tag=1):
    """A part of what two copies of a job's store say to each other (`pmesh.store.rules.pipe`)."""

    channel = 5
    job: Job
    roster: _Count
    """A hash of the roster under which it is said: both ends must have installed the same one."""
    offset: _Count
    """Of the first byte of `data` in all that the sender has said under this roster."""
    read: _Count
    """How many bytes of the receiver's the sender has read."""
    data: Annotated[bytes, Meta(max_length=PART_BYTES)] = b""


STORES: Channel[StorePart] = Channel(StorePart.channel, StorePart)


class Report(_StoreMessage, frozen=True, tag=20):
    """To the coordinator of a new roster: how far the sender's copy has come.

    Reports are compared, and nobody counts on from one: a false one leads to no position that can't
    be sent.
    """

    roster: _Position
    """The number of the last roster under which the copies were made equal; NO_COPY if the sender
    has only just entered the job."""
    position: _Count
    """How many entries its copy has had since."""


class Fetch(_StoreMessage, frozen=True, tag=21):
    """From the coordinator, to the copy that has come furthest, once: send me your copy."""


class Ask(_StoreMessage, frozen=True, tag=22):
    """To the coordinator: carry out a command for one of the sender's ranks."""

    trainer: Id
    call: _Count
    """The number of the call among those of this trainer."""
    command: Command


class GiveUp(_StoreMessage, frozen=True, tag=23):
    """To the coordinator: nobody waits for the answer any more."""

    trainer: Id
    call: _Count


class Entry(_StoreMessage, frozen=True, tag=24):
    """The next step of all copies, as the coordinator has ordered it."""

    position: _Count
    """From 1 on under each roster; the entry before has one less."""
    trainer: Id
    call: _Count
    command: Write | None
    """None if nothing changes: the coordinator only asks whether the roster is still in force."""


class Have(_StoreMessage, frozen=True, tag=25):
    """To the coordinator: the sender's copy has all entries of this roster up to this one."""

    position: _Count
    """0 if it is as the coordinator's was before the first entry."""


class Answered(_StoreMessage, frozen=True, tag=26):
    """From the coordinator: what came of a command."""

    trainer: Id
    call: _Count
    answer: Answer


class CopyBegins(_StoreMessage, frozen=True, tag=27):
    """A whole copy follows, for one that has another or none."""


class CopyValue(_StoreMessage, frozen=True, tag=28):
    """A key of the copy."""

    key: _Key
    value: _Value


class CopyAnswer(_StoreMessage, frozen=True, tag=29):
    """An answer that its trainer may not have got yet."""

    trainer: Id
    call: _Count
    answer: Answer


class CopyEnds(_StoreMessage, frozen=True, tag=30):
    """The receiver's copy is as the sender's now, by what has come or because it was before."""


StoreMessage: TypeAlias = (
    Report
    | Fetch
    | Ask
    | GiveUp
    | Entry
    | Have
    | Answered
    | CopyBegins
    | CopyValue
    | CopyAnswer
    | CopyEnds
)


# --- how commands and answers travel between a trainer and its agent


class StoreCall(SessionMessage, frozen=True, tag="store"):
    """A part of a command for the job's store; the last one is answered by StoreAnswered."""

    call: Count
    """The trainer's number for this call, repeated in the answer."""
    data: Annotated[bytes, Meta(max_length=MAX_STORE_DATA_BYTES)]
    """Of the command."""
    more: bool
    """True if other parts of the command follow."""
    timeout_s: Seconds


class StoreAnswered(SessionMessage, frozen=True, tag="store_answered"):
    """A part of the answer to a command."""

    call: int
    data: bytes
    more: bool
    """True if other parts of the answer follow."""


class StoreWaits(SessionMessage, frozen=True, tag="store_waits"):
    """Sent every 10 s while a command waits, with the time, and for what it waits (I6)."""

    call: int
    waited_s: float
    on: str


_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[StoreMessage] = msgspec.msgpack.Decoder(StoreMessage)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: StoreMessage | Command | Answer) -> bytes:
    """Return the message as bytes, without a length prefix."""
    return _encoder.encode(message)


def decode_message_untrusted(data: bytes) -> StoreMessage:
    """Decode what another agent says; raise ProtocolError for anything else."""
    return _decode(_messages, data)


def decode_command_untrusted(data: bytes) -> Command:
    """Decode what a trainer asks for; raise ProtocolError for anything else."""
    return _decode(_commands, data)


def decode_answer_untrusted(data: bytes) -> Answer:
    """Decode the answer of an agent; raise ProtocolError for anything else."""
    return _decode(_answers, data)


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"not of a store: {e}") from e
