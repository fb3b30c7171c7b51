"""The door: every connection to the agent's port, until it has proven that it belongs to the mesh.

Strangers cost little and never the whole: 5 s each, 8 from one address, 64 in all, the oldest sent
away first, and no TLS object before the first bytes look like pmesh. 64 of the worst kind take
less than 16 MiB (tests/net/links/test_acceptor_memory.py measures it).
"""

import errno
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, NoReturn, TypeAlias, TypeVar

import trio

from pmesh.core.wire.framing import FIRST_BYTES, FirstBytes, recognize
from pmesh.core.wire.records import lane_of_preamble_untrusted
from pmesh.errors import PeerUnreachable, PmeshError
from pmesh.net.links.interfaces import remote_address_of

OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
RETRY_S: Final = 0.1  # before the next attempt to accept, as in trio.serve_listeners


PENDING_TIMEOUT_S: Final = 5.0  # a Mac that has just woken answers within 2 s
MAX_PENDING: Final = 64
MAX_PENDING_PER_ADDRESS: Final = 8  # leaves room for seven others while one floods
HANDSHAKE_INTERVAL_S: Final = 0.02  # at 3 ms of CPU each, strangers get 15 % of one core
HANDSHAKE_BURST: Final = 16  # a mesh of 8, all dialling at once after a power cut, twice over
MAX_HOSTS: Final = 64  # whose connections are counted one by one
OTHER_HOSTS: Final = "other addresses"

StreamT = TypeVar("StreamT", bound=trio.abc.HalfCloseableStream)
Authenticated: TypeAlias = Callable[[], None]
_Outcome: TypeAlias = Literal["garbage", "closed_early", "timed_out", "refused"]
Handler: TypeAlias = Callable[[StreamT, bytes, Authenticated], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorCounters:
    """What has come to the door since the agent's start."""

    accepted: int = 0
    authenticated: int = 0
    garbage: int = 0
    """Began with what no pmesh sends."""
    closed_early: int = 0
    """Ended before they had said what they are."""
    timed_out: int = 0
    dropped: int = 0
    """The oldest, sent away for a newcomer."""
    refused: int = 0
    """Another mesh key, another version, an unknown lane."""
    out_of_files: int = 0
    """The system had no descriptor or memory for one more."""
    pending: int = 0
    """At the door right now."""

    @property
    def turned_away(self) -> int:
        """All that have come and gone without proving anything."""
        return self.garbage + self.closed_early + self.timed_out + self.dropped + self.refused


@dataclass(eq=False, slots=True)
class _Visitor:
    """A connection that has not yet proven anything."""

    host: str
    scope: trio.CancelScope
    authenticated: bool = False


class _Pace:
    """Lets a burst pass, then one per interval, in order; who gives up takes no turn."""

    def __init__(self) -> None:
        self._one_at_a_time = trio.Lock()
        self._booked_until = 0.0  # trio's clock starts anywhere above

    async def turn(self) -> None:
        async with self._one_at_a_time:
            await trio.sleep_until(self._booked_until - HANDSHAKE_BURST * HANDSHAKE_INTERVAL_S)
            self._booked_until = max(self._booked_until, trio.current_time()) + HANDSHAKE_INTERVAL_S


class Door(Generic[StreamT]):
    """Accepts connections, and hands over those that turn out to be ours.

    A handler gets the stream, what it needs to know (`on_link`: the bytes read so far; `on_lane`:
    the lane id), and a callable `authenticated`. Until it calls that, the connection is a
    stranger's: limited, and cancelled when its time is over. From then on the stream belongs to the
    handler; a call that comes too late raises PeerUnreachable. A handler that returns or raises a
    PmeshError before has refused the connection, which the door then closes; any other exception
    ends `serve`, as does every one that comes later.
    """

    def __init__(self, *, on_link: Handler[StreamT], on_lane: Handler[StreamT]) -> None:
        self._on_link = on_link
        self._on_lane = on_lane
        self._counts: Counter[str] = Counter()  # by the names of DoorCounters
        self._pending: list[_Visitor] = []  # the oldest first
        self._pace = _Pace()
        self._hosts: Counter[str] = Counter()

    def take_hosts(self) -> Counter[str]:
        """How many connections each address has had turned away since the last call."""
        taken, self._hosts = self._hosts, Counter()
        return taken

    @property
    def counters(self) -> DoorCounters:
        """A snapshot."""
        return DoorCounters(**self._counts, pending=len(self._pending))

    async def serve(
        self,
        listeners: Sequence[trio.abc.Listener[StreamT]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept until cancelled; closes the listeners at the end.

        Handlers run in here for as long as they like, so links may live in them.
        """
        async with trio.open_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(self._accept, listener, nursery)
            task_status.started()

    async def _accept(
        self, listener: trio.abc.Listener[StreamT], nursery: trio.Nursery
    ) -> NoReturn:
        async with listener:
            while True:
                try:
                    stream = await listener.accept()
                except OSError as e:
                    if e.errno not in OUT_OF_RESOURCES:
                        raise
                    await self._wait_for_resources()
                else:
                    nursery.start_soon(self._meet, stream, self._admit(stream))

    async def _wait_for_resources(self) -> None:
        self._counts["out_of_files"] += 1
        if self._pending:
            self._drop(self._pending[0])  # a stranger holds what a peer may need
        await trio.sleep(RETRY_S)

    def _admit(self, stream: StreamT) -> _Visitor:
        """Note a newcomer, for whom the oldest may have to leave."""
        self._counts["accepted"] += 1
        host = remote_address_of(stream).host
        neighbours = [visitor for visitor in self._pending if visitor.host == host]
        if len(neighbours) >= MAX_PENDING_PER_ADDRESS:
            self._drop(neighbours[0])
        elif len(self._pending) >= MAX_PENDING:
            self._drop(self._pending[0])
        deadline = trio.current_time() + PENDING_TIMEOUT_S
        visitor = _Visitor(host, trio.CancelScope(deadline=deadline))
        self._pending.append(visitor)
        return visitor

    def _drop(self, visitor: _Visitor) -> None:
        self._counts["dropped"] += 1
        self._pending.remove(visitor)
        visitor.scope.cancel()

    async def _meet(self, stream: StreamT, visitor: _Visitor) -> None:
        outcome: _Outcome = "timed_out"
        try:
            with visitor.scope:
                outcome = await self._let_in(stream, visitor)
        finally:
            if visitor in self._pending:  # neither authenticated nor dropped: not counted yet
                self._pending.remove(visitor)
                self._counts["timed_out" if visitor.scope.cancel_called else outcome] += 1
            if not visitor.authenticated:
                known = visitor.host in self._hosts or len(self._hosts) < MAX_HOSTS
                self._hosts[visitor.host if known else OTHER_HOSTS] += 1
                await trio.aclose_forcefully(stream)

    async def _let_in(self, stream: StreamT, visitor: _Visitor) -> _Outcome:
        def authenticated() -> None:
            if visitor.scope.cancel_called:
                raise PeerUnreachable("its time at the door was over")
            visitor.scope.deadline = math.inf
            visitor.authenticated = True
            self._pending.remove(visitor)
            self._counts["authenticated"] += 1

        first, kind = await _read_first_bytes(stream)
        try:
            match kind:
                case FirstBytes.LINK:
                    await self._pace.turn()
                    await self._on_link(stream, first, authenticated)
                case FirstBytes.LANE:
                    await self._on_lane(stream, lane_of_preamble_untrusted(first), authenticated)
                case FirstBytes.GARBAGE:
                    return "garbage"
                case FirstBytes.TOO_FEW:
                    return "closed_early"
        except PmeshError:
            if visitor.authenticated:
                raise
        return "refused"


async def _read_first_bytes(
    stream: trio.abc.HalfCloseableStream,
) -> tuple[bytes, FirstBytes]:
    """As many as tell what it is; too few if the connection ends before."""
    first = b""
    while (kind := recognize(first)) is FirstBytes.TOO_FEW:
        try:
            data = await stream.receive_some(FIRST_BYTES - len(first))
        except trio.BrokenResourceError:
            break
        if not data:
            break
        first += data
    return first, kind
