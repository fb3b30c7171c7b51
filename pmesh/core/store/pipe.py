"""What two copies of a store say to each other under one roster: each message once, in order.

A link delivers in order, but what is sent while there is none is lost, and what a peer does not
read must not pile up. So the messages are a stream of bytes, sent in small parts: the receiver
acknowledges them, and the sender repeats what is not acknowledged, as in TCP. A message is made
when there is room for it, so that what waits for a slow machine takes no memory here.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.link import MAX_STORE_PART_BYTES
from pmesh.core.wire.store import MAX_COMMAND_BYTES, StoreMessage, decode_message_untrusted
from pmesh.errors import ProtocolError

PART_BYTES = MAX_STORE_PART_BYTES
WINDOW_BYTES = 8 * PART_BYTES  # of the 4 MiB that a link keeps for a peer
AGAIN_S = 0.4  # longer than most round trips, and doubled each time that nothing comes of it
SELDOM_S = 5.0
MAX_FRAME_BYTES = 2 * MAX_COMMAND_BYTES  # keys have as many bytes more, with their lengths
MESSAGES_AT_ONCE = 256  # made in one turn of the event loop, and in a part: about 1 ms for each end


class Part(NamedTuple):
    """Some bytes of the stream, and how far the other one has been read."""

    offset: int
    read: int
    data: bytes


class Pipe:
    """One end. `parts` yields what is to be sent; call it after each input, and now and then."""

    def __init__(self, take: Callable[[], bytes | None]) -> None:
        """`take` returns the next message, encoded, and None while there is none."""
        self.has_more = False
        """True if `parts` has stopped before the window was full, so that others get a turn."""
        self._take = take
        self._kept = bytearray()
        """What the other end has not acknowledged, from `_acknowledged` on."""
        self._acknowledged = 0
        self._sent = 0
        self._moved_at = 0.0
        self._pause_s = AGAIN_S
        self._reader = FrameReader(max_bytes=MAX_FRAME_BYTES)
        self._read = 0
        self._owes_read = False

    def receive_untrusted(self, part: Part, *, now: float) -> Iterator[StoreMessage]:
        """Take a part, and yield the messages that are whole now.

        Raises ProtocolError for what no honest machine would send.
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
        if part.offset != self._read:  # repeated, or something before it was lost
            return
        self._read += len(part.data)
        self._reader.receive_data(part.data)
        while (message := self._reader.next_message_untrusted()) is not None:
            yield decode_message_untrusted(message)

    def parts(self, *, now: float) -> Iterator[Part]:
        """Yield what is to be sent now."""
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
