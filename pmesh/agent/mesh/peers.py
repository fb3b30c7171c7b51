"""The one link with each peer: which paths join it, and what the end of its last path means."""

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import assert_never

import msgspec
import structlog
import trio

from pmesh.agent.containment import Contain, Tasks
from pmesh.agent.events import News
from pmesh.agent.mesh.bans import Bans
from pmesh.agent.mesh.dial_targets import Targets
from pmesh.agent.mesh.links import (
    MAX_LINKS,
    Link,
    LivePath,
    PathFailed,
    bare_host,
    begins_at,
    copied_from,
    hosts_of,
    live_path,
    numbers_of,
    why_full,
)
from pmesh.agent.mesh.membership import Membership
from pmesh.agent.mesh.path_keeper import PathKeeper
from pmesh.agent.mesh.reach import MemberReach
from pmesh.agent.mesh.register import Register
from pmesh.agent.mesh.relays import Relays
from pmesh.agent.mesh.renewals import Renewals
from pmesh.core.links.addresses import BoundAddress, in_dialling_order
from pmesh.core.links.dialing import STEADY_AFTER_S
from pmesh.core.links.paths import MAX_PATHS, Way
from pmesh.core.wire.channels import Channels
from pmesh.core.wire.link import LINK, Address, Hello, KnownPeers, Leaving
from pmesh.core.wire.relays import RELAYS
from pmesh.errors import (
    MeshKeyMismatch,
    PeerUnreachable,
    PmeshError,
    ProtocolError,
    ProtocolVersionMismatch,
)
from pmesh.ids import NodeId
from pmesh.net.links.dialer import dial_any
from pmesh.net.links.interfaces import AddressWatch, remote_address_of
from pmesh.net.links.path import Path, shake_hands
from pmesh.net.links.tls import TlsContexts

REDIAL_S = 1.0  # V6: an immediate redial that is not even refused in this time has failed
LONGEST_REDIAL_S = 5.0  # V11: where round trips are long
REDIAL_ROUND_TRIPS = 4  # TCP, two of TLS, and the Hellos
PROOF_OF_LIFE_S = 1.0  # five heartbeats: an older incarnation that is silent this long is dead

_log = structlog.get_logger()


class Peers:
    """All links of one agent."""

    def __init__(
        self,
        hello: Callable[[], Hello],
        *,
        membership: Callable[[], Membership],
        register: Register,
        renewals: Callable[[], Renewals],
        watch: AddressWatch,
        nursery: Tasks,
        jitter: Callable[[], float],
        channels: Channels,
        noticed: Callable[[News], None],
        path_failed: PathFailed,
        contain: Contain,
    ) -> None:
        """`membership` is told of the links and sends over them; `renewals` has the mesh key."""
        self._hello = hello
        self._membership = membership
        self._register = register
        self._renewals = renewals
        self._watch = watch
        self._nursery = nursery
        self._channels = channels
        self._noticed = noticed
        self._path_failed = path_failed
        self._contain = contain
        self._keeper = PathKeeper(
            watch,
            is_quiet=lambda: self.membership.is_quiet,
            dial=self.dial_way,
            lose=self.end_path,
            improved=self.improved,
        )
        self.relays = Relays(
            me=lambda: self._hello().member.node,
            contexts=self._contexts,
            hello=self._hello_to,
            links=lambda: self.links,
            membership=membership,
            admit=lambda path, relay: self._admit(path, dialled=None, relay=relay),
            nursery=nursery,
        )
        channels.register(RELAYS, self.relays.receive)
        self._bans = Bans()
        self.broken_links = 0
        """How many paths ended because the peer did what no honest member would."""
        self.links: dict[NodeId, Link] = {}
        self.reach = MemberReach(self.links, hello=hello, membership=membership)
        self._numbers = itertools.count(1)
        self._next_numbers: dict[NodeId, int] = {}  # of links that may come up
        self.targets = Targets(self._dial_target, nursery=nursery, jitter=jitter)
        self._ended_bytes = (0, 0)
        self._leaving = False

    @property
    def membership(self) -> Membership:
        return self._membership()

    def found(self, node: NodeId, addresses: tuple[Address, ...], *, fresh: bool = True) -> None:
        """Take a node of this mesh from mDNS; it is our own if a home may have been copied.

        An advertisement that is not fresh may be replayed: it counts only for an unknown node, so
        that a machine with a wrong clock is still found.
        """
        if fresh or not self.targets.knows(node):
            self.targets.name(node, addresses, linked=node in self.links)

    @property
    def control_bytes(self) -> tuple[int, int]:
        """Bytes sent and received on links since the agent's start, at the sockets."""
        sent, received = self._ended_bytes
        lives = [live for link in self.links.values() for live in link.paths.values()]
        paths = [live.path for live in lives if live.relay is None]  # a relayed one has no socket
        return (
            sent + sum(path.bytes_sent for path in paths),
            received + sum(path.bytes_received for path in paths),
        )

    def _name_of(self, link: Link) -> str:
        return self.reach.name_of(link.member)

    def _contexts(self) -> TlsContexts:
        return self._renewals().keyring.contexts

    # --- paths come up

    async def _dial_target(self, addresses: tuple[Address, ...]) -> NodeId:
        ordered = self.in_order(addresses)
        if not ordered:
            raise PeerUnreachable(f"no usable address among {', '.join(map(str, addresses))}")
        try:
            path, address = await self._dial(ordered)
        except MeshKeyMismatch:
            await self._renewals().ask(addresses)  # ours may be an old one
            raise
        await self._admit(path, dialled=address)
        if path.node not in self.links and path.node != self._hello().member.node:
            raise PeerUnreachable(f"the link to {path} ended immediately")
        return path.node

    def in_order(self, addresses: Iterable[Address]) -> tuple[BoundAddress, ...]:
        """Return how to dial these addresses, the best first."""
        watch = self._watch
        return in_dialling_order(addresses, local=watch.current, bind_all=watch.is_restricted)

    async def _dial(self, addresses: tuple[BoundAddress, ...]) -> tuple[Path, BoundAddress]:
        stream, address = await dial_any(addresses)
        contexts, hello = self._contexts(), self._hello_to
        path = await shake_hands(stream, contexts=contexts, server_side=False, hello=hello)
        return path, address

    async def dial_way(self, way: Way) -> None:
        """Add the path of this way to the link with its peer. Raises PmeshError."""
        path, address = await self._dial(((way.address, way.own),))
        await self._admit(path, dialled=address)

    def _hello_to(self, node: NodeId) -> Hello:
        """Return our Hello, with the number of the link, or with why there will be none."""
        link = self.links.get(node)
        if link is not None:
            number = link.numbers.ours
        elif node in self._next_numbers:
            number = self._next_numbers[node]
        else:
            number = self._next_numbers[node] = next(self._numbers)
            if len(self._next_numbers) > MAX_LINKS:
                del self._next_numbers[next(iter(self._next_numbers))]
        removal = self._register.removal_of(node)
        return msgspec.structs.replace(self._hello(), link=number, removal=removal)

    async def welcome(
        self, stream: trio.SocketStream, first_bytes: bytes, authenticated: Callable[[], None]
    ) -> None:
        """Admit a connection that begins like a path. Raises PmeshError if it is none."""
        address = remote_address_of(stream)  # the socket's own raises if the peer is gone again
        if self._leaving:
            raise PeerUnreachable("this agent is leaving")
        try:
            path = await shake_hands(
                stream,
                contexts=self._contexts(),
                server_side=True,
                hello=self._hello_to,
                first_bytes=first_bytes,
            )
            authenticated()
        except (MeshKeyMismatch, ProtocolVersionMismatch) as e:
            self.targets.refuse(address.host, e, address)
            if isinstance(e, MeshKeyMismatch):
                self._renewals().meet(address.host)
            raise
        self._nursery.start_soon(self._admit_dialler, path, address)

    async def _admit_dialler(self, path: Path, address: Address) -> None:
        try:
            await self._admit(path, dialled=None)
        except PmeshError as e:
            self.targets.refuse(path.node, e, address)

    async def _admit(
        self,
        path: Path,
        *,
        dialled: BoundAddress | None,
        again: bool = False,
        relay: Hello | None = None,
    ) -> None:
        """Add the path to the link with its peer, which it may begin, and start its tasks."""
        own = self._hello().member
        if self._leaving:
            await path.aclose()
            return
        if path.node == own.node:
            await path.aclose()
            if path.peer.member != own:
                raise copied_from(self._hello(), path.peer, path)
            return
        refusal = self._refusal_of(path)
        if refusal is not None:
            await path.aclose()
            raise refusal
        link = self.links.get(path.node)
        if link is not None and link.member != path.peer.member:
            await self._judge_incarnations(link, path)
            link = self.links.get(path.node)
        live = live_path(
            path, self._watch.current, dialled=dialled, again=again, link=link, relay=relay
        )
        if not self._joins(live, link):
            await path.aclose()
            return
        self._attach(live, link)

    def _attach(self, live: LivePath, link: Link | None) -> None:
        """Add the path to its link, or begin one with it."""
        if link is not None and link.numbers == numbers_of(live.path):
            replaced = link.add(live)
            if replaced is not None:
                replaced.scope.cancel()
            elif live is not link.current:
                _log.info("a path is there", peer=self._name_of(link), path=str(live))
        else:
            link = self._begin(live, instead_of=link)
        if link.is_direct:
            self.targets.link_up(link.node)
        self._nursery.start_soon(self._run, link, live)

    def _joins(self, live: LivePath, link: Link | None) -> bool:
        """Return True if the path is of the link with the peer, or begins one."""
        numbers, node = numbers_of(live.path), live.path.node
        if link is None:
            return numbers.ours == self._next_numbers.get(node)
        if numbers != link.numbers:  # the peer has given up the link, or one of us an older one
            return numbers.ours == link.numbers.ours and numbers.theirs > link.numbers.theirs
        same = link.paths.get(live.key)
        return same is None or self._prefers(live, same)

    def _begin(self, live: LivePath, *, instead_of: Link | None) -> Link:
        link = Link(live, contain=self._contain)
        self._next_numbers.pop(link.node, None)
        self.links[link.node] = link
        if instead_of is not None:
            self.relays.forget(link.node)
            instead_of.close()
        self.membership.link_up(link.member, live.thresholds, relayed=live.relay is not None)
        self._introduce(link)
        second = self._hello().member.node > link.node
        self._nursery.start_soon(partial(self._keeper.keep, link, second=second))
        return link

    def _refusal_of(self, path: Path) -> PmeshError | None:
        """Return why an authenticated path is refused; None if it is not."""
        if path.contexts is not self._contexts():  # nothing is said to who has only an old key
            return PeerUnreachable(f"the mesh key has changed since {path} began its handshake")
        removed = self._register.refusal_of(path.node, path.peer.removal)
        if removed is not None:
            return removed
        banned_s = self._bans.left_s(path.node, now=trio.current_time())
        if banned_s > 0:
            text = f"{path} broke the protocol before; it may come back in {banned_s:.0f} s"
            return ProtocolError(text)
        link = self.links.get(path.node)
        if link is not None:
            full = len(link.paths) >= 2 * MAX_PATHS
            return PeerUnreachable(f"{path} has {len(link.paths)} paths") if full else None
        return why_full(self.links.values(), path)

    async def _judge_incarnations(self, link: Link, new: Path) -> None:
        """Distinguish a restarted agent from a copied home: both come under a known node key."""
        try:
            lives = await self._shows_life(link)
        except BaseException:  # the agent is stopping
            await new.aclose()
            raise
        if lives:
            await new.aclose()
            raise copied_from(link.peer, new.peer, new)
        if self.links.get(new.node) is link:
            self._end(link, "it was restarted")

    async def _shows_life(self, link: Link) -> bool:
        """Return True if a message arrives while the link is still the current one."""
        heard = link.messages_received
        deadline = trio.current_time() + PROOF_OF_LIFE_S
        while self.links.get(link.node) is link and link.paths and trio.current_time() < deadline:
            if link.messages_received > heard:
                return True
            await trio.sleep(PROOF_OF_LIFE_S / 20)
        return False

    def _prefers(self, new: LivePath, current: LivePath) -> bool:
        """If both dials of a pair complete, keep the smaller node's; otherwise the newer."""
        mine, theirs = self._hello().member.node, new.path.node
        diallers = [theirs if live.dialled is None else mine for live in (new, current)]
        return diallers[0] <= diallers[1]

    def _introduce(self, link: Link) -> None:
        """Introduce the new peer and the others to each other, so that one address is enough."""
        for other in self.links.values():
            if other is not link:  # one peer in a message, as a Hello may be long
                link.send(KnownPeers((other.peer,)))
                other.send(KnownPeers((link.peer,)))

    # --- paths run and end

    async def _run(self, link: Link, live: LivePath) -> None:
        why, gone = "", False
        try:
            with live.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(live.path.run_writer)
                    why, gone = await self._read(link, live)
                    if not gone:
                        self._lose_path(link, live, why)
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await live.path.aclose()
        if live.relay is None:
            sent, received = self._ended_bytes
            self._ended_bytes = sent + live.path.bytes_sent, received + live.path.bytes_received
        if self.links.get(link.node) is not link:
            return  # another link has replaced it, or the peer was given up
        refused = live.again and trio.current_time() - live.since < STEADY_AFTER_S
        if gone or (not link.paths and (refused or link.is_unread)):
            self._end(link, why)
        elif not (link.paths or link.redialled):
            await self._redial(link, live, why or "its last path has lost its interface")

    def _lose_path(self, link: Link, live: LivePath, why: str) -> None:
        """Let the link go on without the path, over another one if there is any."""
        used = live is link.current
        if link.remove(live):
            self._begin_switch(link, why, since=live.last_heard)
        elif not used and link.paths:
            _log.info("a path has ended", peer=self._name_of(link), path=str(live), reason=why)
        if link.paths and not link.is_direct and self.links.get(link.node) is link:
            self.relays.forget(link.node)
            self.targets.link_lost(link.node)

    def _begin_switch(self, link: Link, why: str, *, since: float) -> None:
        """Messages go over another path than before; it is told once the peer was heard there."""
        assert link.current is not None  # noqa: S101 - it has switched to this one
        live, relayed = link.current, link.current.relay is not None
        least_s = live.health.least_round_trip_s
        self.membership.path_changed(link.node, live.thresholds, least_s, relayed=relayed)
        if trio.current_time() - link.since > STEADY_AFTER_S:  # else both have dialled
            link.begin_switch(why, since=since)

    def improved(self, link: Link, why: str) -> None:
        """Messages go over a better path: lanes of one connection leave the worse ones."""
        self._begin_switch(link, why, since=trio.current_time())
        assert link.current is not None  # noqa: S101 - it has switched to this one
        ranks = {state.key: state.rank for state in link.states()}
        for key, live in link.paths.items():
            if ranks[key] > ranks[link.current.key]:
                self._path_failed(*live.hosts, outranked=True)

    def _tell_switch(self, link: Link, took_s: float, why: str) -> None:
        name = self._name_of(link)
        text = f"{name} is reached over {link.current} after {took_s:.2f} s: {why}"
        self._noticed(News(kind="path changed", text=text, names=(name,), duration_s=took_s))

    async def follow_interfaces(self) -> None:
        """Close the paths of interfaces that are gone, and tell the peers of the others."""
        seen = self._watch.current
        while True:
            before, seen = seen, await self._watch.changed_from(seen)
            is_over = partial(begins_at, [own for own in before if own not in seen])
            for link in list(self.links.values()):
                self._close_paths(link, is_over)
                link.measure_again()
                link.send(KnownPeers((self._hello(),)))

    def _know(self, link: Link, hello: Hello) -> None:
        """Take what the peer says about another, or anew about its own interfaces."""
        if hello.member == link.member:
            if hello.said != link.peer.said:
                raise ProtocolError("a machine that changes its name while it runs")
            gone = hosts_of(link.peer) - hosts_of(hello)
            link.update(hello)
            self._close_paths(link, lambda live: bare_host(live.path.remote_address) in gone)
            return
        link.introduce(hello.member)
        if hello.member.node not in self.links and hello.addresses:
            self.targets.introduce(link.node, hello.member.node, hello.addresses)

    def _close_paths(self, link: Link, is_over: Callable[[LivePath], bool]) -> None:
        for live in [live for live in link.paths.values() if is_over(live)]:
            self.end_path(link, live, f"{live} has lost its interface")

    def end_path(self, link: Link, live: LivePath, why: str) -> None:
        """Handle a path that has failed: what runs over it need not wait any longer."""
        self._lose_path(link, live, why)
        live.scope.cancel()
        self._path_failed(*live.hosts)

    async def _read(self, link: Link, live: LivePath) -> tuple[str, bool]:
        """Read until the path ends. Return why, and True if the peer is gone with it."""
        errors: list[str] = []
        try:
            while not errors:
                packet = await live.path.receive()
                is_of_path = live.hear_untrusted(packet)
                if (switched := link.end_switch(live)) is not None:
                    self._tell_switch(link, *switched)
                if is_of_path or not link.receive_untrusted(packet):
                    continue
                with self._contain(
                    f"the link to {self._name_of(link)}",
                    errors.append,
                    passing=(PmeshError,),
                ):
                    self._receive_untrusted(link, packet.message)
            self._ban(link.node)
            return errors[0], True
        except trio.EndOfChannel:
            return ("it left", True) if link.leaving else ("its connection was closed", False)
        except trio.ClosedResourceError:
            return "it was given up", False
        except PeerUnreachable:
            return "its connection broke", False
        except ProtocolError as e:
            self._ban(link.node)
            _log.error("a peer broke the protocol", peer=self._name_of(link), reason=str(e))
            self.targets.refuse(link.node, e, live.path.remote_address)
            return f"it broke the protocol: {e}", True

    def ban(self, node: NodeId, why: str) -> None:
        """Drop a peer that did what no honest member would, and refuse it for a while."""
        _log.error("a peer broke the protocol", peer=self.membership.name_of(node), reason=why)
        self._ban(node)
        self.drop(node, why)

    def _ban(self, node: NodeId) -> None:
        self.broken_links += 1
        self._bans.add(node, now=trio.current_time())

    def _receive_untrusted(self, link: Link, data: bytes) -> None:
        if data[:1] != bytes((LINK.number,)):
            self._channels.receive_untrusted(link.member, data)
            return
        match message := LINK.decode_untrusted(data):
            case KnownPeers(peers):
                for peer in peers:
                    self._know(link, peer)
            case Leaving():
                link.leaving = True
                self._end(link, "its agent was stopped")
            case _:
                assert_never(message)

    async def _redial(self, link: Link, last: LivePath, why: str) -> None:
        """V6: an end of file means gone only if a redial fails or meets another incarnation."""
        has_failed = last.scope.cancel_called  # the path; the peer may be well
        if last.dialled is not None and not has_failed:
            ordered: tuple[BoundAddress, ...] = (last.dialled,)
        else:
            ways = link.ways(self._watch.current)
            routed = tuple((address, None) for address in link.peer.addresses)
            others = self.in_order(link.peer.addresses) or routed
            ordered = tuple(dict.fromkeys((*((way.address, way.own) for way in ways), *others)))
        found: tuple[Path, BoundAddress] | None = None
        link.redialled = True
        try:
            with trio.move_on_after(self._redial_s(link)):
                found = await self._dial(ordered)
            if found is not None:  # outside the timeout: it may have to wait for proof of life
                await self._admit(found[0], dialled=found[1], again=True)
        except PmeshError as e:
            why = f"{why}, and a redial failed: {e}"
        link.redialled = False
        if not link.paths and self.links.get(link.node) is link:
            self._end(link, why)

    def _redial_s(self, link: Link) -> float:
        health = self.membership.health_of(link.node)
        needs_s = REDIAL_ROUND_TRIPS * (0.0 if health is None else health.least_round_trip_s)
        return min(max(REDIAL_S, needs_s), LONGEST_REDIAL_S)

    def _end(self, link: Link, why: str) -> None:
        """Treat the peer as gone, unless another link with it has come up since."""
        link.close()
        if self.links.get(link.node) not in {None, link}:
            return
        self.links.pop(link.node, None)
        self.relays.forget(link.node)
        self.targets.forget(link.node)
        self.targets.link_lost(link.node)
        self.membership.lose(link.node, why)

    def drop(self, node: NodeId, why: str) -> None:
        link = self.links.get(node)
        if link is None:
            self.membership.lose(node, why)
        else:
            self._end(link, why)

    async def leave(self) -> None:
        """Inform all peers that this is a leave and not a failure, and accept no more links."""
        self._leaving = True
        leaving = list(self.links.values())
        self.links.clear()  # so that their ends cause no redial
        for direct in (False, True):  # the relayed paths need the others
            async with trio.open_nursery() as nursery:
                for link in leaving:
                    if link.is_direct == direct:
                        link.send(Leaving())
                        link.scope.cancel()
                        for live in link.paths.values():
                            nursery.start_soon(live.path.aclose)
