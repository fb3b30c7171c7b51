"""Paths: the authenticated control connections of two agents, one for each pair of interfaces.

`shake_hands` turns a dialled or accepted connection into a `Path`. Then one task receives, one
runs the writer, and any task sends. `Wire` runs TLS over a stream, counts the bytes, and maps its
end to errors of pmesh. All paths between two agents make one link (`pmesh.agent.mesh.links`).
"""

import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Final, NamedTuple, assert_never

import trio

from pmesh.core.identity.certificates import node_of_certificate_untrusted
from pmesh.core.identity.names import check_name_untrusted
from pmesh.core.identity.removals import check_removal_untrusted
from pmesh.core.links.delivery import PREFIX_BYTES, Packet, pack, unpack_untrusted
from pmesh.core.wire.channels import CHANNEL_BYTES, MAX_MESSAGE_BYTES, Message, encode
from pmesh.core.wire.framing import (
    FrameReader,
    OtherProtocol,
    encode_hello,
    frame,
    read_hello_untrusted,
)
from pmesh.core.wire.link import MAX_HELLO_BYTES, PROTOCOL_VERSION, Address, Hello
from pmesh.errors import (
    MeshKeyMismatch,
    PeerUnreachable,
    ProtocolError,
    ProtocolVersionMismatch,
)
from pmesh.ids import NodeId, short_node
from pmesh.net.links.interfaces import local_address_of, remote_address_of
from pmesh.net.links.tls import (
    ConnectionCut,
    DataReceived,
    GoodbyeReceived,
    HandshakeCompleted,
    TlsContexts,
    TlsEnd,
    TlsFailed,
    TlsProtocol,
)


class _Counters(NamedTuple):
    """Where a system counts the segments of a connection, and has its round trip."""

    option: int
    kind: str
    sent_at: int
    sent_again_at: int
    round_trip_at: int
    unit_s: float
    """Of the round trip, a uint32."""
    up_to: int
    """How many units more it may be."""


_NO_ROUND_TRIP: Final = 2**32 - 1
MIN_SEGMENTS: Final = 200  # of fewer, one that was lost by chance would look like a bad line
_COUNTERS: Final = MappingProxyType(
    {
        # TCP_INFO, struct tcp_info: tcpi_data_segs_out, tcpi_total_retrans, and tcpi_min_rtt, the
        # least of the last five minutes (since Linux 4.6).
        "linux": _Counters(11, "=I", 156, 100, 148, 1e-6, 0),
        # TCP_CONNECTION_INFO, struct tcp_connection_info: tcpi_txpackets, tcpi_txretransmitpackets,
        # and tcpi_srtt, an average in whole milliseconds.
        "darwin": _Counters(0x106, "=Q", 56, 104, 44, 1e-3, 1),
    }
)
_COUNTERS_BYTES: Final = 256  # more than either struct has up to there


def loss_of(stream: trio.abc.Stream) -> float | None:
    """Return the share of the connection's segments that were sent again, from 0.0 to 1.0.

    None while fewer than 200 were sent, and where the system does not count them.
    """
    if (told := _told_of(stream)) is None:
        return None
    counters, data = told
    try:
        (sent,) = struct.unpack_from(counters.kind, data, counters.sent_at)
        (sent_again,) = struct.unpack_from(counters.kind, data, counters.sent_again_at)
    except struct.error:
        return None
    return min(1.0, sent_again / sent) if sent >= MIN_SEGMENTS else None


def round_trip_of(stream: trio.abc.Stream) -> float | None:
    """Return about the least round trip of the connection, in seconds, as the system measures it.

    Unlike a message and its answer, it has nothing of the time in which a busy machine's processes
    wait for a core. None where the system does not tell.
    """
    if (told := _told_of(stream)) is None:
        return None
    counters, data = told
    try:
        (units,) = struct.unpack_from("=I", data, counters.round_trip_at)
    except struct.error:
        return None
    return None if units == _NO_ROUND_TRIP else float(units + counters.up_to) * counters.unit_s


def _told_of(stream: trio.abc.Stream) -> tuple[_Counters, bytes] | None:
    """Return what the system tells of a connection, and where in it what stands."""
    counters = _COUNTERS.get(sys.platform)
    if counters is None:
        return None
    try:
        sock: socket.socket = getattr(stream, "socket")  # noqa: B009 - an abstract stream has none
        return counters, sock.getsockopt(socket.IPPROTO_TCP, counters.option, _COUNTERS_BYTES)
    except (AttributeError, OSError):  # no socket; closed
        return None


PARTING_S: Final = 0.5  # a clean leave takes less than 1 s, whether or not the peers answer

_READ_BYTES = 64 * 1024  # decrypted in 30 us: the event loop stays responsive


@contextmanager
def naming(peer: object) -> Generator[None, None, None]:
    """Prefix a ProtocolError with the peer that sent the bytes."""
    try:
        yield
    except ProtocolError as e:
        raise ProtocolError(f"{peer}: {e}") from e


class Wire:
    """A TLS connection that carries frames. One task reads, one writes."""

    def __init__(self, stream: trio.abc.HalfCloseableStream, tls: TlsProtocol) -> None:
        self.stream = stream
        self.tls = tls
        self.local = local_address_of(stream)
        self.remote = remote_address_of(stream)
        self.bytes_sent = 0
        self.bytes_received = 0
        self.frames = FrameReader(max_bytes=MAX_HELLO_BYTES)
        self._half_sent = False
        self._judged = False

    async def handshake(self, first_bytes: bytes) -> bytes:
        """Run the TLS handshake after `first_bytes` were read; return the peer's certificate.

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
        """Return the next whole frame.

        Raises trio.EndOfChannel after a goodbye, PeerUnreachable if the connection broke,
        ProtocolError for garbage. Before the first frame also MeshKeyMismatch: in TLS 1.3 the
        client's handshake ends before the server has verified it.
        """
        while (frame := self._next_whole_frame()) is None:
            match event := self.tls.next_event():
                case None:
                    await self._read()
                case DataReceived():
                    self.frames.receive_data(event.data)
                case _:
                    assert not isinstance(event, HandshakeCompleted)  # noqa: S101 - only once
                    raise self._error_of(event)
        self._judged = True
        return frame

    async def send(self, data: bytes) -> None:
        """Encrypt and send. Raises PeerUnreachable if the connection broke."""
        self.tls.send(data)
        await self.flush()

    async def flush(self) -> None:
        """Send TLS's output. Raises PeerUnreachable if the connection broke."""
        data = self.tls.data_to_send()
        if not data:
            return
        if self._half_sent:  # the rest of a record is lost, so anything after it would be garbage
            raise PeerUnreachable(f"the connection to {self.remote} was given up")
        self._half_sent = True
        try:
            await self.stream.send_all(data)
        except trio.BrokenResourceError as e:
            raise PeerUnreachable(f"the connection to {self.remote} broke") from e
        self._half_sent = False
        self.bytes_sent += len(data)

    async def part(self) -> None:
        """Send a goodbye or an alert and make sure that it arrives; takes at most 0.5 s.

        Closing a socket with unread bytes resets the connection, and a reset may overtake our last
        bytes. So we half-close, and discard input until the other side has closed as well.
        """
        if self._half_sent:
            return  # as in `flush`
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
            return self.frames.next_message_untrusted()

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
            case TlsFailed() if self._judged:  # changed on the way: the peer is not to blame
                return PeerUnreachable(f"the connection to {self.remote} is garbled: {end.detail}")
            case TlsFailed():
                return ProtocolError(f"{self.remote} does not speak pmesh: {end.detail}")
        assert_never(end)


HANDSHAKE_TIMEOUT_S: Final = 5.0  # a Mac that has just woken answers within 2 s
MAX_QUEUED_MESSAGES: Final = 16384  # an hour of heartbeats: a peer that stopped reading
MAX_QUEUED_BYTES: Final = 4 * 1024 * 1024  # 200 views of 64 members

_BATCH_BYTES = 16 * 1024  # one TLS record


async def shake_hands(
    stream: trio.abc.HalfCloseableStream,
    *,
    contexts: TlsContexts,
    server_side: bool,
    hello: Callable[[NodeId], Hello],
    first_bytes: bytes = b"",
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> "Path":
    """Prove each other's mesh key and node key, exchange Hellos, and return the path.

    Args:
        stream: The connection; it belongs to the path, and is closed if the handshake fails.
        contexts: This node's contexts, from `TlsContexts.of`.
        server_side: True if the connection was accepted, False if it was dialled.
        hello: Returns what this node says about itself to the node that TLS has proven.
        first_bytes: The bytes that were already read.
        timeout_s: The limit for the whole handshake.

    Raises:
        MeshKeyMismatch: The other side holds another mesh key. It raises the same error.
        ProtocolVersionMismatch: The protocol versions differ. The other side raises it too.
        ProtocolError: The other side is not pmesh, or claims to be another node.
        PeerUnreachable: The connection ended, or the time was over.
    """
    wire = Wire(stream, TlsProtocol(contexts, server_side=server_side))
    try:
        with trio.fail_after(timeout_s):
            certificate = await wire.handshake(first_bytes)
            path = await _exchange_hellos(wire, hello, certificate)
            path.contexts = contexts
            return path
    except trio.TooSlowError:
        await trio.aclose_forcefully(stream)
        raise PeerUnreachable(
            f"{wire.remote} did not finish the handshake within {timeout_s:g} s"
        ) from None
    except (MeshKeyMismatch, ProtocolError, ProtocolVersionMismatch):
        await _part_and_close(wire)  # the other side learns why
        raise
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise


async def _exchange_hellos(
    wire: Wire, hello: Callable[[NodeId], Hello], certificate: bytes
) -> "Path":
    """Send ours first, so that both sides know both versions if they differ."""
    with naming(wire.remote):
        node = node_of_certificate_untrusted(certificate)
    ours = hello(node)
    await wire.send(frame(encode_hello(ours)))
    try:
        data = await wire.next_frame()
    except trio.EndOfChannel:
        raise PeerUnreachable(f"{wire.remote} left before it sent a Hello") from None
    with naming(wire.remote):
        theirs = read_hello_untrusted(data, proven=node)
        if isinstance(theirs, Hello):
            _check_hello_untrusted(theirs, ours)
    if isinstance(theirs, OtherProtocol):
        raise ProtocolVersionMismatch(
            f"{wire.remote} speaks protocol {theirs.protocol}, this machine {PROTOCOL_VERSION}; "
            "install the same version of pmesh on both"
        )
    wire.frames.max_bytes = PREFIX_BYTES + CHANNEL_BYTES + MAX_MESSAGE_BYTES
    return Path(wire, ours, theirs)


def _check_hello_untrusted(theirs: Hello, ours: Hello) -> None:
    check_name_untrusted(theirs.member, theirs.said)
    if theirs.removal is not None:
        check_removal_untrusted(theirs.removal)
        if theirs.removal.node != ours.member.node or not theirs.removal.out:
            raise ProtocolError("a Hello that refuses another machine than this one")


async def _part_and_close(wire: Wire) -> None:
    try:
        await wire.part()
    finally:
        await trio.aclose_forcefully(wire.stream)


class Path:
    """An authenticated connection to a peer for control messages, made by `shake_hands`."""

    def __init__(self, wire: Wire, ours: Hello, peer: Hello) -> None:
        self.ours = ours
        self.peer = peer
        self.contexts: TlsContexts | None = None
        """Those of the mesh key that both sides have proven; set by `shake_hands`."""
        self.messages_received = 0
        self._read_up_to = 0
        self._wire = wire
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._has_queued = trio.Event()
        self._sending = trio.Lock()  # held by the writer, and at the end by aclose
        self._reading = trio.CancelScope()
        self._writing = trio.CancelScope()
        self._failure: PeerUnreachable | None = None
        self._closed = False

    @property
    def node(self) -> NodeId:
        """The peer's node; TLS has proven its key."""
        return self.peer.member.node

    @property
    def remote_address(self) -> Address:
        """The peer's end of this connection; if the peer dialled, it does not listen there."""
        return self._wire.remote

    @property
    def local_address(self) -> Address:
        return self._wire.local

    @property
    def bytes_sent(self) -> int:
        """Bytes at the socket, including TLS and the handshake."""
        return self._wire.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes at the socket, including TLS and the handshake."""
        return self._wire.bytes_received

    @property
    def loss(self) -> float | None:
        """The share of the segments that were sent again; see `loss_of`."""
        return loss_of(self._wire.stream)

    @property
    def system_round_trip_s(self) -> float | None:
        """About the least one; see `round_trip_of`."""
        return round_trip_of(self._wire.stream)

    def send(self, message: Message) -> None:
        """Queue a message of the path itself, which has no number on the link; never waits."""
        self.send_packet(pack(0, 0, encode(message)))

    def send_packet(self, packet: bytes) -> None:
        """Queue what `pack` has made for the writer; never waits.

        If 16384 packets or 4 MiB are queued, the peer has stopped reading and the path ends:
        `receive` raises PeerUnreachable. A packet to a path that has ended is dropped.
        """
        if self._closed or self._failure is not None:
            return
        data = frame(packet)
        self._queue.append(data)
        self._queued_bytes += len(data)
        if len(self._queue) > MAX_QUEUED_MESSAGES or self._queued_bytes > MAX_QUEUED_BYTES:
            self.fail(PeerUnreachable(f"{self} has stopped reading"))
        else:
            self._has_queued.set()

    def fail(self, failure: PeerUnreachable) -> None:
        """End the path: nothing more is sent, and `receive` raises the failure."""
        self._failure = failure
        self._queue.clear()
        self._reading.cancel()
        self._writing.cancel()

    async def receive(self) -> Packet:
        """Return the next packet. For one task at a time; may be cancelled and called again.

        Raises:
            trio.EndOfChannel: The peer closed the path on purpose.
            PeerUnreachable: The connection broke, or the peer stopped reading.
            ProtocolError: The peer sent garbage.
            trio.ClosedResourceError: `aclose` was called.
        """
        if self._read_up_to == self._wire.bytes_received:
            await trio.lowlevel.checkpoint()  # many that came at once must not hold the loop
        self._read_up_to = self._wire.bytes_received
        if self._failure is None and not self._closed:
            with trio.CancelScope() as self._reading:
                return await self._next_packet()
        raise self._failure or trio.ClosedResourceError

    async def run_writer(self) -> None:
        """Send queued messages in large batches; return when the path has ended."""
        with self._writing:
            try:
                while True:
                    await self._has_queued.wait()
                    await self._send_queued()
            except PeerUnreachable as e:
                self.fail(e)

    async def aclose(self) -> None:
        """Send queued messages and a goodbye, and close; takes at most 0.5 s."""
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        self._closed = True
        try:
            if self._failure is None:
                with trio.move_on_after(PARTING_S):
                    await self._send_queued()
                    # Not before: the receiving task may end the writer too, and a batch that the
                    # writer took off the queue would be lost.
                    self._reading.cancel()
                    await self._wire.part()
        except PeerUnreachable:
            pass  # the peer is gone
        finally:
            self._reading.cancel()
            self._writing.cancel()
            await trio.aclose_forcefully(self._wire.stream)

    def __str__(self) -> str:
        return f"{self.peer.name} ({short_node(self.node)}, {self.remote_address})"

    async def _next_packet(self) -> Packet:
        data = await self._wire.next_frame()
        self.messages_received += 1
        with naming(self):
            return unpack_untrusted(data)

    async def _send_queued(self) -> None:
        if self._sending.locked():
            await self._sending.acquire()
        else:
            self._sending.acquire_nowait()  # `acquire` costs a turn of the loop for each message
        try:
            while self._queue:
                await trio.lowlevel.checkpoint_if_cancelled()  # else `send` would lose the batch
                await self._wire.send(self._take_batch())
            self._has_queued = trio.Event()
        finally:
            self._sending.release()

    def _take_batch(self) -> bytes:
        """Take as many messages as fit in one TLS record, but at least one."""
        batch = [self._queue.popleft()]
        size = len(batch[0])
        while self._queue and size + len(self._queue[0]) <= _BATCH_BYTES:
            batch.append(self._queue.popleft())
            size += len(batch[-1])
        self._queued_bytes -= size
        return b"".join(batch)
