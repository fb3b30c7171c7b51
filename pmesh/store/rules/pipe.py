"""Delivers messages between two copies of a store under one roster: each once, in order.

The messages are frames of a stream. A message is made only when the window has room for it, so
messages to a slow machine take no memory here.
"""

from collections.abc import Callable, Iterator

from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.stream import Part, Stream
from pmesh.store.wire import (
    MAX_COMMAND_BYTES,
    StoreMessage,
    decode_message_untrusted,
)

MAX_FRAME_BYTES = 2 * MAX_COMMAND_BYTES  # a command with its keys and their lengths fits
MESSAGES_AT_ONCE = 256  # in one turn of the event loop, and in a part: about 1 ms at each end


class Pipe:
    """One end of the stream. After each input, and regularly, send what `parts` yields."""

    def __init__(self, take: Callable[[], bytes | None]) -> None:
        """`take` returns the next encoded message, or None while there is none."""
        self.has_more = False
        """True if `parts` stopped before the window was full, to let other tasks run."""
        self._take = take
        self._stream = Stream()
        self._reader = FrameReader(max_bytes=MAX_FRAME_BYTES)

    def receive_untrusted(self, part: Part, *, now: float) -> Iterator[StoreMessage]:
        """Take a part, and yield the messages that are complete now.

        Raises ProtocolError for a part that no honest machine sends.
        """
        data = self._stream.receive_untrusted(part, now=now)
        self._stream.consume(len(data))
        self._reader.receive_data(data)
        while (message := self._reader.next_message_untrusted()) is not None:
            yield decode_message_untrusted(message)

    def parts(self, *, now: float) -> Iterator[Part]:
        """Return the parts to send now."""
        self.has_more = self._take_some()
        return self._stream.parts(now=now)

    def _take_some(self) -> bool:
        for _ in range(MESSAGES_AT_ONCE):
            if self._stream.room <= 0 or (message := self._take()) is None:
                return False
            self._stream.write(frame(message))
        return True
