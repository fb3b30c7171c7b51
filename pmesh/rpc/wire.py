"""What two ranks tell each other about calls.

Frames travel in batches. A batch is one message of `pmesh.p2p` with the tag FRAMES: a list of
frames in MessagePack. A large array travels as a message of its own, whose tag its frame has.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.errors import ProtocolError

FRAMES = 2**31  # the tags below are the users'
FIRST_ARRAY = 2**32
"""The tag of the first array that a rank sends by itself; each has a tag of its own."""
INLINE_BYTES = 4 * 1024  # of an array in its frame; for a larger one, a message costs less
BATCH_BYTES = 15 * 1024  # p2p sends up to 16 KiB with the announcement of a message
MAX_FRAME_BYTES = 64 * 1024 * 1024  # without the arrays: as much as an object of all_gather_object
MAX_ARRAYS = 4096  # of one call: each is a message, of which a pair of ranks keeps few
MAX_TEXT = 4096
MAX_TRACEBACK = 32 * 1024

Number = Annotated[int, Meta(ge=0, le=2**62)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class Apart(msgspec.Struct, frozen=True, array_like=True):
    """An array that travels as a message of its own."""

    tag: Annotated[int, Meta(ge=FIRST_ARRAY, le=2**62)]
    nbytes: Annotated[int, Meta(ge=0, le=2**48)]


class Value(msgspec.Struct, frozen=True, array_like=True):
    """Arguments or a result: the parts of `pmesh.client.trees.state.Described`."""

    header: Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]
    arrays: Annotated[tuple[bytes | Apart, ...], Meta(max_length=MAX_ARRAYS)] = ()

    @property
    def apart(self) -> tuple[Apart, ...]:
        """The arrays that travel by themselves."""
        return tuple(each for each in self.arrays if isinstance(each, Apart))

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays and of the header."""
        arrays = (each.nbytes if isinstance(each, Apart) else len(each) for each in self.arrays)
        return len(self.header) + sum(arrays)


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """What one rank tells another."""


class Request(Frame, frozen=True, tag=0):
    """Call a function, or a method of a kept object; answered by Result, Kept or Failure."""

    call: Number
    """The caller's number; each is higher than those before."""
    name: Text
    arguments: Value
    """A list of positional arguments and a dict of named ones."""
    timeout_s: Annotated[float, Meta(gt=0)]
    reference: Annotated[int, Meta(ge=-1, le=2**62)] = -1
    """The object whose method it is; -1 for a registered function."""
    keeps: bool = False
    """Keep the result, and answer with a reference to it."""


class Result(Frame, frozen=True, tag=1):
    """What the call has returned."""

    call: Number
    value: Value


class Kept(Frame, frozen=True, tag=2):
    """The result stays here; the caller holds a reference until it sends Release."""

    call: Number
    reference: Number


class Failure(Frame, frozen=True, tag=3):
    """The call has no result."""

    call: Number
    kind: Text
    """The class of the exception; `full`, `refused` or `gone` if the function was not called."""
    message: Text
    traceback: Annotated[str, Meta(max_length=MAX_TRACEBACK)] = ""


class Cancel(Frame, frozen=True, tag=4):
    """The caller has given up; nothing is to be answered."""

    call: Number


class Release(Frame, frozen=True, tag=5):
    """The holder needs the object no more."""

    reference: Number


AnyFrame: TypeAlias = Request | Result | Kept | Failure | Cancel | Release

FULL = "full"
REFUSED = "refused"
GONE = "gone"

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[AnyFrame]] = msgspec.msgpack.Decoder(list[AnyFrame])


def encode(frame: AnyFrame) -> bytes:
    """Return the bytes of a frame, for `join`."""
    return _encoder.encode(frame)


def join(frames: Iterable[bytes]) -> bytes:
    """Return a batch of encoded frames."""
    return _encoder.encode([msgspec.Raw(frame) for frame in frames])


def decode_untrusted(batch: bytes | memoryview) -> Sequence[AnyFrame]:
    """Return the frames of a batch. Raises ProtocolError for anything else."""
    try:
        return _decoder.decode(batch)
    except msgspec.MsgspecError as e:
        raise ProtocolError(f"not a batch of calls: {e}") from e
