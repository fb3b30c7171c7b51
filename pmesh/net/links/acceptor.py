"""Accepts connections to the agent's port until they prove that they belong to the mesh.

Strangers can't exhaust the agent: each has 5 s, 8 may come from one address and 64 in all, the
oldest is closed first, and TLS starts only when the first bytes look like pmesh. 64 of the worst
kind take less than 16 MiB (tests/net/links/test_acceptor_memory.py measures it).

The lanes of many ranks open at once, and several machines may have one address, behind a router. So
the first connection that names a lane which a member has offered is no stranger's: it has the same
5 s, but it takes nobody's place, and nobody takes its own. What members offer has its own limits.

Linux answers a connection by its routes. Of two interfaces in one network (two cables between two
machines, with self-assigned addresses; a cable and Wi-Fi to one router) only one has the route, and
an answer that leaves by the other reaches nobody, as the dialler is bound to an interface. So each
gets a listener that is bound to it, and what that accepts stays there. macOS answers from the
interface that has the address which was dialled.
"""

import contextlib
import errno
import math
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeAlias, TypeVar

import trio

from pmesh.core.links.addresses import LocalAddress, interfaces_that_share_a_network
from pmesh.core.wire.framing import FIRST_BYTES, FirstBytes, recognize
from pmesh.errors import PeerUnreachable, PmeshError
from pmesh.net.links.interfaces import POLL_S, SO_BINDTODEVICE, AddressWatch, remote_address_of

BROKEN_LISTENER: Final = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})
"""Errors of `accept` that stay, so that only another listener can help. All others pass."""
RETRY_S: Final = 0.1  # before the next attempt to accept, as in trio.serve_listeners
BACKLOG: Final = 128

PENDING_TIMEOUT_S: Final = 5.0  # a Mac that has just woken answers within 2 s
MAX_PENDING: Final = 64
MAX_PENDING_PER_ADDRESS: Final = 8  # leaves room for seven others while one floods
HANDSHAKE_INTERVAL_S: Final = 0.02  # at 3 ms of CPU each, strangers get 15 % of one core
HANDSHAKE_BURST: Final = 16  # twice a mesh of 8 that all dial at once after a power cut
MAX_HOSTS: Final = 64  # addresses whose connections are counted one by one
OTHER_HOSTS: Final = "other addresses"

StreamT = TypeVar("StreamT", bound=trio.abc.HalfCloseableStream)
Authenticated: TypeAlias = Callable[[], None]
_Outcome: TypeAlias = Literal["garbage", "closed_early", "timed_out", "refused"]
ConnectionHandler: TypeAlias = Callable[[StreamT, bytes, Authenticated], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorCounters:
    """The connections to the port since the agent's start."""

    accepted: int = 0
    authenticated: int = 0
    garbage: int = 0
    """Closed because of first bytes that no pmesh sends."""
    closed_early: int = 0
    """Ended before their first bytes were complete."""
    timed_out: int = 0
    dropped: int = 0
    """Closed as the oldest, to make room for a new one."""
    refused: int = 0
    """Closed for another mesh key, another version, an unknown lane, or an interface not used."""
    out_of_files: int = 0
    """Not accepted, as the system had no descriptor or memory left, or refused it otherwise."""
    pending: int = 0
    """Not yet authenticated."""

    @property
    def turned_away(self) -> int:
        """All that ended without authenticating."""
        return self.garbage + self.closed_early + self.timed_out + self.dropped + self.refused


@dataclass(eq=False, slots=True)
class _Visitor:
    """A connection that is not yet authenticated."""

    host: str
    scope: trio.CancelScope
    lane: bytes = b""
    """The preamble, if it names a lane that a member has offered and that nobody else names."""
    authenticated: bool = False


class _Pace:
    """Lets a burst pass, then one per interval, in order; a cancelled waiter takes no turn."""

    def __init__(self) -> None:
        self._one_at_a_time = trio.Lock()
        self._booked_until = 0.0  # trio's clock starts anywhere above

    async def turn(self) -> None:
        async with self._one_at_a_time:
            await trio.sleep_until(self._booked_until - HANDSHAKE_BURST * HANDSHAKE_INTERVAL_S)
            self._booked_until = max(self._booked_until, trio.current_time()) + HANDSHAKE_INTERVAL_S


class Acceptor(Generic[StreamT]):
    """Accepts connections, and hands over those that belong to the mesh.

    A handler gets the stream, the bytes read so far (`on_lane`: the preamble), and a callable
    `authenticated`. Until the handler calls it, the connection is a stranger's: limited,
    and cancelled when its time is over. After the call the stream belongs to the handler; a call
    that is too late raises PeerUnreachable. A handler that returns or raises a PmeshError before
    the call refuses the connection, which the acceptor then closes. Any other exception, and every
    exception after the call, goes to `contain`, or ends `serve` without it.
    """

    def __init__(
        self,
        *,
        on_link: ConnectionHandler[StreamT],
        on_lane: ConnectionHandler[StreamT],
        on_guest: ConnectionHandler[StreamT] | None = None,
        on_renewal: ConnectionHandler[StreamT] | None = None,
        is_offered: Callable[[bytes], bool] = lambda _: False,
        uses: Callable[[StreamT], bool] = lambda _: True,
        contain: Callable[[str], contextlib.AbstractContextManager[object]] = (
            contextlib.nullcontext
        ),
    ) -> None:
        """Make an acceptor that doesn't accept yet.

        Args:
            on_link: Takes connections that may become links.
            on_lane: Takes those that may become lanes.
            on_guest: Takes those of machines that want the mesh key by a code; None: garbage.
            on_renewal: Takes those of who has missed a rotation of the key; None: garbage.
            is_offered: True for the first bytes of a lane that a member has offered.
            uses: False for a connection over an interface that is not used; it is refused.
            contain: Lets no exception out of what is said to end with it.
        """
        self._handlers = {FirstBytes.LINK: on_link, FirstBytes.LANE: on_lane}
        if on_guest is not None:
            self._handlers[FirstBytes.GUEST] = on_guest
        if on_renewal is not None:
            self._handlers[FirstBytes.RENEWAL] = on_renewal
        self._is_offered = is_offered
        self._uses = uses
        self._contain = contain
        self._counts: Counter[str] = Counter()  # by the names of DoorCounters
        self._pending: list[_Visitor] = []  # oldest first
        self._pace = _Pace()
        self._hosts: Counter[str] = Counter()

    def take_hosts(self) -> Counter[str]:
        """Return how many connections of each address were turned away since the last call."""
        taken, self._hosts = self._hosts, Counter()
        return taken

    @property
    def counters(self) -> DoorCounters:
        return DoorCounters(**self._counts, pending=len(self._pending))

    async def serve(
        self,
        listeners: Sequence[trio.abc.Listener[StreamT]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept until cancelled, then close the listeners.

        Handlers run inside this call without a time limit, so links may live in them.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for listener in listeners:
                self.add(listener)
            task_status.started()

    def add(self, listener: trio.abc.Listener[StreamT]) -> None:
        """Accept at one more listener while `serve` runs, or until the listener is closed."""
        self._nursery.start_soon(self._accept, listener, self._nursery)

    async def _accept(self, listener: trio.abc.Listener[StreamT], nursery: trio.Nursery) -> None:
        async with listener:
            while True:
                try:
                    stream = await listener.accept()
                except trio.ClosedResourceError:
                    return
                except OSError as e:
                    if e.errno in BROKEN_LISTENER:
                        raise
                    await self._wait_for_resources()
                else:
                    nursery.start_soon(self._meet, stream, self._admit(stream))

    async def _wait_for_resources(self) -> None:
        self._counts["out_of_files"] += 1
        if self._pending:
            self._drop(self._pending[0])  # a stranger holds a descriptor that a peer may need
        await trio.sleep(RETRY_S)

    def _admit(self, stream: StreamT) -> _Visitor:
        """Register a new connection, and drop the oldest one if there are too many."""
        self._counts["accepted"] += 1
        host = remote_address_of(stream).host
        strangers = [visitor for visitor in self._pending if not visitor.lane]
        neighbours = [visitor for visitor in strangers if visitor.host == host]
        if len(neighbours) >= MAX_PENDING_PER_ADDRESS:
            self._drop(neighbours[0])
        elif len(strangers) >= MAX_PENDING:
            self._drop(strangers[0])
        deadline = trio.current_time() + PENDING_TIMEOUT_S
        visitor = _Visitor(host, trio.CancelScope(deadline=deadline))
        self._pending.append(visitor)
        return visitor

    def _drop(self, visitor: _Visitor) -> None:
        self._counts["dropped"] += 1
        self._pending.remove(visitor)
        visitor.scope.cancel()

    async def _meet(self, stream: StreamT, visitor: _Visitor) -> None:
        outcome: _Outcome = "refused"
        try:
            with self._contain("a connection to this agent's port"), visitor.scope:
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
                raise PeerUnreachable("the connection did not authenticate in time")
            visitor.scope.deadline = math.inf
            visitor.authenticated = True
            self._pending.remove(visitor)
            self._counts["authenticated"] += 1

        if not self._uses(stream):
            return "refused"
        first, kind = await _read_first_bytes(stream)
        if kind is FirstBytes.TOO_FEW:
            return "closed_early"
        handler = self._handlers.get(kind)
        if handler is None:
            return "garbage"
        if kind is FirstBytes.LANE and self._is_offered(first):
            # The name was sent in clear: whoever repeats it must not be let in without limit.
            is_first = all(other.lane != first for other in self._pending)
            visitor.lane = first if is_first else b""
        try:
            if kind in {FirstBytes.LINK, FirstBytes.RENEWAL}:  # they cost a handshake
                await self._pace.turn()
            await handler(stream, first, authenticated)
        except PmeshError:
            if visitor.authenticated:
                raise
        return "refused"


async def _read_first_bytes(
    stream: trio.abc.HalfCloseableStream,
) -> tuple[bytes, FirstBytes]:
    """Read until the kind of connection is known, or the connection ends."""
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


async def listen_at_interfaces(
    listeners: Sequence[trio.SocketListener],
    watch: AddressWatch,
    add: Callable[[trio.SocketListener], None],
) -> None:
    """Listen at each interface that may share a network with another, until cancelled.

    Args:
        listeners: Those of all interfaces.
        watch: The interfaces.
        add: Called with each listener, which it must close.
    """
    bound: dict[tuple[str, int], list[trio.SocketListener]] = {}
    addresses: tuple[LocalAddress, ...] = ()
    while True:
        addresses = await watch.changed_from(addresses)
        try:
            numbers = {name: number for number, name in socket.if_nameindex()}
        except OSError:  # no descriptor is left now
            addresses = ()
            await trio.sleep(POLL_S)
            continue
        names = interfaces_that_share_a_network(addresses)
        if watch.is_restricted:  # with one that is not used
            names = frozenset(address.interface for address in addresses)
        # A cable that comes back may have another number.
        wanted = {(name, numbers[name]) for name in names if name in numbers}
        for gone in bound.keys() - wanted:
            for listener in bound.pop(gone):
                await listener.aclose()
        for new in wanted - bound.keys():
            bound[new] = [*_listen_at(new[0], listeners)]
            for listener in bound[new]:
                add(listener)
            watch.knows_arrivals = watch.is_restricted and len(bound[new]) == len(listeners)


def _listen_at(
    interface: str, listeners: Sequence[trio.SocketListener]
) -> list[trio.SocketListener]:
    """Return a listener at this interface beside each of these; fewer if the system refuses."""
    found: list[trio.SocketListener] = []
    for beside in listeners:
        with contextlib.suppress(OSError):  # before Linux 5.7; gone again; no descriptor is left
            found.append(_listen_beside(beside.socket, interface))
    return found


def _listen_beside(beside: trio.socket.SocketType, interface: str) -> trio.SocketListener:
    with contextlib.ExitStack() as on_error:
        bound = socket.socket(beside.family, socket.SOCK_STREAM)
        on_error.callback(bound.close)
        bound.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, interface.encode())
        if bound.family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Two sockets may share a port if both allow it while the second begins to listen; later,
        # another agent must find it taken.
        for one in (beside, bound):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            bound.bind(beside.getsockname())
            bound.listen(BACKLOG)
        finally:
            for one in (beside, bound):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
        on_error.pop_all()
    return trio.SocketListener(trio.socket.from_stdlib_socket(bound))
