"""Connections between agents that can't reach each other, forwarded by one that reaches both (V5).

The agent with the smaller node id opens one. A TLS connection as on any path runs through it from
end to end, so the agent between can neither read it nor pretend to be the other end.
"""

import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping

import structlog
import trio

from pmesh.agent.containment import Tasks
from pmesh.agent.mesh.links import Link
from pmesh.agent.mesh.membership import Membership
from pmesh.core.links import paths
from pmesh.core.links.paths import Attempts
from pmesh.core.links.relaying import MAX_RELAYED, Forwarding, Onward
from pmesh.core.topology.graph import relays_between
from pmesh.core.wire.link import Hello
from pmesh.core.wire.relays import Relay
from pmesh.errors import PeerUnreachable, PmeshError
from pmesh.ids import Member, NodeId
from pmesh.net.links.path import Path, shake_hands
from pmesh.net.links.relayed import RelayedStream
from pmesh.net.links.tls import TlsContexts

MAX_OPENING = 8  # at once over one peer, which may name members that don't exist
RELAY_AFTER_S = 2.0  # a direct link takes less, and the peers of a new member all meet at once
LINGER_S = 10.0  # a direct path that has lasted for so long needs no relayed one beside it
TICK_S = 0.5
_log = structlog.get_logger()


class Relays:
    """What one agent forwards for others, and the connections that others forward for it.

    Args:
        me: This agent's node.
        contexts: Returns those of the mesh key.
        hello: Returns what this agent says about itself to a node.
        links: Returns the links with all peers.
        membership: Returns what tells who hears whom.
        admit: Takes a path, and the agent that forwards it; may raise PmeshError.
        nursery: For the handshakes.
    """

    def __init__(
        self,
        *,
        me: Callable[[], NodeId],
        contexts: Callable[[], TlsContexts],
        hello: Callable[[NodeId], Hello],
        links: Callable[[], Mapping[NodeId, Link]],
        membership: Callable[[], Membership],
        admit: Callable[[Path, Hello], Awaitable[None]],
        nursery: Tasks,
    ) -> None:
        self._me = me
        self._contexts = contexts
        self._hello = hello
        self._links = links
        self._membership = membership
        self._admit = admit
        self._nursery = nursery
        self._numbers = itertools.count(1)
        self.forwarding = Forwarding()
        self.streams: dict[tuple[NodeId, NodeId], RelayedStream] = {}  # by relay and far end
        self._opening: dict[Member, NodeId] = {}
        """Who is to be reached, and over whom."""

    def receive(self, member: Member, message: Relay) -> None:
        """Handle a peer's message."""
        link, far = self._links().get(member.node), self._links().get(message.far)
        if link is None or link.member != member:
            return
        if message.to_forward:
            reachable = far is not None and far.is_direct and link.is_direct
            onward = self.forwarding.forward(link.node, message, reachable=reachable)
            if onward is not None:
                self._send(onward)
        else:
            self._take(link, message)

    def forget(self, node: NodeId) -> None:
        """Nothing can be forwarded to a node, or by it: there is no direct path to it any more."""
        for onward in self.forwarding.forget(node):
            self._send(onward)
        for (relay, _), stream in list(self.streams.items()):
            if relay == node:
                stream.break_off()

    async def keep(self) -> None:
        """Open what is needed, and close what is not needed any more, until cancelled."""
        attempts: dict[Member, Attempts] = {}
        while True:
            await trio.sleep(TICK_S)
            now, needed = trio.current_time(), self._needed()
            known, attempts = attempts, {}
            for member, relays in needed.items():
                wait_s = 0.0 if member.node in self._links() else RELAY_AFTER_S
                tried = known.get(member, Attempts(due=now + wait_s))
                if tried.due <= now and member not in self._opening:
                    relay = self._in_order(relays, member)[tried.count % len(relays)]
                    if sum(over == relay.node for over in self._opening.values()) < MAX_OPENING:
                        self._opening[member] = relay.node
                        self._nursery.start_soon(self._open, relay, member)
                        tried = paths.tried_again(tried, now=now)
                attempts[member] = tried
            self._close_needless()

    def _in_order(self, relays: list[Link], member: Member) -> list[Link]:
        """Return those that may forward to a member, the one with the shortest path first."""
        if len(relays) == 1:
            return relays
        me, by_member = self._membership().state.me, {relay.member: relay for relay in relays}
        graph = self._membership().edges_among((me, member, *by_member))
        return [by_member[relay] for relay in relays_between(graph, me, member)]

    def _needed(self) -> dict[Member, list[Link]]:
        """Return the members that are to be reached over another one, and over which."""
        needed = defaultdict[Member, list[Link]](list)
        me, links = self._me(), self._links()
        for relay in links.values():
            heard = self._membership().hears(relay.node) if relay.is_direct else ()
            for incarnation in heard:
                member = relay.introduced.get(incarnation)
                if member is None or member.node <= me:
                    continue
                link = links.get(member.node)
                if link is None or link.member != member or self._is_out_of_reach(link, relay):
                    needed[member].append(relay)
        return needed

    def _is_out_of_reach(self, link: Link, relay: Link) -> bool:
        """Return True if a path over this relay is worth a try."""
        is_used = any(live.relay == relay.member for live in link.paths.values())
        return not is_used and (not link.paths or self._membership().is_silent(link.node))

    def _close_needless(self) -> None:
        now, me = trio.current_time(), self._me()
        for link in self._links().values():
            current = link.current
            if current is None or current.relay is not None or now - current.since < LINGER_S:
                continue
            for live in link.paths.values():
                if live.relay is not None and current.asked_at is None and me < link.node:
                    self._nursery.start_soon(live.path.aclose)

    async def _open(self, relay: Link, member: Member) -> None:
        stream = self._new_stream(relay, member.node, next(self._numbers))
        try:
            await self._greet(relay, stream, server_side=False)
        except PmeshError as e:
            _log.debug("no relayed path", over=relay.peer.name, reason=str(e))
        finally:
            del self._opening[member]

    def _take(self, relay: Link, message: Relay) -> None:
        """Take what comes from an agent that forwards it to this one."""
        stream = self.streams.get((relay.node, message.far))
        if stream is not None and stream.number == message.number:
            stream.take(message)
            return
        others = sum(over == relay.node for over, _ in self.streams)
        if message.far < self._me() and message.data and others < MAX_RELAYED and relay.is_direct:
            stream = self._new_stream(relay, message.far, message.number)
            stream.take(message)
            self._nursery.start_soon(self._welcome, relay, stream)
        elif not message.ends:
            end = Relay(message.far, message.number, to_forward=True, ends=True)
            self._send(Onward(relay.node, end))

    async def _welcome(self, relay: Link, stream: RelayedStream) -> None:
        try:
            await self._greet(relay, stream, server_side=True)
        except PmeshError as e:
            _log.debug("no relayed path", over=relay.peer.name, reason=str(e))

    async def _greet(self, relay: Link, stream: RelayedStream, *, server_side: bool) -> None:
        path = await shake_hands(
            stream, contexts=self._contexts(), server_side=server_side, hello=self._hello
        )
        if path.node != stream.far:
            await path.aclose()
            raise PeerUnreachable(f"{relay} has led to {path}, and not where it was to lead")
        await self._admit(path, relay.peer)

    def _new_stream(self, relay: Link, far: NodeId, number: int) -> RelayedStream:
        """Return one end of a connection; an earlier one with the same agent is over."""
        key = relay.node, far
        earlier = self.streams.get(key)
        if earlier is not None:
            earlier.break_off()

        def tell(message: Relay) -> None:
            if relay.is_direct:
                relay.send(message)
            else:
                stream.break_off()

        def closed() -> None:
            if self.streams.get(key) is stream:
                del self.streams[key]

        stream = self.streams[key] = RelayedStream(far, number, tell=tell, closed=closed)
        return stream

    def _send(self, onward: Onward) -> None:
        link = self._links().get(onward.to)
        if link is not None:
            link.send(onward.message)
