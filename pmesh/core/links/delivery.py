"""One end of a link: its control messages arrive in order and once, over any number of paths.

Each message has a number, and each packet says up to which number its sender has received. What is
not acknowledged when a path is lost is sent again over the next one, in order; the receiver drops
what it has. So "read" means the same before and after a change of paths (V11).
"""

import struct
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from pmesh.errors import ProtocolError

_PREFIX: Final = struct.Struct(">QQ")
PREFIX_BYTES: Final = _PREFIX.size


class Packet(NamedTuple):
    """What one frame of a path holds."""

    number: int
    """Of the message on its link, from 1; 0 if it belongs to the path and has no order."""
    acknowledged: int
    """The highest number that its sender has received."""
    message: bytes
    """As `pmesh.core.wire.channels.encode` has made it: it may be garbage."""


def pack(number: int, acknowledged: int, message: bytes) -> bytes:
    """Return the packet of an encoded message."""
    return _PREFIX.pack(number, acknowledged) + message


def unpack_untrusted(packet: bytes) -> Packet:
    """Reverse `pack`. Raises ProtocolError."""
    if len(packet) <= PREFIX_BYTES:
        raise ProtocolError(f"a packet of {len(packet)} bytes")
    number, acknowledged = _PREFIX.unpack_from(packet)
    return Packet(number, acknowledged, packet[PREFIX_BYTES:])


class Delivery:
    """What one end has sent and not seen acknowledged, and what it has received."""

    def __init__(self) -> None:
        self.received = 0
        """The highest number received; all below it have been, too."""
        self._sent = 0
        self._kept: deque[bytes] = deque()  # the messages up to `_sent`, the oldest first
        self._kept_bytes = 0

    def exceeds(self, messages: int, nbytes: int) -> bool:
        """Return True if more than that is not acknowledged."""
        return len(self._kept) > messages or self._kept_bytes > nbytes

    def send(self, message: bytes) -> bytes:
        """Number an encoded message, keep it, and return its packet."""
        self._sent += 1
        self._kept.append(message)
        self._kept_bytes += len(message)
        return pack(self._sent, self.received, message)

    def packets_again(self) -> Iterator[bytes]:
        """Yield the packets of all messages that are not acknowledged, in order."""
        first = self._sent - len(self._kept) + 1
        for number, message in enumerate(self._kept, first):
            yield pack(number, self.received, message)

    def receive_untrusted(self, packet: Packet) -> bool:
        """Take the numbers of a packet; return True if its message is new.

        Raises ProtocolError for numbers that no honest peer would send.
        """
        left = self._sent - packet.acknowledged
        if left < 0:
            raise ProtocolError(f"it acknowledges message {packet.acknowledged} of {self._sent}")
        while len(self._kept) > left:
            self._kept_bytes -= len(self._kept.popleft())
        if packet.number > self.received + 1:
            raise ProtocolError(f"message {packet.number} follows message {self.received}")
        if packet.number == 0:
            return True
        new = packet.number > self.received
        self.received = max(self.received, packet.number)
        return new
