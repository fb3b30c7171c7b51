"""What entrenar's workers and their coordinator tell each other over TCP.

A frame is the length of its payload as u32, big-endian, and the payload: one byte, which says which
message it is, and its fields, little-endian. All lengths in a payload are checked against what has
arrived before anything is made of them.
"""

import struct
from collections.abc import Callable, Iterator
from typing import ClassVar, Final, TypeAlias, cast, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from pmesh.errors import ProtocolError

Floats: TypeAlias = NDArray[np.float32]
"""Values of a gradient: float32[n], in order."""

LENGTH_BYTES: Final = 4
MOST_FRAME_BYTES: Final = 2**32 - 1  # what its length can say
JOIN_BYTES: Final = 64 * 1024  # of a frame of a stranger; a JoinRequest has two short names
MAX_NAME: Final = 1024  # characters of a name that a worker gives itself
MAX_SIZES: Final = 4096  # components of a block; entrenar's transformer has 9
_FLOAT: Final = np.dtype("<f4")


class _BridgeMessage(msgspec.Struct, frozen=True, eq=False):
    fields: ClassVar[str]
    """One letter a field: I u32, Q u64, B u8, f f32, s string, F floats, S sizes."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and encode(cast("Message", self)) == encode(
            cast("Message", other)
        )

    def __hash__(self) -> int:
        return hash(encode(cast("Message", self)))


class JoinRequest(_BridgeMessage, frozen=True, eq=False, tag=1):
    """A worker asks to take part."""

    fields = "sIs"
    node_id: str
    gpu_count: int
    backend: str


class JoinAccepted(_BridgeMessage, frozen=True, eq=False, tag=2):
    """The worker takes part, under this number."""

    fields = "II"
    worker_id: int
    total_workers: int


class ShardAssignment(_BridgeMessage, frozen=True, eq=False, tag=3):
    """The rows of a worker in this step: from `start` to before `end`."""

    fields = "QQQ"
    step: int
    start: int
    end: int


class GradientPayload(_BridgeMessage, frozen=True, eq=False, tag=4):
    """A worker's whole gradient for its rows, of which `total` were used."""

    fields = "QIFfQQ"
    step: int
    worker_id: int
    gradients: Floats
    loss: float
    correct: int
    total: int


class AveragedGradient(_BridgeMessage, frozen=True, eq=False, tag=5):
    """The mean of all gradients, and of the losses of all rows."""

    fields = "QFf"
    step: int
    gradients: Floats
    global_loss: float


class Heartbeat(_BridgeMessage, frozen=True, eq=False, tag=6):
    """A sign of life."""

    fields = "sQ"
    node_id: str
    timestamp_ms: int


class Shutdown(_BridgeMessage, frozen=True, eq=False, tag=7):
    """The training has ended."""

    fields = ""


class BlockGradientPayload(_BridgeMessage, frozen=True, eq=False, tag=8):
    """A worker's gradient of one of its transformer's blocks, all components in one array."""

    fields = "QIIISF"
    step: int
    worker_id: int
    block_idx: int
    num_blocks: int
    component_sizes: tuple[int, ...]
    gradients: Floats


class AveragedBlockGradient(_BridgeMessage, frozen=True, eq=False, tag=9):
    """The mean of all gradients of a block."""

    fields = "QISF"
    step: int
    block_idx: int
    component_sizes: tuple[int, ...]
    gradients: Floats


class NonBlockGradientPayload(_BridgeMessage, frozen=True, eq=False, tag=10):
    """A worker's gradient of what is in no block: 0 head, 1 final norm, 2 embedding."""

    fields = "QIBF"
    step: int
    worker_id: int
    component: int
    gradients: Floats


class AveragedNonBlockGradient(_BridgeMessage, frozen=True, eq=False, tag=11):
    """The mean of all gradients of a component."""

    fields = "QBF"
    step: int
    component: int
    gradients: Floats


Message: TypeAlias = (
    JoinRequest
    | JoinAccepted
    | ShardAssignment
    | GradientPayload
    | AveragedGradient
    | Heartbeat
    | Shutdown
    | BlockGradientPayload
    | AveragedBlockGradient
    | NonBlockGradientPayload
    | AveragedNonBlockGradient
)
_BY_TAG: Final[dict[int, type[Message]]] = {
    cast("int", kind.__struct_config__.tag): kind for kind in get_args(Message)
}


def encode(message: Message) -> bytes:
    """Return the frame of a message. Raises ProtocolError if it is too large for any frame."""
    parts = [bytes([cast("int", message.__struct_config__.tag)])]
    for kind, value in zip(message.fields, msgspec.structs.astuple(message), strict=True):
        parts.extend(_written(kind, value))
    nbytes = sum(map(len, parts))
    if nbytes > MOST_FRAME_BYTES:
        raise ProtocolError(f"a frame has at most {MOST_FRAME_BYTES} bytes, not {nbytes}")
    return b"".join([struct.pack(">I", nbytes), *parts])


def _written(kind: str, value: object) -> Iterator[bytes]:
    match kind:
        case "s":
            text = cast("str", value).encode()
            yield struct.pack("<I", len(text)) + text
        case "F":
            floats = cast("Floats", value)
            yield struct.pack("<Q", len(floats))
            yield floats.astype(_FLOAT, copy=False).tobytes()
        case "S":
            sizes = cast("tuple[int, ...]", value)
            yield struct.pack(f"<I{len(sizes)}I", len(sizes), *sizes)
        case _:
            yield struct.pack(f"<{kind}", value)


def frame_length(head: bytes | bytearray, *, most: int) -> int:
    """Return the bytes of the payload that follows.

    Raises ProtocolError if there are more than `most`, or none.
    """
    (nbytes,) = struct.unpack(">I", head)
    if nbytes > most:
        raise ProtocolError(f"announces a frame of {nbytes} bytes, and at most {most} are allowed")
    if nbytes == 0:
        raise ProtocolError("announces an empty frame")
    return int(nbytes)


def decode_untrusted(payload: bytes | bytearray) -> Message:
    """Return the message of a frame, without its length. Its arrays lie in the payload.

    Raises ProtocolError for anything else.
    """
    kind = _BY_TAG.get(payload[0])
    if kind is None:
        raise ProtocolError(f"sends a message with the unknown tag {payload[0]}")
    reader = _Reader(payload, kind.__name__)
    values = [reader.read(field) for field in kind.fields]
    if reader.left:
        raise ProtocolError(f"sends a {kind.__name__} with {reader.left} bytes too many")
    return cast("Callable[..., Message]", kind)(*values)


class _Reader:
    """Takes fields from a payload, none of which is longer than what is left."""

    def __init__(self, payload: bytes | bytearray, name: str) -> None:
        self._payload = payload
        self._name = name
        self._at = 1  # after the tag

    @property
    def left(self) -> int:
        return len(self._payload) - self._at

    def read(self, kind: str) -> object:
        match kind:
            case "s":
                return self._text()
            case "F":
                return self._floats()
            case "S":
                return self._sizes()
            case _:
                return self._number(kind)

    def _take(self, nbytes: int) -> int:
        """Return where the next bytes begin."""
        if nbytes > self.left:
            raise ProtocolError(
                f"sends a {self._name} that is cut off: {nbytes} bytes should follow, not "
                f"{self.left}"
            )
        at = self._at
        self._at += nbytes
        return at

    def _number(self, kind: str) -> float:
        at = self._take(struct.calcsize(f"<{kind}"))
        (value,) = struct.unpack_from(f"<{kind}", self._payload, at)
        return cast("float", value)

    def _count(self, kind: str, what: str, most: int) -> int:
        count = int(self._number(kind))
        if count > most:
            raise ProtocolError(f"sends a {self._name} with {count} {what}, and at most {most} fit")
        return count

    def _text(self) -> str:
        nbytes = self._count("I", "bytes of text", MAX_NAME)
        at = self._take(nbytes)
        try:
            return self._payload[at : at + nbytes].decode()
        except UnicodeDecodeError as e:
            raise ProtocolError(f"sends a {self._name} whose text is not UTF-8") from e

    def _floats(self) -> Floats:
        count = self._count("Q", "values", (self.left - 8) // 4)
        at = self._take(_FLOAT.itemsize * count)
        return np.frombuffer(self._payload, _FLOAT, count, at)

    def _sizes(self) -> tuple[int, ...]:
        count = self._count("I", "components", MAX_SIZES)
        return struct.unpack_from(f"<{count}I", self._payload, self._take(4 * count))
