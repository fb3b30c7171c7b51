"""The one link with each peer: which of two links stays, and what the end of a link means."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
import trio

from pmesh.agent.containment import Contain
from pmesh.agent.mesh.dial_targets import Targets
from pmesh.agent.mesh.membership import Membership
from pmesh.core.links.addresses import in_dialling_order
from pmesh.core.links.dialing import STEADY_AFTER_S
from pmesh.core.links.health import WIFI, WIRED, Thresholds
from pmesh.core.wire.link import (
    Address,
    AskProbe,
    AskResult,
    Hello,
    KnownPeers,
    Leaving,
    LinkMessage,
    OfferLane,
    P2PLinkMessage,
    P2PMessage,
    Probe,
    RestLane,
)
from pmesh.errors import (
    MeshKeyMismatch,
    NetworkError,
    NodeKeyCopied,
    PeerUnreachable,
    PmeshError,
    ProtocolError,
    ProtocolVersionMismatch,
)
from pmesh.ids import Member, NodeId, short_node
from pmesh.net.links.dialer import dial_any
from pmesh.net.links.interfaces import AddressWatch, remote_address_of
from pmesh.net.links.link import Link, shake_hands
from pmesh.net.links.tls import TlsContexts

REDIAL_S = 1.0  # V6: an immediate redial that is not even refused in this time has failed
LONGEST_REDIAL_S = 5.0  # V11: where round trips are long
REDIAL_ROUND_TRIPS = 4  # TCP, two of TLS, and the Hellos
PROOF_OF_LIFE_S = 1.0  # five heartbeats: an older incarnation that is silent this long is dead
MAX_LINKS = 64  # the largest number of members in a view
MAX_LINKS_PER_ADDRESS = 16  # one machine that invents nodes leaves room for others
BANNED_S = 2.0  # after the first message that no honest member would send; doubles each time
LONGEST_BANNED_S = 300.0
MAX_BANNED = 256

_log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Live:
    """A link in use, and how it was dialled."""

    link: Link
    dialled: Address | None
    """Where we dialled it; None if the peer dialled us."""
    leaving: bool = False
    again: bool = False
    """True if it was dialled immediately after another link had ended (V6)."""
    since: float = field(default_factory=trio.current_time)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def member(self) -> Member:
        return self.link.peer.member


class Bans:
    """Nodes that get no link for a while, because they did what no honest member would."""

    def __init__(self) -> None:
        self._bans: dict[NodeId, tuple[float, float]] = {}  # end and length of the latest ban

    def add(self, node: NodeId, *, now: float) -> None:
        """Ban a node, each time for twice as long, unless it has behaved for five minutes."""
        until, lasted_s = self._bans.pop(node, (-math.inf, 0.0))
        again = now < until + LONGEST_BANNED_S
        lasts_s = min(2 * lasted_s, LONGEST_BANNED_S) if again else BANNED_S
        self._bans[node] = now + lasts_s, lasts_s
        if len(self._bans) > MAX_BANNED:
            del self._bans[next(iter(self._bans))]

    def left_s(self, node: NodeId, *, now: float) -> float:
        """Return the seconds until the ban ends; 0 if there is none."""
        until, _ = self._bans.get(node, (now, 0.0))
        return max(0.0, until - now)


class Peers:
    """All links of one agent."""

    membership: Membership

    def __init__(
        self,
        hello: Callable[[], Hello],
        *,
        contexts: TlsContexts,
        watch: AddressWatch,
        nursery: trio.Nursery,
        jitter: Callable[[], float],
        on_offer: Callable[[Member, OfferLane], None],
        on_rest: Callable[[Member, RestLane], None],
        on_ask: Callable[[AskResult], None],
        on_p2p: Callable[[Member, P2PMessage], None],
        contain: Contain,
    ) -> None:
        self._hello = hello
        self._contexts = contexts
        self._watch = watch
        self._nursery = nursery
        self._on_offer = on_offer
        self._on_rest = on_rest
        self._on_ask = on_ask
        self._on_p2p = on_p2p
        self._contain = contain
        self._bans = Bans()
        self.broken_links = 0
        """How many links ended because the peer did what no honest member would."""
        self.links: dict[NodeId, Live] = {}
        self.targets = Targets(self._dial_target, nursery=nursery, jitter=jitter)
        self._ended_bytes = (0, 0)
        self._leaving = False

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
        links = [live.link for live in self.links.values()]
        return (
            sent + sum(link.bytes_sent for link in links),
            received + sum(link.bytes_received for link in links),
        )

    # --- links come up

    async def _dial_target(self, addresses: tuple[Address, ...]) -> NodeId:
        ordered = in_dialling_order(addresses, local=self._watch.current)
        if not ordered:
            raise PeerUnreachable(f"no usable address among {', '.join(map(str, addresses))}")
        link, address = await self._dial(ordered)
        await self._admit(link, dialled=address)
        if link.node not in self.links and link.node != self._hello().member.node:
            raise PeerUnreachable(f"the link to {link} ended immediately")
        return link.node

    async def _dial(self, addresses: tuple[Address, ...]) -> tuple[Link, Address]:
        stream, address = await dial_any(addresses)
        link = await shake_hands(
            stream, contexts=self._contexts, server_side=False, hello=self._hello()
        )
        return link, address

    async def welcome(
        self, stream: trio.SocketStream, first_bytes: bytes, authenticated: Callable[[], None]
    ) -> None:
        """Admit a connection that begins like a link. Raises PmeshError if it is none."""
        address = remote_address_of(stream)  # the socket's own raises if the peer is gone again
        if self._leaving:
            raise PeerUnreachable("this agent is leaving")
        try:
            link = await shake_hands(
                stream,
                contexts=self._contexts,
                server_side=True,
                hello=self._hello(),
                first_bytes=first_bytes,
            )
            authenticated()
        except (MeshKeyMismatch, ProtocolVersionMismatch) as e:
            self.targets.refuse(address.host, e, address)
            raise
        self._nursery.start_soon(self._admit_dialler, link, address)

    async def _admit_dialler(self, link: Link, address: Address) -> None:
        try:
            await self._admit(link, dialled=None)
        except PmeshError as e:
            self.targets.refuse(link.node, e, address)

    async def _admit(self, link: Link, *, dialled: Address | None, again: bool = False) -> None:
        """Keep the link and start its tasks, unless another link with the peer is preferred."""
        live, own = Live(link, dialled, again=again), self._hello().member
        if self._leaving:
            await link.aclose()
            return
        if link.node == own.node:
            await link.aclose()
            if link.peer.member != own:
                raise _copied_from(self._hello(), link.peer, link)
            return
        refusal = self._refusal_of(link)
        if refusal is not None:
            await link.aclose()
            raise refusal
        current = self.links.get(link.node)
        if current is not None and current.member != live.member:
            await self._judge_incarnations(current, live)
            current = self.links.get(link.node)
        if current is not None and not self._prefers(live, current):
            await link.aclose()
            return
        self.links[link.node] = live
        self.targets.link_up(link.node)
        if current is not None:
            current.scope.cancel()
        self._nursery.start_soon(self._run, live)
        self.membership.link_up(live.member, self._thresholds(link))
        self._introduce(live)

    def _refusal_of(self, link: Link) -> PmeshError | None:
        """Return why an authenticated link is refused; None if it is not."""
        banned_s = self._bans.left_s(link.node, now=trio.current_time())
        if banned_s > 0:
            text = f"{link} broke the protocol before; it may come back in {banned_s:.0f} s"
            return ProtocolError(text)
        if link.node in self.links:
            return None
        host = link.remote_address.host
        here = sum(live.link.remote_address.host == host for live in self.links.values())
        if len(self.links) >= MAX_LINKS or here >= MAX_LINKS_PER_ADDRESS:
            text = f"{link} gets no link: {len(self.links)} exist already, {here} from {host}"
            return PeerUnreachable(text)
        return None

    async def _judge_incarnations(self, current: Live, new: Live) -> None:
        """Distinguish a restarted agent from a copied home: both come under a known node key."""
        try:
            lives = await self._shows_life(current)
        except BaseException:  # the agent is stopping
            await new.link.aclose()
            raise
        if lives:
            await new.link.aclose()
            raise _copied_from(current.link.peer, new.link.peer, new.link)
        if self.links.get(new.link.node) is current:
            self._end(current, "it was restarted")

    async def _shows_life(self, live: Live) -> bool:
        """Return True if a message arrives while the link is still the current one."""
        heard = live.link.messages_received
        deadline = trio.current_time() + PROOF_OF_LIFE_S
        while self.links.get(live.link.node) is live and trio.current_time() < deadline:
            if live.link.messages_received > heard:
                return True
            await trio.sleep(PROOF_OF_LIFE_S / 20)
        return False

    def _prefers(self, new: Live, current: Live) -> bool:
        """If both dials of a pair complete, keep the smaller node's; otherwise the newer."""
        mine, theirs = self._hello().member.node, new.link.node
        diallers = [theirs if live.dialled is None else mine for live in (new, current)]
        return diallers[0] <= diallers[1]

    def _thresholds(self, link: Link) -> Thresholds:
        host = link.local_address.host.partition("%")[0]
        kinds = {own.kind for own in self._watch.current if own.host == host}
        return WIFI if "wifi" in kinds else WIRED

    def _introduce(self, live: Live) -> None:
        """Introduce the new peer and the others to each other, so that one address is enough."""
        for other in self.links.values():
            if other is not live:  # one peer in a message, as a Hello may be long
                live.link.send(KnownPeers((other.link.peer,)))
                other.link.send(KnownPeers((live.link.peer,)))

    # --- links run and end

    async def _run(self, live: Live) -> None:
        why, gone = "", False
        try:
            with live.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(live.link.run_writer)
                    why, gone = await self._read(live)
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await live.link.aclose()
        sent, received = self._ended_bytes
        self._ended_bytes = sent + live.link.bytes_sent, received + live.link.bytes_received
        if self.links.get(live.link.node) is not live:
            return  # another link has replaced it, or the peer was given up
        refused = live.again and trio.current_time() - live.since < STEADY_AFTER_S
        if gone or refused:
            self._end(live, why)
        else:
            await self._redial(live, why)

    async def _read(self, live: Live) -> tuple[str, bool]:
        """Read until the link ends. Return why, and True if a redial is pointless."""
        errors: list[str] = []
        try:
            while not errors:
                message = await live.link.receive()
                with self._contain(
                    f"the link to {live.link.peer.name}", errors.append, passing=(PmeshError,)
                ):
                    self._receive(live, message)
            self._ban(live.link.node)
            return errors[0], True
        except trio.EndOfChannel:
            return ("it left", True) if live.leaving else ("its connection was closed", False)
        except trio.ClosedResourceError:
            return "it was given up", False
        except PeerUnreachable:
            return "its connection broke", False
        except ProtocolError as e:
            self._ban(live.link.node)
            _log.error("a peer broke the protocol", peer=live.link.peer.name, reason=str(e))
            self.targets.refuse(live.link.node, e, live.link.remote_address)
            return f"it broke the protocol: {e}", True

    def ban(self, node: NodeId, why: str) -> None:
        """Drop a peer that did what no honest member would, and refuse it for a while."""
        _log.error("a peer broke the protocol", peer=self.membership.name_of(node), reason=why)
        self._ban(node)
        self.drop(node, why)

    def _ban(self, node: NodeId) -> None:
        self.broken_links += 1
        self._bans.add(node, now=trio.current_time())

    def _receive(self, live: Live, message: LinkMessage) -> None:  # noqa: C901 - one arm for each
        match message:
            case Hello():
                raise ProtocolError("a second Hello")
            case KnownPeers(peers):
                for peer in peers:
                    if peer.member.node not in self.links and peer.addresses:
                        self.targets.introduce(live.link.node, peer.member.node, peer.addresses)
            case OfferLane():
                self._on_offer(live.member, message)
            case RestLane():
                self._on_rest(live.member, message)
            case AskResult():
                self._on_ask(message)
            case AskProbe():
                self.membership.probing.answer(live.member, message)
            case Probe():
                self.membership.probing.receive(live.member, message)
            case P2PLinkMessage():
                self._on_p2p(live.member, message)
            case Leaving():
                live.leaving = True
                self._end(live, "its agent was stopped")
            case _:
                self.membership.receive(live.member, message)

    async def _redial(self, live: Live, why: str) -> None:
        """V6: an end of file means gone only if a redial fails or meets another incarnation."""
        del self.links[live.link.node]
        addresses = (live.dialled,) if live.dialled else live.link.peer.addresses
        ordered = in_dialling_order(addresses, local=self._watch.current) or addresses
        found: tuple[Link, Address] | None = None
        try:
            with trio.move_on_after(self._redial_s(live)):
                found = await self._dial(ordered)
            if found is not None:  # outside the timeout: it may have to wait for proof of life
                await self._admit(found[0], dialled=found[1], again=True)
        except PmeshError as e:
            why = f"{why}, and a redial failed ({e})"
        if live.link.node not in self.links:
            self._end(live, why)

    def _redial_s(self, live: Live) -> float:
        health = self.membership.health_of(live.link.node)
        needs_s = REDIAL_ROUND_TRIPS * (0.0 if health is None else health.least_round_trip_s)
        return min(max(REDIAL_S, needs_s), LONGEST_REDIAL_S)

    def _end(self, live: Live, why: str) -> None:
        """Treat the peer as gone, unless another link with it has come up since."""
        node = live.link.node
        live.scope.cancel()
        if self.links.get(node) not in {None, live}:
            return
        self.links.pop(node, None)
        self.targets.forget(node)
        self.targets.link_lost(node)
        self.membership.lose(node, why)

    def drop(self, node: NodeId, why: str) -> None:
        live = self.links.get(node)
        if live is None:
            self.membership.lose(node, why)
        else:
            self._end(live, why)

    async def leave(self) -> None:
        """Inform all peers that this is a leave and not a failure, and accept no more links."""
        self._leaving = True
        leaving, self.links = self.links, {}  # so that their ends cause no redial
        async with trio.open_nursery() as nursery:
            for live in leaving.values():
                live.link.send(Leaving())
                nursery.start_soon(live.link.aclose)

    # --- implements `pmesh.agent.lanes.rendezvous.Reach`

    def send(self, member: Member, message: LinkMessage) -> None:
        """Send on the link to the member; dropped if there is none."""
        live = self.links.get(member.node)
        if live is not None and live.member == member:
            live.link.send(message)

    def we_dialled(self, member: Member) -> bool:
        live = self.links.get(member.node)
        return live is not None and live.dialled is not None

    async def dial_member(self, member: Member) -> trio.SocketStream:
        """Open a new connection to the address at which the member's link was dialled."""
        live = self.links.get(member.node)
        if live is None or live.dialled is None:
            raise PeerUnreachable(f"this agent has dialled no link to {self.name_of(member)}")
        stream, _ = await dial_any((live.dialled,))
        return stream

    def name_of(self, member: Member) -> str:
        seat, live = self.membership.view.seat_of(member), self.links.get(member.node)
        if seat is not None:
            return seat.name
        if live is not None:
            return live.link.peer.name
        own = self._hello()
        return own.name if member.node == own.member.node else short_node(member.node)

    def complain(self, member: Member, error: NetworkError) -> None:
        """Log a failed connection to the member; the lane rendezvous tries again."""
        _log.info("no lane", peer=self.name_of(member), reason=str(error))


def _copied_from(one: Hello, other: Hello, link: Link) -> NodeKeyCopied:
    where = ", ".join(str(address) for address in one.addresses[:1]) or "unknown address"
    return NodeKeyCopied(
        f"{one.name} ({where}) and {other.name} ({link.remote_address}) have the same node "
        f"key ({short_node(link.node)}): a home was copied; on one of them run 'pmesh down', "
        "remove node_key from its home, and run 'pmesh up'"
    )
