"""One end of a two-way stream of bytes over a link, with a window and without a clock.

A link delivers in order, but what is sent while it is down is lost, and unread messages must not
pile up. So a stream travels in small parts, between which heartbeats pass. As in TCP, the receiver
acknowledges bytes, and the sender repeats those that are not acknowledged. Bytes are acknowledged
when they are consumed: a consumer that stops holds up its own stream only, and at most a window of
bytes waits at each end.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from pmesh.errors import ProtocolError

PART_BYTES: Final = 32 * 1024  # two TLS records
WINDOW_BYTES: Final = 8 * PART_BYTES  # 26 ms at 10 MB/s; a link keeps 4 MiB for a peer
AGAIN_S: Final = 0.4  # longer than most round trips; each repetition without an effect doubles it
SELDOM_S: Final = 5.0


class Part(NamedTuple):
    """Some bytes of the stream, with an acknowledgement of those of the other direction."""

    offset: int
    """Of the first byte, in all that its sender has written."""
    read: int
    """How many bytes of the receiver's its sender has consumed; the end counts as one more."""
    data: bytes = b""
    ends: bool = False
    """Nothing follows this part."""


class Stream:
    """One end. After each call of another method, send what `parts` yields."""

    def __init__(
        self,
        *,
        begin: int = 0,
        far_begin: int = 0,
        again_s: float = AGAIN_S,
        window_bytes: int = WINDOW_BYTES,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """Nothing has been written or received yet.

        Args:
            begin: The offset of our first byte: what was before may still be acknowledged.
            far_begin: The offset of the other end's first byte.
            again_s: After so long without an acknowledgement, parts are repeated; infinite where
                only `resume` repeats them.
            window_bytes: At most so much is on its way or waits to be consumed, at both ends.
            part_bytes: A part has at most so many bytes.
        """
        self.has_ended = False
        """The other end's last byte has been received."""
        self._kept = bytearray()
        """Our bytes that are not acknowledged, from the offset `_acknowledged` on."""
        self._acknowledged = self._sent = self._end = begin
        """What is acknowledged, sent, and written; a closed stream has one number more."""
        self._is_closed = False
        self._received = self._read = self._told = far_begin
        """What was received, consumed, and acknowledged by us."""
        self._window_bytes = window_bytes
        self._part_bytes = part_bytes
        self._again_s = self._pause_s = again_s
        self._moved_at = 0.0

    # --- to the other end

    @property
    def room(self) -> int:
        """How much can be written so that at most a window is kept; negative if it is more."""
        return self._window_bytes - len(self._kept)

    @property
    def written(self) -> int:
        """The offset behind all that was written."""
        return self._end

    @property
    def acknowledged(self) -> int:
        """The offset behind all that the other end has consumed."""
        return self._acknowledged

    @property
    def is_acknowledged(self) -> bool:
        """The other end has consumed all that was written."""
        return self._acknowledged == self._end

    def write(self, data: bytes) -> None:
        """Add bytes. All are kept until they are acknowledged: look at `room` before."""
        self._kept += data
        self._end += len(data)

    def close(self) -> None:
        """End our direction, after what was written."""
        if not self._is_closed:
            self._is_closed = True
            self._end += 1

    def resume(self) -> None:
        """Repeat at once what is not acknowledged: there is a new link."""
        self._sent = self._acknowledged

    def parts(self, *, now: float) -> Iterator[Part]:
        """Yield the parts to send now."""
        if self._sent == self._acknowledged:
            self._moved_at = now
        elif now - self._moved_at >= self._pause_s:
            self._sent, self._moved_at = self._acknowledged, now
            self._pause_s = min(2 * self._pause_s, SELDOM_S)
        limit = min(self._end, self._acknowledged + self._window_bytes)
        while self._sent < limit:
            begin = self._sent - self._acknowledged
            data = bytes(self._kept[begin : min(begin + self._part_bytes, self._window_bytes)])
            ends = self._is_closed and self._sent + len(data) == self._end - 1 < limit
            yield self._part(data, ends=ends)
            self._sent += len(data) + ends
        if self._told != self._read:
            yield self.acknowledgement()

    def acknowledgement(self) -> Part:
        """Return a part without bytes, which says what was consumed."""
        return self._part()

    def _part(self, data: bytes = b"", *, ends: bool = False) -> Part:
        self._told = self._read
        return Part(self._sent, self._read, data, ends)

    # --- from the other end

    @property
    def received(self) -> int:
        """The offset behind all that was received."""
        return self._received

    @property
    def read(self) -> int:
        """The offset behind all that was consumed here."""
        return self._read

    def receive_untrusted(self, part: Part, *, now: float) -> bytes:
        """Take a part, and return the bytes that are new. Call `consume` when they are used.

        Raises ProtocolError for a part that no honest end sends.
        """
        if part.read > self._end:
            raise ProtocolError(f"it has read {part.read} bytes, beyond what was sent")
        if part.read > self._acknowledged:
            del self._kept[: part.read - self._acknowledged]
            self._acknowledged, self._sent = part.read, max(self._sent, part.read)
            self._moved_at, self._pause_s = now, self._again_s
        if not (part.data or part.ends):
            return b""
        end = part.offset + len(part.data) + part.ends
        if end > self._read + self._window_bytes or (self.has_ended and end > self._received):
            raise ProtocolError("bytes came that do not fit the window, or after the end")
        if part.offset > self._received:  # an earlier part was lost, and is repeated with this one
            return b""
        if end <= self._received:  # a repetition: our acknowledgement may be lost
            self._told = -1
            return b""
        new = part.data[self._received - part.offset :]
        self._received, self.has_ended = end, part.ends
        self.consume(0)
        return new

    def consume(self, nbytes: int) -> None:
        """Acknowledge bytes that were received: the other end may send as many more."""
        self._read += nbytes
        if self.has_ended and self._read == self._received - 1:
            self._read = self._received
