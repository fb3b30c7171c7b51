"""Channels: the control messages of each part of an agent travel on a channel of their own.

A part (views, lanes, stores, launches, …) joins its messages in a union, and makes a `Channel` of
it with a number that no other part has. A link carries only bytes: the number of the channel, and a
MessagePack array that begins with the tag of its kind. `Channels` knows who receives which channel,
so nothing between the link and the receiver knows what a part says.

Each kind of message has a bound in bytes. What others have said goes into our messages, so each
part of a message that one member may fill is small enough for all of them to fit. `encode` refuses
a message beyond its bound: that is our error, and must not look like the receiver's peer's.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from pmesh.errors import ProtocolError
from pmesh.ids import Member

MAX_MESSAGE_BYTES = 256 * 1024  # 0.2 s at 10 Mbit/s: heartbeats behind it are not late
MAX_ENTRIES = 1024  # entries of any kind about one member's own jobs in one message
CHANNEL_BYTES = 1

_encoder = msgspec.msgpack.Encoder()


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A control message. A part derives its own from a class that names its channel."""

    channel: ClassVar[int]
    most_bytes: ClassVar[int] = MAX_MESSAGE_BYTES
    """The bound: smaller for what contains others' values, so that it fits whatever they say."""


_Any = TypeVar("_Any", bound=Message)


class Channel(Generic[_Any]):
    """The messages of one part of an agent as bytes."""

    def __init__(self, number: int, kinds: Any) -> None:  # noqa: ANN401 - a union of classes
        self.number = number
        self._decoder: msgspec.msgpack.Decoder[_Any] = msgspec.msgpack.Decoder(kinds)

    def decode_untrusted(self, data: bytes) -> _Any:
        """Reverse `encode`; raise ProtocolError for anything else."""
        try:
            message = self._decoder.decode(memoryview(data)[CHANNEL_BYTES:])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise ProtocolError(f"not a control message: {e}") from e
        if len(data) > CHANNEL_BYTES + message.most_bytes:
            raise ProtocolError(_too_large(message, data))
        return message


class Channels:
    """The receivers of an agent's channels."""

    def __init__(self) -> None:
        self._receivers: dict[int, Callable[[Member, bytes], None]] = {}

    def register(self, channel: Channel[_Any], receive: Callable[[Member, _Any], None]) -> None:
        """Let `receive` have the messages of a channel, each with the member that sent it."""
        if channel.number in self._receivers:
            raise ValueError(f"two parts of the agent have channel {channel.number}")
        self._receivers[channel.number] = lambda member, data: receive(
            member, channel.decode_untrusted(data)
        )

    def receive_untrusted(self, member: Member, data: bytes) -> None:
        """Decode a message and hand it to its receiver. Raises ProtocolError, as receivers may."""
        try:
            receive = self._receivers[data[0]]
        except LookupError:
            raise ProtocolError(f"a control message on no channel: {data[:1].hex()!r}") from None
        receive(member, data)


def encode(message: Message) -> bytes:
    """Return the message as bytes, without a length prefix.

    Raises ValueError for one beyond its bound: nobody would take it, and the error is ours.
    """
    data = bytes((message.channel,)) + _encoder.encode(message)
    if len(data) > CHANNEL_BYTES + message.most_bytes:
        raise ValueError(_too_large(message, data))
    return data


def _too_large(message: Message, data: bytes) -> str:
    size = len(data) - CHANNEL_BYTES
    return f"a {type(message).__name__} of {size} bytes, {message.most_bytes} are allowed"
