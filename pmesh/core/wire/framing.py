"""Framing: the first bytes of a connection, length-prefixed messages, and the greeting.

A link begins with a TLS ClientHello, a lane with its preamble, the connection of a machine that
wants the mesh key with GUEST_MAGIC, and the question of one that has missed a change of the key
with RENEWAL_MAGIC. Anything else is not pmesh, and gets neither a TLS object (50 KiB) nor a
handshake (3 ms of CPU).

Links and local sessions carry length-prefixed messages. Every past and future version of pmesh can
read the first message on a link: an array that begins with the tag 1 and the sender's protocol
version. The rest is read only if the versions are equal.
"""

import enum
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from pmesh.core.wire.link import MAX_HELLO_BYTES, PROTOCOL_VERSION, Hello
from pmesh.core.wire.preamble import PREAMBLE_BYTES, PREAMBLE_MAGIC
from pmesh.errors import ProtocolError
from pmesh.ids import NodeId

PREFIX_BYTES = 4


def frame(message: bytes) -> bytes:
    r"""Return the message with a length prefix.

    >>> frame(b"hi")
    b'\x00\x00\x00\x02hi'
    """
    return len(message).to_bytes(PREFIX_BYTES, "big") + message


class FrameReader:
    """A byte protocol: pass received bytes to `receive_data`, then take out whole messages.

    It never holds more than one message beyond the last received bytes. It refuses a length over
    `max_bytes` when it reads the prefix: a claim of 4 GiB costs four bytes.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data

    def next_message_untrusted(self) -> bytes | None:
        """Return the next message, or None until it is whole; ProtocolError if it is too long."""
        if len(self._buffer) < PREFIX_BYTES:
            return None
        length = int.from_bytes(self._buffer[:PREFIX_BYTES], "big")
        if length > self.max_bytes:
            raise ProtocolError(f"a message claims {length} bytes, {self.max_bytes} are allowed")
        end = PREFIX_BYTES + length
        if len(self._buffer) < end:
            return None
        message = bytes(self._buffer[PREFIX_BYTES:end])
        del self._buffer[:end]
        return message

    @property
    def buffered(self) -> int:
        """The number of bytes received and not yet taken."""
        return len(self._buffer)

    def take_data(self) -> bytes:
        """Take out all that was received and not yet taken."""
        data, self._buffer = bytes(self._buffer), bytearray()
        return data


MAX_CLIENT_HELLO_BYTES: Final = 16 * 1024
"""Ours has 225 bytes, 1.8 KiB with a post-quantum key share. OpenSSL accepts a claim of up to
128 KiB, and allocates it at once."""

FIRST_BYTES: Final = PREAMBLE_BYTES
"""The most bytes to read: those after a preamble belong to the lane."""

GUEST_MAGIC: Final = b"PMIN\x01"
"""What a machine that wants the mesh key sends first (`pmesh.invites.wire`), and no TLS record."""
RENEWAL_MAGIC: Final = b"pmesh-k\0"
RENEWAL_BYTES: Final = 16
"""The magic, and the tag of the key that the other side has."""

_TLS_HEADER_BYTES = 9  # of the record (5) and of the handshake message in it (4): RFC 8446, 5.1, 4
_HANDSHAKE_RECORD, _CLIENT_HELLO = 22, 1


class FirstBytes(enum.Enum):
    """The kind of a connection, from its first bytes."""

    TOO_FEW = enum.auto()
    LINK = enum.auto()
    LANE = enum.auto()
    GUEST = enum.auto()
    RENEWAL = enum.auto()
    GARBAGE = enum.auto()


def recognize(first: bytes) -> FirstBytes:
    """Return what begins with these bytes, as early as it is certain.

    >>> recognize(b"GET / HTTP/1.1")
    <FirstBytes.GARBAGE: 6>
    """
    if first[: len(PREAMBLE_MAGIC)] == PREAMBLE_MAGIC[: len(first)]:
        return FirstBytes.LANE if len(first) >= PREAMBLE_BYTES else FirstBytes.TOO_FEW
    if first[: len(GUEST_MAGIC)] == GUEST_MAGIC[: len(first)]:
        return FirstBytes.GUEST if len(first) >= len(GUEST_MAGIC) else FirstBytes.TOO_FEW
    if first[: len(RENEWAL_MAGIC)] == RENEWAL_MAGIC[: len(first)]:
        return FirstBytes.RENEWAL if len(first) >= RENEWAL_BYTES else FirstBytes.TOO_FEW
    if _may_be_client_hello(first):
        return FirstBytes.LINK if len(first) >= _TLS_HEADER_BYTES else FirstBytes.TOO_FEW
    return FirstBytes.GARBAGE


def _may_be_client_hello(first: bytes) -> bool:
    header = first[:_TLS_HEADER_BYTES]
    claimed = int.from_bytes(header[6:9], "big") if len(header) == _TLS_HEADER_BYTES else 0
    return (
        header[:2] == bytes((_HANDSHAKE_RECORD, 3))[: len(header)]  # 3: every version of TLS
        and header[5:6] in (b"", bytes((_CLIENT_HELLO,)))
        and claimed <= MAX_CLIENT_HELLO_BYTES
    )


class _AnyHello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    protocol: int


_Greeting = TypeVar("_Greeting", Hello, _AnyHello)


@dataclass(frozen=True, slots=True)
class OtherProtocol:
    """A peer that speaks another version."""

    protocol: int


def encode_hello(hello: Hello) -> bytes:
    """Return the greeting as bytes. Raises ValueError if it is larger than any peer takes."""
    data = msgspec.msgpack.encode(hello)
    if len(data) > MAX_HELLO_BYTES:
        raise ValueError(f"a Hello of {len(data)} bytes, {MAX_HELLO_BYTES} are allowed")
    return data


def read_hello_untrusted(data: bytes, *, proven: NodeId) -> Hello | OtherProtocol:
    """Return the Hello of the peer whose node key TLS has proven.

    Raises ProtocolError for anything but a Hello, and for one in the name of another node.
    """
    protocol = _decode(data, _AnyHello).protocol
    if protocol != PROTOCOL_VERSION:
        return OtherProtocol(protocol)
    hello = _decode(data, Hello)
    if hello.member.node != proven:
        raise ProtocolError("a Hello in the name of another node")
    return hello


def _decode(data: bytes, kind: type[_Greeting]) -> _Greeting:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"not a Hello: {e}") from e
