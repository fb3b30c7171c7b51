"""Connections that a third agent relays, for lanes between two that can't reach each other (V5).

A                            B                            C
│ Splice: a ticket, to C ───▶│
│ preamble: the ticket ─────▶│ Splice: another ticket ───▶│
│                            │◀─── preamble: that ticket  │
│ preamble: the lane's id, and all that follows ─────────▶│

Each of the two legs is dialled by the agent that has dialled the link between its ends, since that
direction is known to pass firewalls. If B has dialled the link to C, their leg needs no ticket.
"""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol
from weakref import WeakValueDictionary

import trio

from pmesh.agent.containment import Tasks
from pmesh.core.wire.lanes import OfferLane, Splice
from pmesh.core.wire.preamble import LANE_ID_BYTES, PREAMBLE_BYTES, Preamble, encode_preamble
from pmesh.errors import NetworkError, PeerUnreachable, ProtocolError
from pmesh.ids import Member
from pmesh.net.lanes.multipath import LanePath

MAX_SPLICES = 16  # that one peer has asked for; each costs two descriptors and 256 KiB
MAX_ALL_SPLICES = 64  # of all peers: enough if every second pair in a house needs a relay
MAX_DIALS = 4  # at once for one peer, with up to four descriptors each
IDLE_S = 60.0  # a rank that computes for longer gets another connection for its next op
SPLICED_BYTES = 128 * 1024  # copied at once: 40 us, so that the event loop stays responsive
ARRIVAL_S = 5.0  # as long as a connection may take to authenticate


class Reach(Protocol):
    """What the lanes need of the links (`pmesh.agent.mesh.reach`)."""

    def send(self, member: Member, message: OfferLane | Splice) -> None:
        """Send on the link to the member, if there is one."""
        ...

    def we_dialled(self, member: Member) -> bool:
        """Return whether the link to the member was dialled from here."""
        ...

    def relay_of(self, member: Member) -> Member | None:
        """Return who forwards to a member; None if it can be dialled directly."""
        ...

    def paths_to(self, member: Member) -> tuple[LanePath, ...]:
        """Return the paths over which a lane goes at once, the best first; () if none is direct."""
        ...

    async def dial_member(self, member: Member) -> trio.SocketStream:
        """Open a connection to the member's door; raise NetworkError if that fails."""
        ...

    def name_of(self, member: Member) -> str:
        """Return the user's name for the member's machine."""
        ...

    def complain(self, member: Member, error: NetworkError) -> None:
        """Show that a connection to the member failed."""
        ...


class Splices:
    """The connections that one agent relays for others, and that others relay for it.

    Args:
        me: This agent.
        reach: Its links.
        tasks: Runs the connections that it relays.
        entropy: Returns random bytes.
        awaits: Called when another ticket is awaited.
        welcome: Takes a connection that names a lane, as if it had come through the door.
    """

    def __init__(
        self,
        me: Member,
        reach: Reach,
        tasks: Tasks,
        entropy: Callable[[int], bytes],
        *,
        awaits: Callable[[], None],
        welcome: Callable[[trio.SocketStream, bytes, Callable[[], None]], Awaitable[None]],
    ) -> None:
        self._me = me
        self._reach = reach
        self._tasks = tasks
        self._entropy = entropy
        self._awaits = awaits
        self._welcome = welcome
        self._awaited: dict[bytes, trio.MemorySendChannel[trio.SocketStream]] = {}
        self._under_way: dict[trio.CancelScope, tuple[Member, Member]] = {}
        """The connections that this agent relays: who has asked for each, and where it leads."""
        self._turns = WeakValueDictionary[Member, trio.CapacityLimiter]()
        """Those that dials take turns by now."""

    def __contains__(self, ticket: bytes) -> bool:
        return ticket in self._awaited

    def arrive(self, ticket: bytes, stream: trio.SocketStream) -> None:
        """Take a connection through the door that names a ticket; each serves once."""
        self._awaited.pop(ticket).send_nowait(stream)

    async def dial(self, member: Member) -> trio.SocketStream:
        """Open a connection to a member, directly if that is possible. Raises NetworkError."""
        relay = self._reach.relay_of(member)
        if relay is None:
            return await self._reach.dial_member(member)
        return await self._connect(relay, member)

    async def _connect(self, peer: Member, to: Member) -> trio.SocketStream:
        """Open a connection that a peer relays to a member, which may be the peer itself."""
        ticket, dials = self._entropy(LANE_ID_BYTES), self._reach.we_dialled(peer)
        self._reach.send(peer, Splice(ticket, to, dial=not dials))
        return await (self._dial(peer, ticket) if dials else self._arrival(ticket))

    def turns_of(self, member: Member) -> trio.CapacityLimiter:
        """Return the limiter of the dials to a peer, and of those that it has asked for."""
        return self._turns.setdefault(member, trio.CapacityLimiter(MAX_DIALS))

    def accept(self, member: Member, splice: Splice) -> None:
        """Do what a peer asks for, unless it has asked for too much already."""
        by_it = sum(by == member for by, _ in self._under_way.values())
        if by_it < MAX_SPLICES and len(self._under_way) < MAX_ALL_SPLICES:
            scope = trio.CancelScope()
            self._under_way[scope] = member, splice.to
            self._tasks.start_soon(self._run, member, splice, scope)

    def lose(self, member: Member) -> None:
        """Relay nothing more for a peer, or to it: the link with it has ended."""
        for scope, ends in self._under_way.items():
            if member in ends:
                scope.cancel()

    async def _run(self, by: Member, splice: Splice, scope: trio.CancelScope) -> None:
        far = by
        try:
            with scope:
                async with await self._first_leg(by, splice) as stream:
                    if splice.to == self._me:
                        await self._welcome(stream, await _receive_preamble(stream), lambda: None)
                    else:
                        far = splice.to
                        await self._continue(by, stream, far)
        except NetworkError as e:
            self._reach.complain(far, e)
        except ProtocolError as e:
            self._reach.complain(far, PeerUnreachable(str(e)))
        finally:
            del self._under_way[scope]

    async def _first_leg(self, by: Member, splice: Splice) -> trio.SocketStream:
        if not splice.dial:
            return await self._arrival(splice.ticket)
        async with self.turns_of(by):
            return await self._dial(by, splice.ticket)

    async def _continue(self, by: Member, stream: trio.SocketStream, to: Member) -> None:
        """Copy both ways until the connection is idle; the data are sealed from end to end."""
        if self._reach.we_dialled(to):
            async with self.turns_of(by):
                onward = await self._reach.dial_member(to)
        else:
            onward = await self._connect(to, to)
        async with onward:
            with trio.move_on_after(IDLE_S) as either:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_copy, stream, onward, either)
                    nursery.start_soon(_copy, onward, stream, either)

    async def _dial(self, peer: Member, ticket: bytes) -> trio.SocketStream:
        stream = await self._reach.dial_member(peer)
        try:
            await stream.send_all(encode_preamble(Preamble(ticket)))
        except BaseException as e:
            stream.socket.close()
            if isinstance(e, trio.BrokenResourceError):
                raise PeerUnreachable("a connection to be continued was closed") from e
            raise
        return stream

    async def _arrival(self, ticket: bytes) -> trio.SocketStream:
        arrived, arrival = trio.open_memory_channel[trio.SocketStream](1)
        self._awaited[ticket] = arrived
        self._awaits()
        try:
            with trio.fail_after(ARRIVAL_S):
                return await arrival.receive()
        except trio.TooSlowError:
            raise PeerUnreachable("a connection to be continued did not come") from None
        finally:
            self._awaited.pop(ticket, None)
            with contextlib.suppress(trio.WouldBlock):
                arrival.receive_nowait().socket.close()


async def _receive_preamble(stream: trio.SocketStream) -> bytes:
    """Return the preamble of a lane, or less if the connection ends before."""
    data = b""
    with trio.move_on_after(ARRIVAL_S), contextlib.suppress(trio.BrokenResourceError):
        while len(data) < PREAMBLE_BYTES:
            more = await stream.receive_some(PREAMBLE_BYTES - len(data))
            if not more:
                break
            data += more
    return data


async def _copy(
    source: trio.SocketStream, target: trio.SocketStream, either: trio.CancelScope
) -> None:
    """Copy until either of the two is closed; then the other direction ends, too."""
    with contextlib.suppress(trio.BrokenResourceError):
        while data := await source.receive_some(SPLICED_BYTES):
            await target.send_all(data)
            either.deadline = trio.current_time() + IDLE_S
    either.cancel()
