"""Lanes: sealed TCP connections that carry a job's tensors from one rank to another.

A lane has one direction for data. The other carries one record, the receiver's greeting: each side
proves that it has read the offer before the other trusts it.

A lane's calls may be cancelled at any wait. The next call finishes what was half sent or half
received, so a lane survives a view that leaves its roster as it is (V7), or that only loses other
ranks (`RankLanes.follow` of `pmesh.agent.jobs.ranks`). After any other view the rank closes the
lane; the number in each record tells which ones are late (V4). One task may send while another
receives, but two may not do the same.

A lane's calls are written once, as steps that say what they wait for. `send` and `receive` wait in
the event loop; a `Pipeline` (`pmesh.net.lanes.executor`) runs the steps of large ops in threads.
"""

import contextlib
import ctypes
import select
import socket
import time
from collections.abc import Callable, Generator
from collections.abc import Set as AbstractSet
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

import trio

from pmesh.core.wire.lanes import OfferLane
from pmesh.core.wire.preamble import PREAMBLE_BYTES
from pmesh.core.wire.records import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    OVERHEAD_BYTES,
    Opener,
    RecordHeader,
    Sealer,
    read_header_untrusted,
)
from pmesh.errors import LaneBroken, PmeshError, ProtocolError
from pmesh.native.layout import LaneState

# With less, each packet would wake a thread. Linux's first window is twice this, and then grows.
WAKE_UP_BYTES = 32 * 1024
GREETING_TIMEOUT_S = 5.0  # as for every connection that has not proven what it is
_WHOLE_BYTES = OVERHEAD_BYTES + MAX_BODY_BYTES
_GREETING_BYTES = OVERHEAD_BYTES + PREAMBLE_BYTES


class CallsDiffer(PmeshError):  # noqa: N818 - a state, as in pmesh.errors
    """The neighbour has made another call as this op; the agent tells the leader (I5, O8)."""

    def __init__(self, op: int, peer: str) -> None:
        super().__init__(f"{peer} called something else as op {op}")
        self.op = op
        """The first op in which the two differ."""


class PathLost(LaneBroken):
    """The path under a lane has failed; its peer is still reached, over another one."""


class LaneWait(Enum):
    """What must happen before the next step."""

    READABLE = auto()
    """Something has arrived."""
    WRITABLE = auto()
    """The system takes more."""
    CLOSED = auto()
    """Nothing can be done until the lane is closed, or the call cancelled."""
    PROGRESS = auto()
    """Another stage of the same pipeline has got further."""
    PROGRESS_OR_NETWORK = auto()
    """Another stage has got further, or the lane can send more of what it has left."""
    TURN = auto()
    """Nothing, but other tasks run first: a fast network must not starve them."""


Steps: TypeAlias = Generator[LaneWait, None, None]
"""Resume it when what it has yielded has happened, or may have. It may be closed at any yield."""


class Throughput(NamedTuple):
    """How many bytes came, and how long they took."""

    nbytes: int = 0
    took_s: float = 0.0


class Lane:
    """One end of a lane. It owns its socket."""

    def __init__(
        self,
        sock: socket.socket,
        offer: OfferLane,
        *,
        sending: bool,
        peer: str,
        wake_up_bytes: int = 1,
    ) -> None:
        sock.setblocking(False)  # noqa: FBT003 - it takes no names
        if sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # macOS: it was reset; the first send will say so
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours, theirs = offer.key, offer.return_key
        if not sending:
            ours, theirs = theirs, ours
        self.peer = peer
        self.sending = sending
        self.hosts = _hosts_of(sock)
        """The addresses of its two ends, ours first, without scopes; "" within one agent."""
        self.leads_away = bool(self.hosts[1])
        """Whether the peer is at another agent."""
        self.state = LaneState(peer_completed=-1, wake_up_bytes=wake_up_bytes, asked=1)
        """What the native library reads and writes, too."""
        self.paces: dict[tuple[str, str], Throughput] = {}
        """For each pair of `hosts`, what has come while this end waited in the middle of a record.
        The peer had it ready, so it came as fast as the network allowed."""
        self._roster = offer.number
        self._socket = sock
        self._closed = trio.Event()
        self._path_lost = False
        self._read_at = 0.0
        self._sealer = Sealer(ours)
        self._opener = Opener(theirs)
        self.state.seal_key[:] = self._sealer.key
        self.state.open_key[:] = self._opener.key
        self._out = memoryview(bytearray(_GREETING_BYTES))
        self._in = memoryview(bytearray(_GREETING_BYTES))
        """`_out` and `_in` grow with the first record, as many lanes are never used."""
        self._is_shared = False
        self._addressed: memoryview | None = None
        """The buffer whose address the library knows."""
        self._stop_thread: Callable[[], None] | None = None
        self.why_closed = "was closed"
        """What an error says has happened to it."""
        self.runs_in_library = True
        """Whether the native library can use it."""

    @property
    def bytes_sent(self) -> int:
        """The bytes that the system has taken, also while an op runs."""
        return self.state.bytes_sent

    @property
    def bytes_received(self) -> int:
        """The bytes that have come, also while an op runs."""
        return self.state.bytes_received

    @property
    def records_dropped(self) -> int:
        """Records of a lower roster, which came too late (V4)."""
        return self.state.dropped

    @property
    def peer_completed(self) -> int:
        """How far the peer had come when it sent its last record (O2)."""
        return self.state.peer_completed

    @property
    def wake_up_bytes(self) -> int:
        """A task that waits for more than this is woken only when this much is there."""
        return self.state.wake_up_bytes

    @wake_up_bytes.setter
    def wake_up_bytes(self, nbytes: int) -> None:
        self.state.wake_up_bytes = nbytes

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, perhaps by the lane itself."""
        return self._closed.is_set()

    def close(self) -> None:
        """Close the connection; a task that waits on it gets LaneBroken."""
        self._closed.set()
        if self._stop_thread is not None:
            self._stop_thread()  # `take_back` closes it: the thread still uses the descriptor
            return
        if self._socket.fileno() != -1:
            trio.lowlevel.notify_closing(self._socket)
        self._socket.close()

    def give_up(self) -> tuple[socket.socket, Sealer, Opener]:
        """Give the connection and its keys to a lane of several; this lane is then closed."""
        self._closed.set()
        return self._socket, self._sealer, self._opener

    def runs_between(self, ours: AbstractSet[str], theirs: AbstractSet[str]) -> bool:
        """Return whether its ends are at these addresses of an interface here and at the peer."""
        here, there = self.hosts
        return here in ours and there in theirs

    def lose_path(self) -> None:
        """Close the connection, whose path has failed; a task that waits on it gets PathLost."""
        self._path_lost = True
        self.close()

    def lend(self, stop: Callable[[], None]) -> None:
        """Lend the lane to a thread until `take_back`; `stop` makes the thread end soon.

        Raises:
            LaneBroken: it has been closed.
        """
        self.check_open()
        self._stop_thread = stop

    def take_back(self) -> None:
        """Take the lane back: the thread has ended. Close it if `close` was called meanwhile."""
        if self._is_shared:
            state, self._is_shared = self.state, False
            self._sealer.records, self._opener.records = state.sealed, state.opened
            if state.paced_bytes:
                self._add_pace(self.hosts, Throughput(state.paced_bytes, state.paced_s))
                state.paced_bytes, state.paced_s = 0, 0.0
        self._stop_thread = None  # `pass_on`, a frame less
        if self._closed.is_set():
            self.close()

    def pass_on(self, stop: Callable[[], None] | None) -> None:
        """Note that the library goes on with the lane, in threads that `stop` ends, or in none."""
        self._stop_thread = stop
        if self._closed.is_set():
            self.close()

    def share_state(self) -> int:
        """Return the address of the lane's state, which the library uses until `take_back`."""
        state = self.state
        if not state.subflows:
            state.fd = self._socket.fileno()
            if (self._out if self.sending else self._in) is not self._addressed:
                self._give_address()
        state.sealed, state.opened = self._sealer.records, self._opener.records
        self._is_shared = True
        return ctypes.addressof(state)

    def _give_address(self) -> None:
        """Write where the buffer for records lies into the state."""
        state = self.state
        if self.sending:
            if len(self._out) < _WHOLE_BYTES:
                self._out = _whole(self._out, state.unsent_end)
            self._addressed, state.out = self._out, _address(self._out)
        else:
            if len(self._in) < _WHOLE_BYTES:
                self._in = _whole(self._in, state.filled)
            self._addressed, state.in_ = self._in, _address(self._in)

    def register(self, poll: select.poll) -> None:
        """Make a thread's `poll` return when the lane's steps may go on."""
        poll.register(self._socket, select.POLLOUT if self.sending else select.POLLIN)

    def check_open(self) -> None:
        """Raise LaneBroken if the lane has been closed."""
        if self._closed.is_set():
            raise self.broken(self.why_closed)

    def __repr__(self) -> str:
        arrow = "to" if self.sending else "from"
        return f"<Lane {arrow} {self.peer}: {self.bytes_sent} sent, {self.bytes_received} received>"

    async def send(self, header: RecordHeader, body: bytes | memoryview) -> None:
        """Seal and send one record; `body` may be reused when this returns or is cancelled."""
        for wait in self.sends(header, body):
            await self.wait_for(wait)

    def sends(self, header: RecordHeader, body: bytes | memoryview) -> Steps:
        """Yield the steps of `send`."""
        yield from self.flushes()
        if self.post(header, body):
            yield LaneWait.TURN
        else:
            yield from self.flushes()

    def post(self, header: RecordHeader, body: bytes | memoryview) -> bool:
        """Seal a record and send what the system takes at once; return True if that was all.

        If not, `flush` sends the rest; call it before the next `post`.
        """
        assert self._is_flushed, "flush before the next post"  # noqa: S101 - its buffer is in use
        if len(self._out) < OVERHEAD_BYTES + header.body_bytes:
            self._out = memoryview(bytearray(_WHOLE_BYTES))
        self._will_send(self._sealer.seal(header, body, self._out))
        self._send_some()
        return self._is_flushed

    def _will_send(self, nbytes: int) -> None:
        self.state.unsent_begin, self.state.unsent_end = 0, nbytes

    @property
    def _is_flushed(self) -> bool:
        return self.state.unsent_begin == self.state.unsent_end

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be sent, so that `post` may be called."""
        return self._is_flushed

    async def flush(self) -> None:
        """Send what `post`, or a call that was cancelled, has left."""
        for wait in self.flushes():
            await self.wait_for(wait)

    def flushes(self) -> Steps:
        """Yield the steps of `flush`."""
        while not self._is_flushed:
            yield LaneWait.WRITABLE
            self._send_some()

    def _send_some(self) -> None:
        try:
            count = self._socket.send(self._out[self.state.unsent_begin : self.state.unsent_end])
        except BlockingIOError:
            return
        except OSError as e:
            raise self.broken(f"broke: {e.strerror}") from e
        self.state.bytes_sent += count
        self.state.unsent_begin += count

    async def receive(self, expected: RecordHeader, into: memoryview) -> None:
        """Receive the next record straight into its place.

        The header is judged before its body is read, but CallsDiffer is raised only once the whole
        record is authenticated. Records of a lower roster are dropped and counted. One of a higher
        roster stays here until a call expects it; this call then waits to be cancelled (V4).

        Args:
            expected: what the record must be; its `completed` doesn't matter.
            into: as many bytes as `expected.body_bytes`. Garbage after LaneBroken.

        Raises:
            CallsDiffer: the peer's op, or its call, is another.
            LaneBroken: the connection ended, or what it brought is no record of this lane.
        """
        for wait in self.receives(expected, into):
            await self.wait_for(wait)

    def receives(self, expected: RecordHeader, into: memoryview) -> Steps:
        """Yield the steps of `receive`."""
        waited = False
        while True:
            waited |= yield from self._fill(HEADER_BYTES, OVERHEAD_BYTES + expected.body_bytes)
            header = self._header()
            while header.roster > expected.roster:
                yield LaneWait.CLOSED
            if header[:5] == expected[:5]:
                break
            yield from self._refuse(header, expected)
        end = OVERHEAD_BYTES + header.body_bytes
        before, began = self.state.filled, self._read_at  # all that was there then is read
        if before < end and (yield from self._fill(end, end)):
            waited = True
            if end - before >= WAKE_UP_BYTES:  # less is too little to tell
                self._add_pace(self.hosts, Throughput(end - before, time.monotonic() - began))
        self._open(end, into)
        self.state.peer_completed = header.completed
        if not waited:
            yield LaneWait.TURN

    def _add_pace(self, hosts: tuple[str, str], pace: Throughput) -> None:
        before = self.paces.get(hosts, Throughput())
        self.paces[hosts] = Throughput(before.nbytes + pace.nbytes, before.took_s + pace.took_s)

    def _refuse(self, header: RecordHeader, expected: RecordHeader) -> Steps:
        """Drop a record that comes too late; raise for any other that is not the expected one."""
        same_call = (header.op, header.fingerprint) == (expected.op, expected.fingerprint)
        if header.roster == expected.roster and same_call:
            raise self.broken("brought a record out of its place")
        end = OVERHEAD_BYTES + header.body_bytes
        yield from self._fill(end, end)
        self._open(end, bytearray(header.body_bytes))
        if header.roster == expected.roster:
            # The lower op has ended at one end, without its record being read here or sent there.
            raise CallsDiffer(min(header.op, expected.op), self.peer)
        self.state.dropped += 1
        yield LaneWait.TURN

    def _fill(self, enough: int, limit: int) -> Generator[LaneWait, None, bool]:
        """Receive until `_in` holds `enough`, at most `limit`; return True if that took a wait."""
        waited, state = False, self.state
        if len(self._in) < limit:
            self._in = _whole(self._in, state.filled)
        while state.filled < enough:
            self._read_at = time.monotonic()
            try:
                count = self._socket.recv_into(self._in[state.filled : limit])
            except BlockingIOError:
                waited = True
                self._ask_for(enough - state.filled)
                yield LaneWait.READABLE
                continue
            except OSError as e:
                raise self.broken(f"broke: {e.strerror}") from e
            if not count:
                raise self.broken("ended")
            state.filled += count
            state.bytes_received += count
        return waited

    def _ask_for(self, nbytes: int) -> None:
        """Make the socket readable only once that much is there, or enough for a wakeup."""
        asked = min(nbytes, self.wake_up_bytes)
        if asked != self.state.asked:
            with contextlib.suppress(OSError):  # macOS: it was reset; the next read will say so
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, asked)
            self.state.asked = asked

    async def wait_for(self, wait: LaneWait) -> None:
        """Wait, in the event loop, for what a step of this lane has yielded."""
        try:
            match wait:
                case LaneWait.READABLE:
                    await trio.lowlevel.wait_readable(self._socket)
                case LaneWait.WRITABLE:
                    await trio.lowlevel.wait_writable(self._socket)
                case LaneWait.CLOSED:
                    await self._closed.wait()
                    self.check_open()
                case _:
                    await trio.lowlevel.checkpoint()
        except (trio.ClosedResourceError, ValueError, OSError) as e:
            raise self.broken("was closed") from e

    def _header(self) -> RecordHeader:
        try:
            return read_header_untrusted(
                self._in, max_body_bytes=PREAMBLE_BYTES if self.sending else MAX_BODY_BYTES
            )
        except ProtocolError as e:
            raise self.broken(f"broke: {e}") from e

    def _open(self, end: int, into: bytearray | memoryview) -> None:
        """Open the record that fills `_in` up to `end`; what came after it moves to the front."""
        try:
            self._opener.open_untrusted(self._in[:end], into)
        except ProtocolError as e:
            raise self.broken(f"broke: {e}") from e
        rest = self.state.filled - end
        if rest:  # only after a record that was shorter than the expected one
            self._in[:rest] = bytes(self._in[end : self.state.filled])
        self.state.filled = rest

    def broken(self, what: str) -> LaneBroken:
        """Return the error of a lane to which this has happened."""
        arrow = "to" if self.sending else "from"
        connection = f"the data connection {arrow} {self.peer}"
        if self._path_lost:
            return PathLost(f"{connection} has lost its path")
        return LaneBroken(f"{connection} {what}")

    async def greet(self, preamble: bytes = b"") -> None:
        """Prove to the peer that we know the offer."""
        begin = len(preamble)
        self._out[:begin] = preamble
        self._will_send(begin + self._sealer.seal(self._greeting, b"", self._out[begin:]))
        await self.flush()

    async def receive_greeting(self) -> None:
        """Wait until the peer has proven that it knows the offer; LaneBroken if it does not."""
        try:
            with trio.fail_after(GREETING_TIMEOUT_S):
                await self.receive(self._greeting, memoryview(bytearray()))
        except (trio.TooSlowError, CallsDiffer) as e:
            raise self.broken("was never greeted") from e

    @property
    def _greeting(self) -> RecordHeader:
        return RecordHeader(0, self._roster, op=0, segment=0, fingerprint=0, completed=-1)


def _whole(buffer: memoryview, used: int) -> memoryview:
    """Return a buffer for any record, which begins with what was used of this one."""
    whole = memoryview(bytearray(_WHOLE_BYTES))
    whole[:used] = buffer[:used]
    return whole


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _hosts_of(sock: socket.socket) -> tuple[str, str]:
    if sock.family == socket.AF_UNIX:
        return "", ""
    try:
        ends = sock.getsockname(), sock.getpeername()
    except OSError:  # it was reset: the first call will say so
        return "", ""
    ours, theirs = (str(end[0]).partition("%")[0] for end in ends)
    return ours, theirs
