"""A lane over several connections, one on each path between two agents.

To the executor this is a lane like any other, which waits for one descriptor. A connection may be
added or lost at any time, also while a thread uses the lane.
"""

import select
from collections.abc import Awaitable, Callable, Generator
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import trio

from pmesh import native
from pmesh.core.wire.lanes import OfferLane
from pmesh.core.wire.records import OVERHEAD_BYTES, RecordHeader
from pmesh.net.lanes.lane import Lane, LaneWait, Steps
from pmesh.net.lanes.native_subflows import NativeSubflows
from pmesh.net.lanes.subflows import ConnectionFacts, GreetedConnection, PythonSubflows

MAX_SUBFLOWS = 16  # twice as many as a link has paths; more is an attack
MAX_INDICES = 65_536  # in a lane's life: for a path that comes and goes each minute, six weeks
GRACE_S = 2.0  # after the last path has failed, until another one is joined
LINGER_S = 2.0  # after `close`, until all that was sent has been acknowledged
TICK_S = 0.05  # for what no call does: last acknowledgements, and what is lost after an op
PUSH_S = 0.005  # while the system has no room for what is left


class LanePath(NamedTuple):
    """A path between two agents, over which each lane gets a connection."""

    hosts: tuple[AbstractSet[str], AbstractSet[str]]
    """The addresses of its two interfaces, ours first."""
    facts: ConnectionFacts
    dial: Callable[[], Awaitable[trio.SocketStream]]
    """Opens another connection over it, to the peer's door; may raise NetworkError."""


class MultipathLane(Lane):
    """One end of a lane over several connections.

    `tend` must run in the event loop for as long as the lane is open.
    """

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
            wake_up_bytes=2 * first.wake_up_bytes,  # each costs more than with one connection
        )
        self._used: set[int] = set()
        self._news = trio.Event()
        self._tending = False
        self._is_shut = False
        self._was_ended = False
        """Whether the peer, and not the network, has ended the connection that was lost last."""
        self._subflows = self._open_subflows()
        self.runs_in_library = self._subflows.address is not None
        self.join(first, 0, facts)

    def _open_subflows(self) -> PythonSubflows | NativeSubflows:
        library, sending = native.library(), self.sending
        try:
            if library is None:
                return PythonSubflows(self.state, sending=sending, on_lost=self._has_lost)
            return NativeSubflows(library, self.state, sending=sending, on_lost=self._has_lost)
        except OSError as e:
            super().close()
            raise self.broken(f"has no room: {e.strerror}") from e

    def _has_lost(self, ended: bool) -> None:  # noqa: FBT001 - it is the whole of it
        """Note that a connection is lost; any thread may call this."""
        self._was_ended = ended
        if self._stop_thread is None:  # else `tend` checks by itself
            self._wake_tend()

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
        try:
            greeted = GreetedConnection(index, connection.hosts, sock, sealer, opener)
            self._subflows.add(greeted, facts)
        except OSError as e:  # the system watches no more
            sock.close()
            raise self.broken(f"has no room: {e.strerror}") from e
        self.pump(outside=True)
        self._wake_tend()

    def has_used(self, index: int) -> bool:
        """Return whether a connection has joined under this index."""
        return index in self._used

    def runs_between(self, ours: AbstractSet[str], theirs: AbstractSet[str]) -> bool:
        """Return whether one of its connections has its two ends at these addresses."""
        return self._subflows.runs_between(ours, theirs)

    def drop(self, ours: AbstractSet[str], theirs: AbstractSet[str]) -> None:
        """Drop the connections on a path that has failed: others send again what they have lost."""
        self._subflows.drop(ours, theirs)
        self.pump(outside=True)
        self._wake_tend()

    # --- the lane's life

    def close(self) -> None:
        """Make tasks that wait on the lane get LaneBroken; `tend` closes the connections."""
        self._closed.set()
        self._wake_tend()
        if self._stop_thread is not None:
            self._stop_thread()
        elif not self._is_shut:
            trio.lowlevel.notify_closing(self._subflows.fileno())

    def _shut(self) -> None:
        self.close()
        self._is_shut = True
        self._subflows.close()

    def lend(self, stop: Callable[[], None]) -> None:
        """Lend the lane to a thread until `take_back`; `stop` makes the thread end soon."""
        super().lend(stop)
        self._wake_tend()

    def take_back(self) -> None:
        """Take the lane back: the thread has ended."""
        super().take_back()
        for hosts, pace in self._subflows.take_paces().items():
            self._add_pace(hosts, pace)
        self._wake_tend()

    def register(self, poll: select.poll) -> None:
        """Make a thread's `poll` return when the lane's steps may go on."""
        poll.register(self._subflows.fileno(), select.POLLIN)

    async def wait_for(self, wait: LaneWait) -> None:
        """Wait, in the event loop, for what a step of this lane has yielded."""
        if wait not in {LaneWait.READABLE, LaneWait.WRITABLE}:
            await super().wait_for(wait)
            return
        self.check_open()
        try:
            await trio.lowlevel.wait_readable(self._subflows.fileno())
        except (trio.ClosedResourceError, ValueError, OSError) as e:
            raise self.broken(self.why_closed) from e

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
        await trio.sleep(PUSH_S if is_ours and self._subflows.has_unsent else TICK_S)
        self.pump(outside=True)

    async def _await_path(self) -> None:
        """Close the lane if the peer has closed it, or if no other path is joined in time."""
        if not self._was_ended:
            with trio.move_on_after(GRACE_S):
                while not (self._subflows or self.is_closed):
                    await self._news.wait()
                    self._news = trio.Event()
        elif self._subflows.has_first:
            await trio.sleep(TICK_S)  # records that came before the end are still to be read
            return
        if not (self._subflows or self.is_closed):
            self.why_closed = "ended"
            self._path_lost = not self._was_ended
            self.close()

    @property
    def _is_quiet(self) -> bool:
        return self._subflows.is_empty if self.sending else not self._subflows.owes

    @property
    def _awaits_acks(self) -> bool:
        """Whether all has been sent, and not all acknowledged."""
        subflows = self._subflows
        under_way = not (subflows.is_empty or subflows.has_unsent)
        return self.sending and under_way and bool(subflows)

    def _needs_tending(self) -> None:
        """Let `tend` do what the call that has just ended leaves to it."""
        if not self._tending and self._stop_thread is None:
            self._wake_tend()

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
        return self._subflows.has_room and not self._subflows.has_unsent

    def post(self, header: RecordHeader, body: bytes | memoryview) -> bool:
        """Seal a record and send what the system takes at once; return True if that was all."""
        record = self._subflows.take(OVERHEAD_BYTES + header.body_bytes)
        self._sealer.seal(header, body, record)
        self._subflows.put()
        self.pump()
        self._needs_tending()
        return self._is_idle

    def sends(self, header: RecordHeader, body: bytes | memoryview) -> Steps:
        """Yield the steps of `send`, until `body` may be reused; `flushes` sends the rest."""
        self.check_open()
        while not self._subflows.has_room:
            self.pump()
            if not self._subflows.has_room:
                yield LaneWait.WRITABLE
                self.check_open()
        self.post(header, body)
        yield LaneWait.TURN

    def flushes(self) -> Steps:
        """Yield the steps until all has been handed to the system."""
        while self._subflows.has_unsent:
            self.pump()
            if self._subflows.has_unsent:
                self.check_open()
                yield LaneWait.WRITABLE

    def pump(self, *, outside: bool = False) -> None:
        """Write and acknowledge what is possible without waiting; from any thread, at any time.

        From `outside` of a call, also wake the call that waits, which may now be able to go on.
        """
        self._subflows.pump(outside=outside)

    # --- what comes in

    def _fill(self, enough: int, limit: int) -> Generator[LaneWait, None, bool]:
        """Receive until the next record is there, whole; return True if that took a wait."""
        del enough, limit
        waited = False
        while (record := self._subflows.read(waited=waited)) is None:
            self.check_open()
            waited = True
            yield LaneWait.READABLE
        for hosts, pace in self._subflows.take_paces().items():
            self._add_pace(hosts, pace)
        self._in, self.state.filled = record, len(record)
        return waited

    def _open(self, end: int, into: bytearray | memoryview) -> None:
        super()._open(end, into)
        self._subflows.opened()
        self._needs_tending()

    # --- in the native library

    def share_state(self) -> int:
        """Return the address of the lane's state, which the library uses until `take_back`."""
        self.state.subflows = self._subflows.address
        self.state.filled = 0  # it reads the record that is there once more
        return super().share_state()
