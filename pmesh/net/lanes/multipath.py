"""A lane over several connections, one on each path between two agents.

`pmesh.core.wire.subflows` decides which connection takes a record. To the executor this is a lane
like any other: its sockets are in one selector, for which a thread's poll and the event loop wait
as for a socket. A connection may be added or lost at any time, also while a thread uses the lane. A
lock guards the connections, and code that holds it does not wait.
"""

import contextlib
import select
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from pmesh.core.wire import subflows as core
from pmesh.core.wire.lanes import OfferLane
from pmesh.core.wire.records import OVERHEAD_BYTES, Opener, RecordHeader, Sealer
from pmesh.errors import ProtocolError
from pmesh.net.lanes.lane import Lane, LaneWait, Steps

MAX_SUBFLOWS = 16  # twice as many as a link has paths; more is an attack
MAX_INDICES = 65_536  # in a lane's life: for a path that comes and goes each minute, six weeks
GRACE_S = 2.0  # after the last path has failed, until another one is joined
LINGER_S = 2.0  # after `close`, until all that was sent has been acknowledged
TICK_S = 0.05  # for what no call does: last acknowledgements, and what is lost after an op
PUSH_S = 0.005  # while the system has no room for what is left
UNKNOWN_BYTES_PER_S = 125e6
_ACK = RecordHeader(core.ACK_BODY_BYTES, 0, op=0, segment=0, fingerprint=0, completed=-1)
_ACK_BYTES = OVERHEAD_BYTES + core.ACK_BODY_BYTES


class ConnectionFacts(NamedTuple):
    """What is known of a connection before anything was sent over it."""

    bytes_per_s: float = UNKNOWN_BYTES_PER_S
    round_trip_s: float = 0.0


class LanePath(NamedTuple):
    """A path between two agents, over which each lane gets a connection."""

    hosts: tuple[AbstractSet[str], AbstractSet[str]]
    """The addresses of its two interfaces, ours first."""
    facts: ConnectionFacts
    dial: Callable[[], Awaitable[trio.SocketStream]]
    """Opens another connection over it, to the peer's door; may raise NetworkError."""


@dataclass(slots=True, eq=False)
class _Subflow:
    """One connection of a lane; acknowledgements travel in the direction opposite to data."""

    index: int
    hosts: tuple[str, str]
    sock: socket.socket
    sealer: Sealer
    opener: Opener
    ack: memoryview = field(default_factory=lambda: memoryview(bytearray(_ACK_BYTES)))
    ack_filled: int = 0
    unsent_ack: memoryview = field(default_factory=lambda: memoryview(b""))
    header: memoryview = field(
        default_factory=lambda: memoryview(bytearray(core.FRAME_HEADER_BYTES))
    )
    frame: memoryview = field(default_factory=lambda: memoryview(b""))
    filled: int = 0
    bytes_read: int = 0
    asked: int = 1
    interest: int = selectors.EVENT_READ


class _Buffers:
    """The memory of records that are done, by length, to be used again."""

    def __init__(self) -> None:
        self._free: dict[int, list[memoryview]] = {}
        self._bytes = 0

    def take(self, nbytes: int) -> memoryview:
        free = self._free.get(nbytes)
        if not free:
            return memoryview(bytearray(nbytes))
        self._bytes -= nbytes
        return free.pop()

    def give(self, frame: memoryview) -> None:
        if self._bytes + len(frame) > core.WINDOW_BYTES:
            self._free.clear()
            self._bytes = 0
        self._free.setdefault(len(frame), []).append(frame)
        self._bytes += len(frame)


class MultipathLane(Lane):
    """One end of a lane over several connections. It owns their sockets.

    `tend` must run in the event loop for as long as the lane is open.
    """

    has_one_socket = False

    def __init__(self, first: Lane, facts: ConnectionFacts, offer: OfferLane) -> None:
        """Make the lane of `offer` from its connection with index 0, which has been greeted.

        Raises:
            LaneBroken: No descriptor is left for its selector. The connection is closed.
        """
        super().__init__(
            first.give_up()[0],
            offer,
            sending=first.sending,
            peer=first.peer,
            wake_up_bytes=2 * first.wake_up_bytes,  # each costs more than in the library
        )
        self._lock = threading.Lock()
        self._subflows: dict[int, _Subflow] = {}
        self._used: set[int] = set()
        self._sends = core.SendWindow()
        self._receives = core.ReceiveWindow()
        self._buffers = _Buffers()
        self._selector, self._wake_reader, self._wake_writer = self._open_selector()
        self._is_woken = False
        self._news = trio.Event()
        self._tending = False
        self._is_shut = False
        self._was_ended = False
        """Whether the peer, and not the network, has ended the connection that was lost last."""
        self._why = "was closed"
        self.join(first, 0, facts)

    def _open_selector(self) -> tuple[selectors.DefaultSelector, socket.socket, socket.socket]:
        """Return a selector, and a pair of sockets of which the first one wakes it."""
        with contextlib.ExitStack() as on_error:
            on_error.callback(super().close)
            try:
                selector = on_error.enter_context(selectors.DefaultSelector())
                reader, writer = socket.socketpair()
                on_error.callback(reader.close)
                on_error.callback(writer.close)
                selector.register(reader, selectors.EVENT_READ)
            except OSError as e:
                raise self.broken(f"has no room: {e.strerror}") from e
            on_error.pop_all()
        return selector, reader, writer

    # --- its connections

    def join(self, connection: Lane, index: int, facts: ConnectionFacts) -> None:
        """Add a connection, which has been greeted with the keys of this index.

        Raises:
            LaneBroken: the index was used before, and its keys serve once; or the lane or the
                system has too many connections; or the lane is closed. The connection is closed.
        """
        is_full = len(self._subflows) >= MAX_SUBFLOWS or len(self._used) >= MAX_INDICES
        if self.is_closed or self.has_used(index) or is_full:
            connection.close()
            raise self.broken(f"takes no connection with index {index}")
        self._used.add(index)
        sock, sealer, opener = connection.give_up()
        with self._lock:
            try:
                self._selector.register(sock, selectors.EVENT_READ)
            except OSError as e:  # the system watches no more
                sock.close()
                raise self.broken(f"has no room: {e.strerror}") from e
            self._subflows[index] = _Subflow(index, connection.hosts, sock, sealer, opener)
            self._sends.add(
                index,
                bytes_per_s=facts.bytes_per_s,
                round_trip_s=facts.round_trip_s,
                now=time.perf_counter(),
            )
            self._receives.add(index)
        self.pump(outside=True)
        self._wake_tend()

    def has_used(self, index: int) -> bool:
        """Return whether a connection has joined under this index."""
        return index in self._used

    def runs_between(self, ours: AbstractSet[str], theirs: AbstractSet[str]) -> bool:
        """Return whether one of its connections has its two ends at these addresses."""
        with self._lock:
            return any(_is_between(s, ours, theirs) for s in self._subflows.values())

    def drop(self, ours: AbstractSet[str], theirs: AbstractSet[str]) -> None:
        """Drop the connections on a path that has failed: others send again what they have lost."""
        with self._lock:
            for subflow in list(self._subflows.values()):
                if _is_between(subflow, ours, theirs):
                    self._lose(subflow, ended=False)
        self.pump(outside=True)
        self._wake_tend()

    def _lose(self, subflow: _Subflow, *, ended: bool) -> None:
        self._was_ended = ended
        del self._subflows[subflow.index]
        self._selector.unregister(subflow.sock)
        subflow.sock.close()
        self._sends.drop(subflow.index)
        self._receives.drop(subflow.index)

    # --- the lane's life

    def close(self) -> None:
        """Make tasks that wait on the lane get LaneBroken; `tend` closes the connections."""
        self._closed.set()
        self._wake_tend()
        if self._stop_thread is not None:
            self._stop_thread()
        elif not self._is_shut:
            trio.lowlevel.notify_closing(self._selector.fileno())

    def _shut(self) -> None:
        self.close()
        with self._lock:
            for subflow in self._subflows.values():
                subflow.sock.close()
            self._subflows.clear()
            self._is_shut = True
            self._selector.close()
            self._wake_reader.close()
            self._wake_writer.close()

    def check_open(self) -> None:
        """Raise LaneBroken if the lane has been closed, or has been without a path too long."""
        if self._closed.is_set():
            raise self.broken(self._why)

    def lend(self, stop: Callable[[], None]) -> None:
        """Lend the lane to a thread until `take_back`; `stop` makes the thread end soon."""
        super().lend(stop)
        self._wake_tend()

    def take_back(self) -> None:
        """Take the lane back: the thread has ended."""
        super().take_back()
        self._wake_tend()

    def register(self, poll: select.poll) -> None:
        """Make a thread's `poll` return when the lane's steps may go on."""
        poll.register(self._selector.fileno(), select.POLLIN)

    async def wait_for(self, wait: LaneWait) -> None:
        """Wait, in the event loop, for what a step of this lane has yielded."""
        if wait not in {LaneWait.READABLE, LaneWait.WRITABLE}:
            await super().wait_for(wait)
            return
        self.check_open()
        try:
            await trio.lowlevel.wait_readable(self._selector.fileno())
        except (trio.ClosedResourceError, ValueError, OSError) as e:
            raise self.broken(self._why) from e

    async def tend(self) -> None:
        """Do what no call does, until the lane is closed; then close its connections."""
        try:
            while not self.is_closed:
                await self._tend_once()
            with trio.move_on_after(LINGER_S):  # a socket that is closed earlier would be reset
                while self._stop_thread is not None or self._awaits_acks:
                    await trio.sleep(PUSH_S)
                    self.pump()
        finally:
            self._shut()

    async def _tend_once(self) -> None:
        self._news = trio.Event()
        if not self._subflows:
            await self._await_path()
            return
        if self._stop_thread is None and self._is_quiet:
            self._tending = False
            await self._news.wait()
        self._tending = True
        is_ours = self._stop_thread is None  # a thread writes what it has posted by itself
        await trio.sleep(PUSH_S if is_ours and self._has_unsent else TICK_S)
        self.pump(outside=True)

    async def _await_path(self) -> None:
        """Close the lane if the peer has closed it, or if no other path is joined in time."""
        if not self._was_ended:
            with trio.move_on_after(GRACE_S):
                while not (self._subflows or self.is_closed):
                    await self._news.wait()
                    self._news = trio.Event()
        elif self._receives.first is not None:
            await trio.sleep(TICK_S)  # records that came before the end are still to be read
            return
        if not (self._subflows or self.is_closed):
            self._why = "ended"
            self._path_lost = not self._was_ended
            self.close()

    @property
    def _is_quiet(self) -> bool:
        with self._lock:
            return self._sends.is_empty if self.sending else not self._receives.owing

    @property
    def _awaits_acks(self) -> bool:
        """Whether all has been sent, and not all acknowledged."""
        with self._lock:
            under_way = not (self._sends.is_empty or self._sends.has_unsent)
            return self.sending and under_way and bool(self._subflows)

    def _wake_tend(self) -> None:
        """Tell `tend`, from the event loop, that there is something to do."""
        self._news.set()

    # --- what goes out

    @property
    def idle(self) -> bool:
        """Whether all has been handed to the system, so that `post` may be called."""
        if self._is_idle:
            return True
        self.pump()
        return self._is_idle

    @property
    def _is_idle(self) -> bool:
        return self._has_room and not self._has_unsent

    @property
    def _has_room(self) -> bool:
        with self._lock:
            return self._sends.has_room

    @property
    def _has_unsent(self) -> bool:
        with self._lock:
            return self._sends.has_unsent

    def post(self, header: RecordHeader, body: bytes | memoryview) -> bool:
        """Seal a record and send what the system takes at once; return True if that was all."""
        with self._lock:
            frame = self._buffers.take(core.frame_bytes(header.body_bytes))
            core.put_number(self._sends.next_number, frame)
        self._sealer.seal(header, body, frame[core.NUMBER_BYTES :])
        with self._lock:
            self._sends.put(frame)
        self.pump()
        if not self._tending and self._stop_thread is None:
            self._wake_tend()
        return self._is_idle

    def sends(self, header: RecordHeader, body: bytes | memoryview) -> Steps:
        """Yield the steps of `send`, until `body` may be reused; `flushes` sends the rest."""
        self.check_open()
        while not self._has_room:
            self.pump()
            if not self._has_room:
                yield LaneWait.WRITABLE
                self.check_open()
        self.post(header, body)
        yield LaneWait.TURN

    def flushes(self) -> Steps:
        """Yield the steps until all has been handed to the system."""
        while self._has_unsent:
            self.pump()
            if self._has_unsent:
                self.check_open()
                yield LaneWait.WRITABLE

    def pump(self, *, outside: bool = False) -> None:
        """Write and acknowledge what is possible without waiting; from any thread, at any time.

        From `outside` of a call, also wake the call that waits, which may now be able to go on.
        """
        with self._lock:
            if self._is_shut:
                return
            now = time.perf_counter()
            for subflow in list(self._subflows.values()):
                if self.sending:
                    self._try(subflow, self._read_acks, now=now)
                else:
                    self._try(subflow, self._write_ack, waiting=False, force=outside)
            if self.sending:
                self._sends.relieve(now=now)
                for subflow in list(self._subflows.values()):
                    self._try(subflow, self._write, now=now)
                for subflow in self._subflows.values():  # others may have got what a lost one had
                    self._show_interest(subflow)
                self._set_wake(outside)

    def _try(self, subflow: _Subflow, act: Callable[..., None], **options: object) -> bool:
        """Read or write, and return True unless the connection is not ready, or is lost by it.

        The lane goes on without a connection that ends or brings invalid data.
        """
        try:
            act(subflow, **options)
        except BlockingIOError:
            return False
        except (OSError, ProtocolError) as e:
            self._lose(subflow, ended=isinstance(e, ConnectionError | ProtocolError))
            if self._stop_thread is None:  # else `tend` checks by itself
                self._wake_tend()
            return False
        return True

    def _write(self, subflow: _Subflow, now: float) -> None:
        while part := self._sends.next_part(subflow.index):
            count = subflow.sock.send(part)
            self.state.bytes_sent += count
            self._sends.wrote(subflow.index, count, now=now)

    def _show_interest(self, subflow: _Subflow) -> None:
        wants = selectors.EVENT_READ
        if self._sends.has_to_write(subflow.index):
            wants |= selectors.EVENT_WRITE
        if wants != subflow.interest:
            subflow.interest = wants
            self._selector.modify(subflow.sock, wants)

    def _set_wake(self, wakes: bool) -> None:  # noqa: FBT001 - it is the whole of it
        """Make the selector ready or not, as its sockets may all be full and silent."""
        if wakes and not self._is_woken:
            self._wake_writer.send(b"!")
        elif self._is_woken and not wakes:
            self._wake_reader.recv(1)
        self._is_woken = wakes

    def _read_acks(self, subflow: _Subflow, now: float) -> None:
        while True:
            count = subflow.sock.recv_into(subflow.ack[subflow.ack_filled :])
            if not count:
                raise ConnectionResetError
            subflow.ack_filled += count
            if subflow.ack_filled < _ACK_BYTES:
                continue
            subflow.ack_filled = 0
            body = bytearray(core.ACK_BODY_BYTES)
            subflow.opener.open_untrusted(subflow.ack, body)
            ack = core.decode_ack(body)
            for frame in self._sends.acknowledge_untrusted(subflow.index, ack, now=now):
                self._buffers.give(frame)

    # --- what comes in

    def _fill(self, enough: int, limit: int) -> Generator[LaneWait, None, bool]:
        """Receive until the next record is there, whole; return True if that took a wait."""
        del enough, limit
        waited = all_flow = False
        before, began = dict[int, int](), 0.0
        while True:
            with self._lock:
                frame, may_have_more = self._receives.first, False
                reads_at = time.monotonic()
                if frame is None:
                    for subflow in list(self._subflows.values()):
                        may_have_more |= self._try(subflow, self._read)
                    frame = self._receives.first
                if frame is None and may_have_more:
                    continue  # no wait: less may be there than makes a socket readable
                if frame is None and not waited:
                    flowing = [bool(subflow.frame) for subflow in self._subflows.values()]
                    all_flow = bool(flowing) and all(flowing)
                    before = {s.index: s.bytes_read for s in self._subflows.values()}
                    began = reads_at
            if frame is not None:
                if all_flow:
                    self._note_paces(self._came_since(before), time.monotonic() - began)
                self._in = frame[core.NUMBER_BYTES :]
                self.state.filled = len(self._in)
                return waited
            self.check_open()
            waited = True
            yield LaneWait.READABLE

    def _came_since(self, before: Mapping[int, int]) -> Counter[tuple[str, str]]:
        """Return the bytes that came on each path, which may have several connections."""
        came = Counter[tuple[str, str]]()
        with self._lock:
            for subflow in self._subflows.values():
                if subflow.index in before:
                    came[subflow.hosts] += subflow.bytes_read - before[subflow.index]
        return came

    def _read(self, subflow: _Subflow) -> None:
        """Read one record; raise BlockingIOError if not all of it is there."""
        whole = False
        try:
            while not whole:
                whole = self._read_some(subflow)
        except BlockingIOError:
            self._ask_for_rest(subflow)
            self._write_ack(subflow, waiting=True)
            raise
        self._write_ack(subflow, waiting=False)

    def _read_some(self, subflow: _Subflow) -> bool:
        """Receive once; return True if that ends a record."""
        begins = subflow.filled < core.FRAME_HEADER_BYTES
        into = subflow.header if begins else subflow.frame
        count = subflow.sock.recv_into(into[subflow.filled :])
        if not count:
            raise ConnectionResetError
        subflow.filled += count
        subflow.bytes_read += count
        self.state.bytes_received += count
        self._receives.read(subflow.index, count)
        if begins and subflow.filled == core.FRAME_HEADER_BYTES:
            nbytes = core.read_frame_untrusted(subflow.header)
            subflow.frame = self._buffers.take(nbytes)
            subflow.frame[: core.FRAME_HEADER_BYTES] = subflow.header
        elif not begins and subflow.filled == len(subflow.frame):
            frame, subflow.frame, subflow.filled = subflow.frame, memoryview(b""), 0
            if not self._receives.arrived_untrusted(subflow.index, frame):
                self._buffers.give(frame)
            return True
        return False

    def _ask_for_rest(self, subflow: _Subflow) -> None:
        """Make the socket readable only once the rest is there, as `Lane._ask_for` does."""
        rest = len(subflow.frame) if subflow.frame else core.FRAME_HEADER_BYTES
        asked = min(rest - subflow.filled, self.wake_up_bytes)
        if asked != subflow.asked:
            subflow.asked = asked
            with contextlib.suppress(OSError):
                subflow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, asked)

    def _write_ack(self, subflow: _Subflow, *, waiting: bool, force: bool = False) -> None:
        index = subflow.index
        if not subflow.unsent_ack and (
            self._receives.is_due(index, waiting=waiting)
            or (force and index in self._receives.owing)
        ):
            ack = core.encode_ack(self._receives.acknowledge(index, waiting=waiting))
            subflow.unsent_ack = subflow.ack[: subflow.sealer.seal(_ACK, ack, subflow.ack)]
        if subflow.unsent_ack:
            count = subflow.sock.send(subflow.unsent_ack)
            subflow.unsent_ack = subflow.unsent_ack[count:]

    def _open(self, end: int, into: bytearray | memoryview) -> None:
        super()._open(end, into)
        with self._lock:
            self._buffers.give(self._receives.opened())
        if not self._tending and self._stop_thread is None:
            self._wake_tend()


def _is_between(subflow: _Subflow, ours: AbstractSet[str], theirs: AbstractSet[str]) -> bool:
    here, there = subflow.hosts
    return here in ours and there in theirs
