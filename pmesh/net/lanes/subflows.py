"""The connections of one end of a lane over several, and what goes over which of them.

`pmesh.core.wire.subflows` decides; this reads and writes. The native library does the same
(`pmesh.net.lanes.native_subflows`). Nothing here waits: who waits for the connections does so for
one descriptor, that of a selector.
"""

import contextlib
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from pmesh.core.wire import subflows as core
from pmesh.core.wire.records import OVERHEAD_BYTES, Opener, RecordHeader, Sealer
from pmesh.errors import ProtocolError
from pmesh.native.layout import LaneState
from pmesh.net.lanes.lane import WAKE_UP_BYTES, Throughput

UNKNOWN_BYTES_PER_S = 125e6
MOST_AT_ONCE = core.WINDOW_RECORDS
"""Records, or acknowledgements of one subflow, that are read in one call: a peer may send without
end."""
_ACK = RecordHeader(core.ACK_BODY_BYTES, 0, op=0, segment=0, fingerprint=0, completed=-1)
_ACK_BYTES = OVERHEAD_BYTES + core.ACK_BODY_BYTES


class ConnectionFacts(NamedTuple):
    """What is known of a connection before anything was sent over it."""

    bytes_per_s: float = UNKNOWN_BYTES_PER_S
    round_trip_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GreetedConnection:
    """A connection that has been greeted with the keys of its index."""

    index: int
    hosts: tuple[str, str]
    """The addresses of its two ends, ours first."""
    sock: socket.socket
    sealer: Sealer
    opener: Opener


@dataclass(slots=True, eq=False)
class Subflow:
    """One connection of a lane; acknowledgements travel in the direction opposite to data."""

    index: int
    hosts: tuple[str, str]
    sock: socket.socket
    interest: int = selectors.EVENT_READ


SubflowT = TypeVar("SubflowT", bound=Subflow)


class Subflows(ABC, Generic[SubflowT]):
    """The connections of one end of a lane. It owns their sockets.

    Any thread may call it at any time. A lock guards it, and code that holds it does not wait.
    """

    address: int | None = None
    """Where the native library finds it; None if it is Python's."""

    def __init__(
        self, waker: int | socket.socket, *, sending: bool, on_lost: Callable[[bool], None]
    ) -> None:
        """Watch `waker`, which is ready while a wait for the connections is to end.

        Args:
            waker: A descriptor.
            sending: Whether this end sends the data.
            on_lost: Called with True if the peer, and not the network, has ended a connection.

        Raises:
            OSError: No descriptor is left.
        """
        self._sending = sending
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._subflows: dict[int, SubflowT] = {}
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        try:
            self._selector.register(waker, selectors.EVENT_READ)
        except OSError:
            self._selector.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor that is readable when a call may do more."""
        return self._selector.fileno()

    def __len__(self) -> int:
        return len(self._subflows)

    def runs_between(self, ours: AbstractSet[str], theirs: AbstractSet[str]) -> bool:
        """Return whether a connection has its two ends at these addresses."""
        with self._lock:
            return any(_is_between(subflow, ours, theirs) for subflow in self._subflows.values())

    @abstractmethod
    def add(self, connection: GreetedConnection, facts: ConnectionFacts) -> None:
        """Add a connection; raise OSError if the system watches no more. Its socket is then ours.

        Its index was never used before.
        """

    def drop(self, ours: AbstractSet[str], theirs: AbstractSet[str]) -> None:
        """Drop the connections between these addresses: others send again what they have lost."""
        with self._lock:
            for subflow in list(self._subflows.values()):
                if _is_between(subflow, ours, theirs):
                    self._forget(subflow)
                    self._lose(subflow, ended=False)

    @abstractmethod
    def _forget(self, subflow: SubflowT) -> None:
        """Do nothing more with a connection."""

    def _lose(self, subflow: SubflowT, *, ended: bool) -> None:
        del self._subflows[subflow.index]
        self._selector.unregister(subflow.sock)
        subflow.sock.close()
        self._on_lost(ended)

    def close(self) -> None:
        """Close all connections; no other call follows, but of a property."""
        with self._lock:
            for subflow in list(self._subflows.values()):
                self._forget(subflow)
                subflow.sock.close()
            self._subflows.clear()
            self._is_closed = True
            self._selector.close()

    def _watch(self, subflow: SubflowT, *, to_write: bool) -> None:
        """Watch a connection also for room to write, or no longer."""
        wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if to_write else 0)
        if wants != subflow.interest:
            subflow.interest = wants
            self._selector.modify(subflow.sock, wants)

    @abstractmethod
    def pump(self, *, outside: bool = False) -> None:
        """Write and acknowledge what is possible without waiting.

        From `outside` of a call, also wake the call that waits, which may now be able to go on.
        """

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether one more record may be put."""

    @property
    @abstractmethod
    def has_unsent(self) -> bool:
        """Whether anything that the receiver lacks has yet to be written."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether all that was put has been acknowledged."""

    @property
    @abstractmethod
    def owes(self) -> bool:
        """Whether an acknowledgement is due, now or later."""

    @property
    @abstractmethod
    def has_first(self) -> bool:
        """Whether a record is there that has not been opened."""

    @abstractmethod
    def take(self, nbytes: int) -> memoryview:
        """Return where the next record, of so many bytes, is to be sealed; `put` sends it."""

    @abstractmethod
    def put(self) -> None:
        """Send the record that was sealed where `take` has said."""

    @abstractmethod
    def read(self, *, waited: bool) -> memoryview | None:
        """Return the next record once it is there, whole; `opened` gives its memory back.

        Args:
            waited: Whether the call before, of the same op, has returned None.
        """

    @abstractmethod
    def opened(self) -> None:
        """Go on to the record after the one that `read` has returned."""

    @abstractmethod
    def take_paces(self) -> Mapping[tuple[str, str], Throughput]:
        """Return how fast data came, by hosts, while a call waited in the middle of records.

        All that is here since the last call.
        """


def _is_between(subflow: Subflow, ours: AbstractSet[str], theirs: AbstractSet[str]) -> bool:
    here, there = subflow.hosts
    return here in ours and there in theirs


# --- in Python


@dataclass(slots=True, eq=False, kw_only=True)
class _PythonSubflow(Subflow):
    sealer: Sealer
    opener: Opener
    ack: memoryview = field(default_factory=lambda: memoryview(bytearray(_ACK_BYTES)))
    ack_filled: int = 0
    looked_at: float = 0.0
    """When all acknowledgements that had come were read."""
    unsent_ack: memoryview = field(default_factory=lambda: memoryview(b""))
    header: memoryview = field(
        default_factory=lambda: memoryview(bytearray(core.FRAME_HEADER_BYTES))
    )
    frame: memoryview = field(default_factory=lambda: memoryview(b""))
    filled: int = 0
    bytes_read: int = 0
    asked: int = 1


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


class PythonSubflows(Subflows[_PythonSubflow]):
    """The connections of one end of a lane, without the native library."""

    def __init__(self, state: LaneState, *, sending: bool, on_lost: Callable[[bool], None]) -> None:
        """`state` is the lane's: its counters and its `wake_up_bytes`. For the rest see the base.

        Raises OSError if no descriptor is left.
        """
        self._wake_reader, self._wake_writer = socket.socketpair()
        try:
            super().__init__(self._wake_reader, sending=sending, on_lost=on_lost)
        except OSError:
            self._close_pair()
            raise
        self._state = state
        self._sends = core.SendWindow()
        self._receives = core.ReceiveWindow()
        self._buffers = _Buffers()
        self._taken = memoryview(b"")
        self._is_woken = False
        self._before: dict[int, int] | None = None
        """Of each connection, what it had brought when a wait began in the middle of a record on
        all of them."""
        self._began = 0.0
        self._paces: dict[tuple[str, str], Throughput] = {}

    def _close_pair(self) -> None:
        self._wake_reader.close()
        self._wake_writer.close()

    def close(self) -> None:
        super().close()
        self._close_pair()

    def add(self, connection: GreetedConnection, facts: ConnectionFacts) -> None:
        index, sock = connection.index, connection.sock
        with self._lock:
            self._selector.register(sock, selectors.EVENT_READ)
            self._subflows[index] = _PythonSubflow(
                *(index, connection.hosts, sock),
                sealer=connection.sealer,
                opener=connection.opener,
            )
            self._sends.add(
                index,
                bytes_per_s=facts.bytes_per_s,
                round_trip_s=facts.round_trip_s,
                now=time.perf_counter(),
            )
            self._receives.add(index)

    def _forget(self, subflow: _PythonSubflow) -> None:
        self._sends.drop(subflow.index)
        self._receives.drop(subflow.index)

    # --- what goes out

    @property
    def has_room(self) -> bool:
        with self._lock:
            return self._sends.has_room

    @property
    def has_unsent(self) -> bool:
        with self._lock:
            return self._sends.has_unsent

    @property
    def is_empty(self) -> bool:
        with self._lock:
            return self._sends.is_empty

    @property
    def owes(self) -> bool:
        with self._lock:
            return bool(self._receives.owing)

    @property
    def has_first(self) -> bool:
        with self._lock:
            return self._receives.first is not None

    def take(self, nbytes: int) -> memoryview:
        with self._lock:
            self._taken = self._buffers.take(core.NUMBER_BYTES + nbytes)
            core.put_number(self._sends.next_number, self._taken)
        return self._taken[core.NUMBER_BYTES :]

    def put(self) -> None:
        with self._lock:
            self._read_all_acks(time.perf_counter())  # to send it where really least is under way
            self._sends.put(self._taken)

    def _read_all_acks(self, now: float) -> None:
        for subflow in list(self._subflows.values()):
            self._try(subflow, self._read_acks, now=now)

    def pump(self, *, outside: bool = False) -> None:
        with self._lock:
            if self._is_closed:
                return
            now = time.perf_counter()
            if self._sending:
                self._read_all_acks(now)
                self._sends.relieve(now=now)
                for subflow in list(self._subflows.values()):
                    self._try(subflow, self._write, now=now)
                for subflow in self._subflows.values():  # others may have got what a lost one had
                    self._watch(subflow, to_write=self._sends.has_to_write(subflow.index))
                self._set_wake(outside)
                return
            for subflow in list(self._subflows.values()):
                self._try(subflow, self._write_ack, waiting=False, force=outside)

    def _try(self, subflow: _PythonSubflow, act: Callable[..., None], **options: object) -> bool:
        """Read or write, and return True unless the connection is not ready, or is lost by it.

        The lane goes on without a connection that ends or brings invalid data.
        """
        try:
            act(subflow, **options)
        except BlockingIOError:
            return False
        except (OSError, ProtocolError) as e:
            self._forget(subflow)
            self._lose(subflow, ended=isinstance(e, ConnectionError | ProtocolError))
            return False
        return True

    def _write(self, subflow: _PythonSubflow, now: float) -> None:
        while part := self._sends.next_part(subflow.index):
            count = subflow.sock.send(part)
            self._state.bytes_sent += count
            self._sends.wrote(subflow.index, count, now=now)

    def _set_wake(self, wakes: bool) -> None:  # noqa: FBT001 - it is the whole of it
        """Make the selector ready or not, as its sockets may all be full and silent."""
        if wakes and not self._is_woken:
            self._wake_writer.send(b"!")
        elif self._is_woken and not wakes:
            self._wake_reader.recv(1)
        self._is_woken = wakes

    def _read_acks(self, subflow: _PythonSubflow, now: float) -> None:
        is_late = now - subflow.looked_at > core.LATE_S
        subflow.looked_at = now
        for _ in range(MOST_AT_ONCE):
            count = subflow.sock.recv_into(subflow.ack[subflow.ack_filled :])
            if not count:
                raise ConnectionResetError
            subflow.ack_filled += count
            if subflow.ack_filled < _ACK_BYTES:
                continue
            subflow.ack_filled = 0
            body = bytearray(core.ACK_BODY_BYTES)
            subflow.opener.open_untrusted(subflow.ack, body)
            ack, index = core.decode_ack(body), subflow.index
            freed = self._sends.acknowledge_untrusted(index, ack, now=now, is_late=is_late)
            for frame in freed:
                self._buffers.give(frame)

    # --- what comes in

    def read(self, *, waited: bool) -> memoryview | None:
        with self._lock:
            frame, may_have_more, reads_at = self._receives.first, True, 0.0
            for _ in range(MOST_AT_ONCE):
                if frame is not None or not may_have_more:
                    break
                reads_at, may_have_more = time.monotonic(), False
                for subflow in list(self._subflows.values()):
                    may_have_more |= self._try(subflow, self._read)
                frame = self._receives.first
            # The rest may be less than makes a socket readable.
            self._set_wake(frame is None and may_have_more)
            if frame is not None:
                self._note_paces(waited=waited)
                return frame[core.NUMBER_BYTES :]
            if not waited:
                self._began = reads_at
                all_flow = all(subflow.frame for subflow in self._subflows.values())
                before = {subflow.index: subflow.bytes_read for subflow in self._subflows.values()}
                self._before = before if before and all_flow else None
            return None

    def _note_paces(self, *, waited: bool) -> None:
        """Note what came on each path, which may have several connections, since a wait began."""
        before, self._before = self._before, None
        if before is None or not waited:
            return
        came, took_s = Counter[tuple[str, str]](), time.monotonic() - self._began
        for subflow in self._subflows.values():
            if subflow.index in before:
                came[subflow.hosts] += subflow.bytes_read - before[subflow.index]
        if came.total() >= WAKE_UP_BYTES:  # less is too little to tell
            self._paces = {hosts: Throughput(nbytes, took_s) for hosts, nbytes in came.items()}

    def take_paces(self) -> Mapping[tuple[str, str], Throughput]:
        paces, self._paces = self._paces, {}
        return paces

    def opened(self) -> None:
        with self._lock:
            self._buffers.give(self._receives.opened())

    def _read(self, subflow: _PythonSubflow) -> None:
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

    def _read_some(self, subflow: _PythonSubflow) -> bool:
        """Receive once; return True if that ends a record."""
        begins = subflow.filled < core.FRAME_HEADER_BYTES
        into = subflow.header if begins else subflow.frame
        count = subflow.sock.recv_into(into[subflow.filled :])
        if not count:
            raise ConnectionResetError
        subflow.filled += count
        subflow.bytes_read += count
        self._state.bytes_received += count
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

    def _ask_for_rest(self, subflow: _PythonSubflow) -> None:
        """Make the socket readable only once the rest is there, as `Lane._ask_for` does."""
        rest = len(subflow.frame) if subflow.frame else core.FRAME_HEADER_BYTES
        asked = min(rest - subflow.filled, self._state.wake_up_bytes)
        if asked != subflow.asked:
            subflow.asked = asked
            with contextlib.suppress(OSError):
                subflow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, asked)

    def _write_ack(self, subflow: _PythonSubflow, *, waiting: bool, force: bool = False) -> None:
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
