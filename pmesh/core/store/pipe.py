"""Delivers messages between two copies of a store under one roster: each once, in order.

A link delivers in order, but messages sent while it is down are lost, and unread messages must not
pile up. So the messages form a byte stream, which is sent in small parts. As in TCP, the receiver
acknowledges bytes, and the sender repeats those that are not acknowledged. A message is made only
when the window has room for it, so messages to a slow machine take no memory here.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.store import (
    MAX_COMMAND_BYTES,
    MAX_STORE_PART_BYTES,
    StoreMessage,
    decode_message_untrusted,
)
from pmesh.errors import ProtocolError

PART_BYTES = MAX_STORE_PART_BYTES
WINDOW_BYTES = 8 * PART_BYTES  # a link keeps 4 MiB for a peer
AGAIN_S = 0.4  # longer than most round trips; doubled after each repetition without an effect
SELDOM_S = 5.0
MAX_FRAME_BYTES = 2 * MAX_COMMAND_BYTES  # a command with its keys and their lengths fits
MESSAGES_AT_ONCE = 256  # in one turn of the event loop, and in a part: about 1 ms at each end


class Part(NamedTuple):
    """Some bytes of the stream, with an acknowledgement: the other stream is read up to `read`."""

    offset: int
    read: int
    data: bytes


class Pipe:
    """One end of the stream. After each input, and regularly, send what `parts` yields."""

    def __init__(self, take: Callable[[], bytes | None]) -> None:
        """`take` returns the next encoded message, or None while there is none."""
        self.has_more = False
        """True if `parts` stopped before the window was full, to let other tasks run."""
        self._take = take
        self._kept = bytearray()
        """The unacknowledged bytes of the stream, starting at offset `_acknowledged`."""
        self._acknowledged = 0
        self._sent = 0
        self._moved_at = 0.0
        self._pause_s = AGAIN_S
        self._reader = FrameReader(max_bytes=MAX_FRAME_BYTES)
        self._read = 0
        self._owes_read = False

    def receive_untrusted(self, part: Part, *, now: float) -> Iterator[StoreMessage]:
        """Take a part, and yield the messages that are complete now.

        Raises ProtocolError for a part that no honest machine sends.
        """
        if part.read > self._acknowledged + len(self._kept):
            raise ProtocolError(f"it has read {part.read} bytes, beyond what was sent")
        if part.read > self._acknowledged:
            del self._kept[: part.read - self._acknowledged]
            self._acknowledged = part.read
            self._sent = max(self._sent, part.read)
            self._moved_at, self._pause_s = now, AGAIN_S
        if not part.data:
            return
        self._owes_read = True
        if part.offset != self._read:  # it is a repetition, or an earlier part was lost
            return
        self._read += len(part.data)
        self._reader.receive_data(part.data)
        while (message := self._reader.next_message_untrusted()) is not None:
            yield decode_message_untrusted(message)

    def parts(self, *, now: float) -> Iterator[Part]:
        """Yield the parts to send now."""
        self.has_more = self._take_some()
        if self._sent == self._acknowledged:
            self._moved_at = now
        elif now - self._moved_at >= self._pause_s:
            self._sent, self._moved_at = self._acknowledged, now
            self._pause_s = min(2 * self._pause_s, SELDOM_S)
        while (size := min(len(self._kept), WINDOW_BYTES) - self._sent + self._acknowledged) > 0:
            begin = self._sent - self._acknowledged
            data = bytes(self._kept[begin : begin + min(size, PART_BYTES)])
            yield self._part(data)
            self._sent += len(data)
        if self._owes_read:
            yield self._part(b"")

    def _take_some(self) -> bool:
        for _ in range(MESSAGES_AT_ONCE):
            if len(self._kept) >= WINDOW_BYTES or (message := self._take()) is None:
                return False
            self._kept += frame(message)
        return True

    def _part(self, data: bytes) -> Part:
        self._owes_read = False
        return Part(self._sent, self._read, data)
