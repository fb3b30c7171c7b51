"""Contents on their way from the starter to one machine, which pulls what it lacks.

The contents that a machine has asked for are one stream of bytes, in the order of its question. It
is sent in small parts, and never more than a window of it beyond what the machine has stored: so
heartbeats pass on the same link, and neither side keeps much in memory.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pmesh.core.wire.stream import WINDOW_BYTES
from pmesh.core.wire.tree import Content
from pmesh.errors import ProtocolError


class Slice(NamedTuple):
    """Some bytes of a content."""

    content: Content
    start: int
    nbytes: int


class Outgoing:
    """What one machine has asked for, on the side of the starter."""

    def __init__(self, contents: Sequence[Content]) -> None:
        self.total = sum(content.nbytes for content in contents)
        self.sent = 0
        self.stored = 0
        """How much the machine has on its disk."""
        self._contents = iter(contents)
        self._rest: Slice | None = None

    @property
    def is_sent(self) -> bool:
        return self.sent == self.total

    def acknowledge_untrusted(self, offset: int) -> None:
        """The machine has stored the stream up to here. Raises ProtocolError if it can't have."""
        if offset > self.sent:
            raise ProtocolError("files were acknowledged that were never sent")
        self.stored = max(self.stored, offset)

    def take(self, most: int) -> list[Slice]:
        """Return what is to be sent now, at most so many bytes; nothing if the window is full."""
        slices: list[Slice] = []
        room = min(most, WINDOW_BYTES - (self.sent - self.stored), self.total - self.sent)
        while room > 0:
            if self._rest is None:
                content = next(self._contents)
                self._rest = Slice(content, 0, content.nbytes)
            content, start, left = self._rest
            nbytes = min(room, left)
            slices.append(Slice(content, start, nbytes))
            self._rest = Slice(content, start + nbytes, left - nbytes) if nbytes < left else None
            self.sent += nbytes
            room -= nbytes
        return slices


class Incoming:
    """What this machine has asked for."""

    def __init__(self, contents: Sequence[Content]) -> None:
        self.total = sum(content.nbytes for content in contents)
        self.received = 0
        self.stored = 0
        """Set it to what was written to the disk, and say so to the starter."""
        self._contents = iter(contents)
        self._rest: Slice | None = None

    @property
    def is_stored(self) -> bool:
        return self.stored == self.total

    def receive_untrusted(self, offset: int, data: bytes) -> Iterator[tuple[Slice, bytes]]:
        """Take a part of the stream, and yield the slices of contents that it has.

        Raises ProtocolError for bytes that were not asked for, and for too many at once.
        """
        if offset != self.received or not data:
            raise ProtocolError("a part of the files is missing, or was sent twice")
        if offset + len(data) > min(self.total, self.stored + WINDOW_BYTES):
            raise ProtocolError("more bytes of files came than were asked for")
        self.received += len(data)
        return self._slices(data)

    def _slices(self, data: bytes) -> Iterator[tuple[Slice, bytes]]:
        begin = 0
        while begin < len(data):
            if self._rest is None:
                content = next(self._contents)
                self._rest = Slice(content, 0, content.nbytes)
            content, start, left = self._rest
            nbytes = min(len(data) - begin, left)
            self._rest = Slice(content, start + nbytes, left - nbytes) if nbytes < left else None
            yield Slice(content, start, nbytes), data[begin : begin + nbytes]
            begin += nbytes
