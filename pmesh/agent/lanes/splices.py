"""Connections that a third agent continues, for lanes between two that can't reach each other (V5).

A                            B                            C
│ Splice: a ticket, to C ───▶│
│ preamble: the ticket ─────▶│ Splice: another ticket ───▶│
│                            │◀─── preamble: that ticket  │
│ preamble: the lane's id, and all that follows ─────────▶│

Each of the two legs is dialled by who has dialled the link between its ends, since that direction
is known to pass firewalls; where B has dialled the link to C, its leg needs no ticket.
"""

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from pmesh.core.wire.link import OfferLane, Splice
from pmesh.core.wire.records import (
    LANE_ID_BYTES,
    PREAMBLE_BYTES,
    Preamble,
    encode_preamble,
)
from pmesh.errors import NetworkError, PeerUnreachable, ProtocolError
from pmesh.ids import Member
from pmesh.net.lanes.multipath import Carrier

MAX_SPLICES = 32  # that one peer has asked for; each costs two descriptors and 256 KiB
SPLICED_BYTES = 128 * 1024  # copied at once: 40 us, so that the event loop stays responsive
ARRIVAL_S = 5.0  # as long as a connection may take to authenticate


class Reach(Protocol):
    """What the lanes need of the links (`pmesh.agent.mesh.peers`)."""

    def send(self, member: Member, message: OfferLane | Splice) -> None:
        """Send on the link to the member, if there is one."""
        ...

    def we_dialled(self, member: Member) -> bool:
        """Whether the link to the member was dialled from here."""
        ...

    def relay_of(self, member: Member) -> Member | None:
        """Return who forwards to a member; None if it can be dialled directly."""
        ...

    def paths_to(self, member: Member) -> tuple[Carrier, ...]:
        """Return the paths over which a lane goes at once, the best first; () if none is direct."""
        ...

    async def dial_member(self, member: Member) -> trio.SocketStream:
        """A new connection to the member's door; NetworkError if there is none."""
        ...

    def name_of(self, member: Member) -> str:
        """What the user calls the member's machine."""
        ...

    def complain(self, member: Member, error: NetworkError) -> None:
        """Show that a connection to the member failed."""
        ...


class Splices:
    """The connections that one agent continues for others, and that others continue for it.

    Args:
        me: This agent.
        reach: Its links.
        nursery: For the connections that it continues.
        entropy: Returns random bytes.
        awaits: Is called when another ticket is awaited.
        welcome: Takes a connection that names a lane, as if it had come through the door.
    """

    def __init__(
        self,
        me: Member,
        reach: Reach,
        nursery: trio.Nursery,
        entropy: Callable[[int], bytes],
        *,
        awaits: Callable[[], None],
        welcome: Callable[[trio.SocketStream, bytes, Callable[[], None]], Awaitable[None]],
    ) -> None:
        self._me = me
        self._reach = reach
        self._nursery = nursery
        self._entropy = entropy
        self._awaits = awaits
        self._welcome = welcome
        self._awaited: dict[bytes, trio.MemorySendChannel[trio.SocketStream]] = {}
        self._asked_by: Counter[Member] = Counter()

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
        """Open a connection that a peer continues to a member, which may be the peer itself."""
        ticket, dials = self._entropy(LANE_ID_BYTES), self._reach.we_dialled(peer)
        self._reach.send(peer, Splice(ticket, to, dial=not dials))
        return await (self._dial(peer, ticket) if dials else self._arrival(ticket))

    def accept(self, member: Member, splice: Splice) -> None:
        """Do what a peer asks for, unless it has asked for too much already."""
        if self._asked_by[member] < MAX_SPLICES:
            self._asked_by[member] += 1
            self._nursery.start_soon(self._run, member, splice)

    async def _run(self, by: Member, splice: Splice) -> None:
        ticket, far = splice.ticket, by
        try:
            stream = await (self._dial(by, ticket) if splice.dial else self._arrival(ticket))
            async with stream:
                if splice.to == self._me:
                    await self._welcome(stream, await _receive_preamble(stream), lambda: None)
                else:
                    far = splice.to
                    await self._continue(stream, far)
        except NetworkError as e:
            self._reach.complain(far, e)
        except ProtocolError as e:
            self._reach.complain(far, PeerUnreachable(str(e)))
        finally:
            self._asked_by[by] -= 1
            self._asked_by += Counter()  # without the zeros

    async def _continue(self, stream: trio.SocketStream, to: Member) -> None:
        """Copy both ways; what is copied is sealed between the two ends."""
        direct = self._reach.we_dialled(to)
        onward = await (self._reach.dial_member(to) if direct else self._connect(to, to))
        async with onward, trio.open_nursery() as nursery:
            nursery.start_soon(_copy, stream, onward, nursery.cancel_scope)
            nursery.start_soon(_copy, onward, stream, nursery.cancel_scope)

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
    source: trio.SocketStream, target: trio.SocketStream, both: trio.CancelScope
) -> None:
    """Copy until either of the two is closed; then the other direction ends, too."""
    with contextlib.suppress(trio.BrokenResourceError):
        while data := await source.receive_some(SPLICED_BYTES):
            await target.send_all(data)
    both.cancel()
