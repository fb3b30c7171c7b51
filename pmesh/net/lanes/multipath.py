"""A lane over several connections, one on each path between two agents.

What goes where is decided in `pmesh.core.wire.subflows`. To the executor it is a lane like any
other. Its sockets are in one selector, which a thread's poll and the event loop wait for as for a
socket. A connection may be added or lost at any time, also while a thread has the lane: a lock
guards them, and whoever holds it does not wait.
"""

import contextlib
import select
import selectors
import socket
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import trio

from pmesh.core.wire import subflows as core
from pmesh.core.wire.link import OfferLane
from pmesh.core.wire.records import OVERHEAD_BYTES, Opener, RecordHeader, Sealer
from pmesh.errors import ProtocolError
from pmesh.net.lanes.lane import Lane, Steps, Wait

GRACE_S = 2.0  # without any path: a cable that is plugged in elsewhere, a redial
TICK_S = 0.05  # of what no call does: the last acknowledgements, and what is lost after an op
PUSH_S = 0.005  # while the system has no room for what is left
UNKNOWN_BYTES_PER_S = 125e6
_ACK = RecordHeader(core.ACK_BODY_BYTES, 0, op=0, segment=0, fingerprint=0, completed=-1)
_ACK_BYTES = OVERHEAD_BYTES + core.ACK_BODY_BYTES


class Path(NamedTuple):
    """A way between two agents, for one connection of a lane."""

    name: str
    """The same as long as the way is."""
    bytes_per_s: float = UNKNOWN_BYTES_PER_S
    round_trip_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Subflow:
    """One connection of a lane; acknowledgements go against its data."""

    index: int
    path: Path
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
    keeps: bool = True
    asked: int = 1
    interest: int = selectors.EVENT_READ


class _Buffers:
    """Memory of records that are done with, by length."""

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

    def __init__(
        self, first: Lane, path: Path, offer: OfferLane, *, wake_up_bytes: int = 1
    ) -> None:
        """The lane of `offer`, over a connection on this path that has been greeted."""
        sock, sealer, opener = first.give_up()
        super().__init__(sock, offer, sending=first.sending, peer=first.peer)
        self._most_asked = wake_up_bytes
        self._lock = threading.Lock()
        self._subflows: dict[int, _Subflow] = {}
        self._sends = core.SendWindow()
        self._receives = core.ReceiveWindow()
        self._buffers = _Buffers()
        self._selector = selectors.DefaultSelector()
        self._news = trio.Event()
        self._tending = False
        self._is_shut = False
        self._why = "was closed"
        self._next_index = 0
        self._join(path, sock, sealer, opener)

    # --- its connections

    def add(self, connection: Lane, path: Path) -> None:
        """A connection more, which has been greeted, on this path."""
        sock, sealer, opener = connection.give_up()
        if self._closed.is_set():
            sock.close()
            return
        self._join(path, sock, sealer, opener)

    def _join(self, path: Path, sock: socket.socket, sealer: Sealer, opener: Opener) -> None:
        with self._lock:
            index, self._next_index = self._next_index, self._next_index + 1
            self._subflows[index] = _Subflow(index, path, sock, sealer, opener)
            self._selector.register(sock, selectors.EVENT_READ)
            self._sends.add(
                index,
                bytes_per_s=path.bytes_per_s,
                round_trip_s=path.round_trip_s,
                now=perf_counter(),
            )
            self._receives.add(index)
        self.pump(outside=True)
        self._stir()

    def drop(self, name: str) -> None:
        """This path is lost, or no longer to be used: the others bring what it has not brought."""
        with self._lock:
            for subflow in list(self._subflows.values()):
                if subflow.path.name == name:
                    self._lose(subflow)
        self.pump(outside=True)
        self._stir()

    def paths(self) -> dict[str, core.Load]:
        """What is known of each path that is in use, by its name."""
        with self._lock:
            loads = self._sends.subflows
            return {s.path.name: loads[index] for index, s in self._subflows.items()}

    def _lose(self, subflow: _Subflow) -> None:
        del self._subflows[subflow.index]
        self._selector.unregister(subflow.sock)
        subflow.sock.close()
        self._sends.drop(subflow.index)
        self._receives.drop(subflow.index)

    # --- the lane's life

    def close(self) -> None:
        """Close all connections; whoever waits on the lane gets LaneBroken."""
        self._closed.set()
        self._stir()
        if self._stop_thread is not None:
            self._stop_thread()
            return
        with self._lock:
            for subflow in self._subflows.values():
                subflow.sock.close()
            self._subflows.clear()
            if not self._is_shut:
                self._is_shut = True
                trio.lowlevel.notify_closing(self._selector.fileno())
                self._selector.close()

    def check_open(self) -> None:
        """Raises LaneBroken if the lane has been closed, or has been without a path too long."""
        if self._closed.is_set():
            raise self._broken(self._why)

    def lend(self, stop: Callable[[], None]) -> None:
        """Until `take_back` a thread works with the lane; `stop` makes it end soon."""
        super().lend(stop)
        self._stir()

    def take_back(self) -> None:
        """The thread has ended."""
        super().take_back()
        self._stir()

    def register(self, poll: select.poll) -> None:
        """In a thread: `poll` is to return when the lane's steps may go on."""
        poll.register(self._selector.fileno(), select.POLLIN)

    async def wait_for(self, wait: Wait) -> None:
        """Wait, in the event loop, for what a step of this lane has yielded."""
        if wait not in {Wait.READABLE, Wait.WRITABLE}:
            await super().wait_for(wait)
            return
        try:
            await trio.lowlevel.wait_readable(self._selector.fileno())
        except (trio.ClosedResourceError, ValueError, OSError) as e:
            raise self._broken(self._why) from e

    async def tend(self) -> None:
        """Do what is to be done between the calls, until the lane is closed."""
        while not self._closed.is_set():
            self._news = trio.Event()
            if not self._subflows:
                with trio.move_on_after(GRACE_S):
                    await self._news.wait()
                if not self._subflows and not self._closed.is_set():
                    self._why = "has lost its last path"
                    self.close()
                continue
            if self._stop_thread is None and self._is_quiet:
                self._tending = False
                await self._news.wait()
            self._tending = True
            await trio.sleep(PUSH_S if self._sends.has_unsent else TICK_S)
            self.pump(outside=True)

    @property
    def _is_quiet(self) -> bool:
        return self._sends.is_empty if self.sending else not self._receives.owing

    def _stir(self) -> None:
        """In the event loop: `tend` has something to look after."""
        self._news.set()

    # --- what goes out

    @property
    def idle(self) -> bool:
        """All has been handed to the system, and `post` may be called."""
        if self._is_idle:
            return True
        self.pump()
        return self._is_idle

    @property
    def _is_idle(self) -> bool:
        return self._sends.has_room and not self._sends.has_unsent

    def post(self, header: RecordHeader, body: bytes | memoryview) -> bool:
        """Seal a record and hand over what the system takes at once; True if that was all."""
        frame = self._buffers.take(core.frame_bytes(header.body_bytes))
        core.put_number(self._sends.next_number, frame)
        self._sealer.seal(header, body, frame[core.NUMBER_BYTES :])
        with self._lock:
            self._sends.put(frame)
        self.pump()
        if not self._tending and self._stop_thread is None:
            self._stir()
        return self._is_idle

    def sends(self, header: RecordHeader, body: bytes | memoryview) -> Steps:
        """The steps of `send`, which ends when `body` may be reused; `flushes` sends the rest."""
        self.check_open()
        while not self._sends.has_room:
            self.pump()
            if not self._sends.has_room:
                yield Wait.WRITABLE
                self.check_open()
        self.post(header, body)
        yield Wait.TURN

    def flushes(self) -> Steps:
        """Until all has been handed to the system."""
        while self._sends.has_unsent:
            self.pump()
            if self._sends.has_unsent:
                yield Wait.WRITABLE
                self.check_open()

    def pump(self, *, outside: bool = False) -> None:
        """Write and acknowledge what can be, without waiting; from any thread, at any time.

        From `outside` of a call it wakes the call that waits, which may lack nothing any more.
        """
        with self._lock:
            if self._closed.is_set():
                return
            now = perf_counter()
            for subflow in list(self._subflows.values()):
                with self._losing(subflow):
                    if self.sending:
                        self._read_acks(subflow, now)
                    else:
                        self._write_ack(subflow, waiting=False, force=outside)
            if self.sending:
                self._sends.relieve(now=now)
                for subflow in list(self._subflows.values()):
                    with self._losing(subflow):
                        self._write(subflow, now)
                for subflow in self._subflows.values():  # some may have been lost, and others fill
                    self._show_interest(subflow, all_of_it=outside)

    @contextlib.contextmanager
    def _losing(self, subflow: _Subflow) -> Generator[None, None, None]:
        """A connection that ends, or brings what it should not, is lost; the lane is not."""
        try:
            yield
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            self._lose(subflow)

    def _write(self, subflow: _Subflow, now: float) -> None:
        while part := self._sends.next_part(subflow.index):
            count = subflow.sock.send(part)
            self.bytes_sent += count
            self._sends.wrote(subflow.index, count, now=now)

    def _show_interest(self, subflow: _Subflow, *, all_of_it: bool) -> None:
        wants = selectors.EVENT_READ
        if all_of_it or self._sends.has_to_write(subflow.index):
            wants |= selectors.EVENT_WRITE
        if wants != subflow.interest:
            subflow.interest = wants
            self._selector.modify(subflow.sock, wants)

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

    def _fill(self, enough: int, limit: int) -> Generator[Wait, None, bool]:
        """Receive until the next record is there, whole; True if that took a wait."""
        del enough, limit
        waited = False
        while True:
            with self._lock:
                frame = self._receives.first
                if frame is None:
                    for subflow in list(self._subflows.values()):
                        with self._losing(subflow):
                            self._read(subflow)
                    frame = self._receives.first
            if frame is not None:
                self._in = frame[core.NUMBER_BYTES :]
                self._filled = len(self._in)
                return waited
            self.check_open()
            waited = True
            yield Wait.READABLE

    def _read(self, subflow: _Subflow) -> None:
        """One record, or as much of it as is there."""
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
        """Receive once; True if that ends a record."""
        begins = subflow.filled < core.FRAME_HEADER_BYTES
        into = subflow.header if begins else subflow.frame
        count = subflow.sock.recv_into(into[subflow.filled :])
        if not count:
            raise ConnectionResetError
        subflow.filled += count
        self.bytes_received += count
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
        """As `Lane._ask_for`."""
        rest = len(subflow.frame) if subflow.frame else core.FRAME_HEADER_BYTES
        asked = min(rest - subflow.filled, self._most_asked)
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
            self._stir()
