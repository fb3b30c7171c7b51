"""One end of a connection whose bytes a third agent forwards, as `Relay` messages on its links."""

import math
from collections.abc import Callable
from typing import Final

import trio

from pmesh.core.links.relaying import WINDOW_BYTES
from pmesh.core.wire.relays import MAX_RELAYED_BYTES, Relay
from pmesh.core.wire.stream import Part, Stream
from pmesh.errors import ProtocolError
from pmesh.ids import NodeId

_SAY_AFTER_BYTES: Final = WINDOW_BYTES // 4  # read: the other end's window is rarely empty


class RelayedStream(trio.abc.HalfCloseableStream):
    """A stream of bytes with an agent that can't be reached directly.

    Args:
        far: The other end.
        number: Of the connection, given by the end that opens it.
        tell: Sends a message to the agent that forwards; never waits.
        closed: Is called once, when nothing more may be received.
    """

    def __init__(
        self,
        far: NodeId,
        number: int,
        *,
        tell: Callable[[Relay], None],
        closed: Callable[[], None],
    ) -> None:
        self.far = far
        self.number = number
        self._tell = tell
        self._on_close = closed
        # Links lose nothing: whoever loses one ends the connection, so nothing is sent again.
        self._stream = Stream(
            again_s=math.inf, window_bytes=WINDOW_BYTES, part_bytes=MAX_RELAYED_BYTES
        )
        self._received = bytearray()
        self._said_read = 0  # of all bytes read here, those that the other end was told of
        self._said_end = False
        self._far_ended = False
        self._broken = False
        self._closed = False
        self._changed = trio.Event()

    def take(self, message: Relay) -> None:
        """Take a message of the other end; one that exceeds the window breaks the connection."""
        read = self._stream.acknowledged + message.read
        part = Part(self._stream.received, read, message.data)
        try:
            self._received += self._stream.receive_untrusted(part, now=0.0)
        except ProtocolError:
            self.break_off()
        self._far_ended = self._far_ended or message.ends
        self._notify()

    def break_off(self) -> None:
        """Nothing is forwarded any more."""
        self._broken = True
        self._notify()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        rest = memoryview(data)
        while rest:
            await self.wait_send_all_might_not_block()
            room = self._stream.room
            self._stream.write(bytes(rest[:room]))
            self._say_parts()
            rest = rest[room:]

    async def wait_send_all_might_not_block(self) -> None:
        while not self._stream.room:
            self._check()
            await self._changed.wait()
        self._check()

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()
        self._check()
        self._end()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self._received:
            self._check()
            if self._far_ended:
                return b""
            await self._changed.wait()
        self._check()
        data = bytes(self._received[:max_bytes])
        del self._received[: len(data)]
        self._stream.consume(len(data))
        if self._stream.read - self._said_read >= _SAY_AFTER_BYTES:
            self._say_parts()
        return data

    async def aclose(self) -> None:
        if not self._closed:
            self._end()
            self._closed = True
            self._notify()
            self._on_close()
        await trio.lowlevel.checkpoint()

    def _end(self) -> None:
        if not (self._said_end or self._broken):
            self._said_end = True
            self._say(ends=True)

    def _say_parts(self) -> None:
        for part in self._stream.parts(now=0.0):
            read, self._said_read = part.read - self._said_read, part.read
            self._say(data=part.data, read=read)

    def _say(self, *, data: bytes = b"", read: int = 0, ends: bool = False) -> None:
        message = Relay(self.far, self.number, to_forward=True, data=data, read=read, ends=ends)
        self._tell(message)

    def _check(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError
        if self._broken:
            raise trio.BrokenResourceError("nobody forwards the connection any more")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
