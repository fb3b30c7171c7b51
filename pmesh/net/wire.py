"""TLS over a stream: moves and counts the bytes, and says in our own errors how it ended."""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final, assert_never

import trio

from pmesh.core.framing import FrameReader
from pmesh.core.messages import MAX_MESSAGE_BYTES
from pmesh.errors import MeshKeyMismatch, PeerUnreachable, ProtocolError
from pmesh.net.endpoints import local_address_of, remote_address_of
from pmesh.net.tls import (
    ConnectionCut,
    DataReceived,
    GoodbyeReceived,
    HandshakeCompleted,
    TlsEnd,
    TlsFailed,
    TlsProtocol,
)

PARTING_S: Final = 0.5  # a clean leave is over within 1 s, whether or not the peers still answer

_READ_BYTES = 64 * 1024  # decrypted in 30 us: the event loop stays responsive


@contextmanager
def naming(peer: object) -> Generator[None, None, None]:
    """Let a ProtocolError say whose bytes they were."""
    try:
        yield
    except ProtocolError as e:
        raise ProtocolError(f"{peer}: {e}") from e


class Wire:
    """A connection that speaks TLS, and frames within it. One task reads, one writes."""

    def __init__(self, stream: trio.abc.HalfCloseableStream, tls: TlsProtocol) -> None:
        self.stream = stream
        self.tls = tls
        self.local = local_address_of(stream)
        self.remote = remote_address_of(stream)
        self.bytes_sent = 0
        self.bytes_received = 0
        self._frames = FrameReader(max_bytes=MAX_MESSAGE_BYTES)
        self._half_sent = False
        self._judged = False

    async def handshake(self, first_bytes: bytes) -> bytes:
        """Run the TLS handshake, `first_bytes` being read already; return the peer's certificate.

        Raises MeshKeyMismatch, ProtocolError or PeerUnreachable.
        """
        self._receive(first_bytes)
        while True:
            event = self.tls.next_event()
            await self.flush()
            match event:
                case None:
                    await self._read()
                case HandshakeCompleted():
                    return event.certificate
                case _:
                    assert not isinstance(event, DataReceived)  # noqa: S101 - none before the end
                    raise self._error_of(event)

    async def next_frame(self) -> bytes:
        """The next whole frame.

        Raises trio.EndOfChannel after a goodbye, PeerUnreachable if the connection broke,
        ProtocolError for garbage. Before the first frame also MeshKeyMismatch: in TLS 1.3 the
        client's handshake ends before the server has judged it.
        """
        while (frame := self._next_whole_frame()) is None:
            match event := self.tls.next_event():
                case None:
                    await self._read()
                case DataReceived():
                    self._frames.receive_data(event.data)
                case _:
                    assert not isinstance(event, HandshakeCompleted)  # noqa: S101 - only once
                    raise self._error_of(event)
        self._judged = True
        return frame

    async def send(self, data: bytes) -> None:
        """Encrypt and send; raises PeerUnreachable if the connection broke."""
        self.tls.send(data)
        await self.flush()

    async def flush(self) -> None:
        """Send what TLS has to say; raises PeerUnreachable if the connection broke."""
        data = self.tls.data_to_send()
        if not data:
            return
        if self._half_sent:  # the rest of a record is lost: anything after it would be garbage
            raise PeerUnreachable(f"the connection to {self.remote} was given up")
        self._half_sent = True
        try:
            await self.stream.send_all(data)
        except trio.BrokenResourceError as e:
            raise PeerUnreachable(f"the connection to {self.remote} broke") from e
        self._half_sent = False
        self.bytes_sent += len(data)

    async def part(self) -> None:
        """Say goodbye, or why not, so that it arrives; takes 0.5 s at most.

        Closing a socket with unread bytes resets the connection, and a reset may overtake our last
        words. So: half-close, and discard what comes until the other side has closed as well.
        """
        if self._half_sent:
            return  # the rest of that record is lost: anything after it would be garbage
        self.tls.say_goodbye()
        with (
            trio.move_on_after(PARTING_S),
            suppress(PeerUnreachable, trio.BrokenResourceError, trio.ClosedResourceError),
        ):
            await self.flush()
            await self.stream.send_eof()
            while await self.stream.receive_some(_READ_BYTES):
                pass

    def _next_whole_frame(self) -> bytes | None:
        with naming(self.remote):
            return self._frames.next_message_untrusted()

    async def _read(self) -> None:
        try:
            data = await self.stream.receive_some(_READ_BYTES)
        except trio.BrokenResourceError as e:
            raise PeerUnreachable(f"the connection to {self.remote} broke") from e
        if data:
            self._receive(data)
        else:
            self.tls.receive_eof()

    def _receive(self, data: bytes | bytearray) -> None:
        self.bytes_received += len(data)
        self.tls.receive_data(data)

    def _error_of(self, end: TlsEnd) -> Exception:
        match end:
            case GoodbyeReceived():
                return trio.EndOfChannel()
            case ConnectionCut():
                return PeerUnreachable(f"{self.remote} closed the connection without a goodbye")
            case TlsFailed(other_key=True) if not self._judged:
                return MeshKeyMismatch(
                    f"{self.remote} holds another mesh key; copy this one with 'pmesh key show'"
                )
            case TlsFailed() if self._judged:  # by somebody on the way: the peer is not to blame
                return PeerUnreachable(f"the connection to {self.remote} is garbled: {end.detail}")
            case TlsFailed():
                return ProtocolError(f"{self.remote} does not speak pmesh: {end.detail}")
        assert_never(end)
