"""The street before a door: a listener whose callers come from any address, at any time."""

from dataclasses import dataclass

import trio
import trio.testing

Stream = trio.abc.HalfCloseableStream
MemoryStream = trio.StapledStream[trio.abc.SendStream, trio.abc.ReceiveStream]


@dataclass
class _Name:
    host: str

    def getpeername(self) -> tuple[str, int]:
        return self.host, 50_000


class _Reset(trio.abc.ReceiveStream):
    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        raise trio.BrokenResourceError(f"reset before {max_bytes} bytes")

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


class Street(trio.abc.Listener[Stream]):
    """Accepts who has come by `call`, and fails as `fail` says, in that order."""

    def __init__(self) -> None:
        self._arrivals, self._waiting = trio.open_memory_channel[Stream | OSError](2000)
        self.closed = False

    def call(self, host: str = "10.0.0.1") -> MemoryStream:
        """Connect from this address; returns the caller's end."""
        outside, inside = trio.testing.memory_stream_pair()
        inside.socket = _Name(host)  # type: ignore[attr-defined]
        self._arrivals.send_nowait(inside)
        return outside  # type: ignore[return-value] # closes like any other stream

    def call_and_reset(self) -> None:
        """Connect, and break the connection at once."""
        sending, _ = trio.testing.memory_stream_one_way_pair()
        self._arrivals.send_nowait(trio.StapledStream(sending, _Reset()))

    def fail(self, error: OSError) -> None:
        """Let one accept fail."""
        self._arrivals.send_nowait(error)

    def close(self) -> None:
        """Close it while somebody accepts, as a socket can be."""
        self._waiting.close()

    async def accept(self) -> Stream:
        arrival = await self._waiting.receive()
        if isinstance(arrival, OSError):
            raise arrival
        return arrival

    async def aclose(self) -> None:
        self.closed = True
        await trio.lowlevel.checkpoint()


async def is_closed(stream: MemoryStream) -> bool:
    """Whether the other side has closed the stream, without waiting for it."""
    received: list[bytes] = []

    async def receive() -> None:
        received.append(bytes(await stream.receive_some(1)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return received == [b""]
