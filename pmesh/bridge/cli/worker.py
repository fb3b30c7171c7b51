"""One worker of entrenar: its connection, frame by frame."""

import trio

from pmesh.bridge.wire import (
    JOIN_BYTES,
    LENGTH_BYTES,
    Heartbeat,
    JoinAccepted,
    JoinRequest,
    Message,
    Shutdown,
    decode_untrusted,
    encode,
    frame_length,
)
from pmesh.errors import ProtocolError

PIECE_BYTES = 1 << 20  # a worker that takes one in time is alive
FAREWELL_S = 5.0  # for a worker to close its connection after Shutdown
NAME = "pmesh"  # ours, in heartbeats


class WorkerGone(Exception):  # noqa: N818 - an end, which may be in order
    """A worker can't take part any more; the text continues "worker 1 (its name) …"."""


class WorkerEnded(WorkerGone):
    """It has closed its connection, between two frames."""


class Frames:
    """A connection as frames, both ways, by one reader and any number of writers."""

    def __init__(self, stream: trio.abc.HalfCloseableStream, *, silence_s: float) -> None:
        self._stream = stream
        self._silence_s = silence_s
        self._writing = trio.Lock()
        self._is_whole = True
        """Whether each frame that was begun is also sent to its end."""
        self.heard = trio.current_time()
        """When bytes came last."""

    async def receive(self, *, most: int) -> Message:
        """Return the next message.

        Raises:
            ProtocolError: It is none, or has more than `most` bytes.
            WorkerGone: The connection is lost.
        """
        head = await self._receive_exactly(LENGTH_BYTES)
        if not head:
            raise WorkerEnded("has closed its connection")
        length = frame_length(head, most=most)
        payload = await self._receive_exactly(length)
        if not payload:
            raise WorkerGone("has closed its connection within a frame")
        return decode_untrusted(payload)

    async def _receive_exactly(self, count: int) -> bytearray:
        """Return so many bytes, or none if the connection ends before the first."""
        data = bytearray()
        while len(data) < count:
            try:
                more = await self._stream.receive_some(min(count - len(data), PIECE_BYTES))
            except trio.BrokenResourceError as e:
                # The system of a worker that closes before it has read all resets the connection.
                if data or not isinstance(e.__cause__, ConnectionResetError):
                    raise WorkerGone("has lost its connection") from e
                more = b""
            if not more:
                if data:
                    raise WorkerGone("has closed its connection within a frame")
                break
            self.heard = trio.current_time()
            data += more
        return data

    async def send(self, message: Message) -> None:
        """Send a message; if the worker reads no more, `receive` knows whether it has ended.

        Raises WorkerGone if it takes none of it for too long.
        """
        frame = memoryview(encode(message))
        async with self._writing:
            self._is_whole = False
            for start in range(0, len(frame), PIECE_BYTES):
                try:
                    with trio.fail_after(self._silence_s):
                        await self._stream.send_all(frame[start : start + PIECE_BYTES])
                except trio.TooSlowError as e:
                    raise WorkerGone(f"has taken no data for {self._silence_s:g} s") from e
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    return
            self._is_whole = True

    async def say_shutdown(self) -> None:
        """Say Shutdown, and wait a moment until it is read; also when cancelled.

        Nobody else may receive any more. What the worker still sends is dropped: to close a
        connection with data that nobody has read would destroy the Shutdown on its way.
        """
        with trio.move_on_after(FAREWELL_S, shield=True):
            try:
                if self._is_whole:
                    await self.send(Shutdown())
                    await self._stream.send_eof()
                    while await self._stream.receive_some(PIECE_BYTES):
                        pass
            except (WorkerGone, trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # it has gone by itself


async def receive_join(frames: Frames) -> JoinRequest:
    """Return the first message of a connection. Raises as `Frames.receive`."""
    message = await frames.receive(most=JOIN_BYTES)
    if not isinstance(message, JoinRequest):
        raise ProtocolError(f"sends a {type(message).__name__} before it has joined")
    return message


class Worker:
    """A worker that has joined. `live` runs beside all else, and answers its heartbeats."""

    def __init__(self, worker_id: int, name: str, frames: Frames) -> None:
        self.id = worker_id
        self.name = name
        self.frames = frames
        self._reading = trio.CancelScope()
        self._send, self._receive = trio.open_memory_channel[Message](0)
        self._fault: ProtocolError | WorkerGone | None = None
        self._is_dropped = False

    def __str__(self) -> str:
        return f"worker {self.id} ({self.name})"

    async def live(self, *, total_workers: int, most: int) -> None:
        """Receive all its messages until it has gone, or is dropped, or this is cancelled.

        In the last case it is told Shutdown.
        """
        try:
            with self._reading:
                await self.frames.send(JoinAccepted(self.id, total_workers))
                while True:
                    message = await self.frames.receive(most=most)
                    if isinstance(message, Heartbeat):
                        await self.frames.send(Heartbeat(NAME, message.timestamp_ms))
                    else:
                        await self._send.send(message)
        except (ProtocolError, WorkerGone) as e:
            self._fault = e
        finally:
            self._send.close()
            if self._fault is None and not self._is_dropped:
                await self.frames.say_shutdown()

    def drop(self) -> None:
        """End its connection without a word."""
        self._is_dropped = True
        self._reading.cancel()

    async def take(self, *, owed_since: float, silence_s: float) -> Message:
        """Return its next message.

        Args:
            owed_since: From when on it owes one, on trio's clock.
            silence_s: How long it may send nothing at all.

        Raises:
            ProtocolError: It has sent something else than a message.
            WorkerGone: It is silent or lost.
        """
        while True:
            silent_at = max(owed_since, self.frames.heard) + silence_s
            with trio.move_on_at(silent_at):
                try:
                    return await self._receive.receive()
                except trio.EndOfChannel:
                    raise self._fault or WorkerEnded("has been dropped") from None
            if self.frames.heard + silence_s <= trio.current_time():
                raise WorkerGone(f"has been silent for {silence_s:g} s")
