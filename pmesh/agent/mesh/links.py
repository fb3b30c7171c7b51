"""The link with one peer: its messages, and the paths over which they go."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, assert_never

import trio

from pmesh.agent.containment import Contain
from pmesh.agent.mesh.probing import PathBandwidth, ProbedPath
from pmesh.core.links import health, paths
from pmesh.core.links.addresses import BoundAddress, LocalAddress, interface_of
from pmesh.core.links.delivery import Delivery, Packet
from pmesh.core.links.health import WIFI, WIRED, Health, Thresholds
from pmesh.core.links.paths import PathFlaps, PathKey, PathState, Way
from pmesh.core.wire.channels import Message, encode
from pmesh.core.wire.link import Address, Hello, PeerInterface
from pmesh.core.wire.probes import PATHS, AskProbe, Ping, Pong, Probe
from pmesh.errors import NodeKeyCopied, PeerUnreachable
from pmesh.ids import Incarnation, Member, NodeId, short_node
from pmesh.net.lanes.multipath import LanePath
from pmesh.net.lanes.subflows import UNKNOWN_BYTES_PER_S, ConnectionFacts
from pmesh.net.links.dialer import dial_any
from pmesh.net.links.path import MAX_QUEUED_BYTES, MAX_QUEUED_MESSAGES, Path

MAX_LINKS = 64  # the largest number of members in a view
MAX_LINKS_PER_ADDRESS = 16  # one machine that invents nodes leaves room for others
MAX_FLAPS = 64  # paths whose ends are remembered; the peer names its interfaces as it likes
MAX_INTRODUCED = 64  # members that one peer has named: as many as a view has


class PathFailed(Protocol):
    """What is told of a path between these addresses of an interface here and one of a peer."""

    def __call__(
        self, ours: AbstractSet[str], theirs: AbstractSet[str], *, outranked: bool = False
    ) -> None:
        """It has failed, or was only `outranked` by a better one."""
        ...


class LinkNumbers(NamedTuple):
    """Identifies a link between two agents: both have numbered it."""

    ours: int
    theirs: int


def numbers_of(path: Path) -> LinkNumbers:
    """Return the link of which a path is."""
    return LinkNumbers(path.ours.link, path.peer.link)


@dataclass(slots=True, eq=False)
class LivePath:
    """A path in use, and how it was dialled."""

    path: Path
    key: PathKey
    kind: str
    speed_mbit_s: int
    dialled: BoundAddress | None
    """Where we dialled it, and over which interface; None if the peer dialled us."""
    own: LocalAddress | None
    """To which another connection over this path is bound; None for loopback, or if unknown."""
    again: bool
    """True if it was dialled immediately after the link's last path had ended (V6)."""
    hosts: tuple[frozenset[str], frozenset[str]]
    """The addresses of its two interfaces, ours first."""
    flaps: int
    relay: Member | None = None
    """The member that forwards its bytes; None if it is direct."""
    since: float = field(default_factory=trio.current_time)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    last_heard: float = field(default_factory=trio.current_time)
    asked_at: float | None = None
    health: Health = field(init=False)
    bandwidth: PathBandwidth = field(init=False)
    peer_mbit_s: int = 0
    """What the peer has measured, from here to it; 0 while unknown."""
    _answered: trio.Event = field(default_factory=trio.Event)
    _answer_took_s: float | None = None

    def __post_init__(self) -> None:
        self.health = health.begin(self.thresholds, now=self.since)
        self.bandwidth = PathBandwidth(self.path.send, self.ask)

    def __str__(self) -> str:
        """Return how a user knows it: the interface, its kind, and where it leads."""
        if self.relay is not None:
            return f"{self.key.interface} (relayed)"
        kind = f" ({self.kind})" if self.kind else ""
        return f"{self.key.interface or self.path.local_address.host}{kind} to {self.key.remote}"

    @property
    def thresholds(self) -> Thresholds:
        return WIFI if self.kind in {"wifi", paths.RELAYED} else WIRED

    def state(self) -> PathState:
        return PathState(
            key=self.key,
            kind=self.kind,
            speed_mbit_s=self.speed_mbit_s,
            since=self.since,
            flaps=self.flaps,
            measured_mbit_s=self.mbit_s,
            health=self.health,
            last_heard=self.last_heard,
            asked_at=self.asked_at,
        )

    @property
    def mbit_s(self) -> int:
        """What it was measured to carry, in the slower direction; 0 while both are unknown.

        Both sides know both values, so that they choose the same path.
        """
        known = filter(None, (self.bandwidth.settled_mbit_s, self.peer_mbit_s))
        return min(known, default=0)

    def wired_round_trip_s(self) -> float | None:
        """Return the network's least round trip; None of a radio, which is rarely at its best."""
        return None if self.thresholds is WIFI else self.path.system_round_trip_s

    def ask(self) -> None:
        """Ask for a sign of life, and tell what was measured."""
        now = trio.current_time()
        self.path.send(Ping(_microseconds(now), self.bandwidth.settled_mbit_s))
        if self.asked_at is None:
            self.asked_at = now

    async def measure_round_trip_s(self) -> float:
        """Ask for a sign of life, and return the round trip of the next answer."""
        self._answer_took_s = None
        self.ask()
        while self._answer_took_s is None:
            await self._answered.wait()
        return self._answer_took_s

    def hear_untrusted(self, packet: Packet) -> bool:
        """Note a sign of life, and handle a message of the path itself; return whether it is one.

        Raises ProtocolError.
        """
        now = self.last_heard = trio.current_time()
        self.asked_at = None
        if packet.message[:1] != bytes((PATHS.number,)):
            return False
        match message := PATHS.decode_untrusted(packet.message):
            case Ping(sent_us, mbit_s):
                self.peer_mbit_s = mbit_s
                self.path.send(Pong(sent_us))
            case Pong(sent_us):
                round_trip_s = health.measure_round_trip_s(
                    now_us=_microseconds(now), echo_us=sent_us, held_us=0
                )
                self.health = health.heard_from(
                    self.health, now=now, round_trip_s=round_trip_s
                ).health
                self._answer_took_s = round_trip_s
                self._answered.set()
                self._answered = trio.Event()
            case AskProbe():
                self.bandwidth.answer(message)
            case Probe():
                self.bandwidth.receive(message)
            case _:
                assert_never(message)
        return True

    def judge(self) -> None:
        """Weigh its present silence, for V12."""
        if self.asked_at is None:
            self.health = health.heard_from(self.health, now=self.last_heard).health
        else:
            self.health = health.pass_time(self.health, now=trio.current_time()).health


class Switch(NamedTuple):
    """Messages are to go over another path than before."""

    began: float
    why: str


class Link:
    """The control messages exchanged with one peer: in order, and each once.

    It lasts as long as one of its paths, and the time that V6 gives for dialling another.
    """

    def __init__(self, first: LivePath, *, contain: Contain) -> None:
        self._contain = contain
        self.peer: Hello = first.path.peer
        self.numbers = numbers_of(first.path)
        self.contexts = first.path.contexts
        """Those of the mesh key with which it began."""
        self.begun_from = first.path.remote_address.host
        self.paths: dict[PathKey, LivePath] = {}
        self.since = trio.current_time()
        self.leaving = False
        self.redialled = False
        """It has no path, and one is being dialled."""
        self.messages_received = 0
        self.changed = trio.Event()
        """Its paths, or the interfaces of either side; replaced when it is set."""
        self.scope = trio.CancelScope()
        self.introduced: dict[Incarnation, Member] = {}
        """The members that the peer has named."""
        self._current: LivePath | None = None
        self._delivery = Delivery()
        self._flaps: dict[PathKey, PathFlaps] = {}
        self._switch: Switch | None = None
        self.add(first)

    @property
    def node(self) -> NodeId:
        return self.peer.member.node

    @property
    def member(self) -> Member:
        return self.peer.member

    @property
    def current(self) -> LivePath | None:
        """The path over which this side sends its messages; None while there is none."""
        return self._current

    @property
    def relay(self) -> Member | None:
        """The member that forwards between this agent and the peer; None if there is none."""
        return next((live.relay for live in self.paths.values() if live.relay is not None), None)

    @property
    def is_direct(self) -> bool:
        """True if a path leads to the peer that no other member forwards."""
        return any(live.relay is None for live in self.paths.values())

    @property
    def is_unread(self) -> bool:
        """The peer acknowledges nothing any more."""
        return self._delivery.exceeds(MAX_QUEUED_MESSAGES, MAX_QUEUED_BYTES)

    def __str__(self) -> str:
        """Return how an error names the peer."""
        return self.peer.name if self._current is None else str(self._current.path)

    def send(self, message: Message) -> None:
        """Send a message; never waits. It is kept until the peer has acknowledged it.

        One that can't be encoded, as it would be too large, is not sent: that is this agent's own
        error. The peer would end the link and take this machine for a hostile one.
        """
        errors: list[str] = []
        with self._contain(f"a message to {self.peer.name}", errors.append):
            data = encode(message)
        if errors:
            return
        packet = self._delivery.send(data)
        if self.is_unread:
            for live in self.paths.values():
                live.path.fail(PeerUnreachable(f"{self} has stopped reading"))
        elif self._current is not None:
            self._current.path.send_packet(packet)

    def receive_untrusted(self, packet: Packet) -> bool:
        """Return True if the packet brings a message that is new. May raise ProtocolError."""
        self.messages_received += 1
        return self._delivery.receive_untrusted(packet)

    def add(self, live: LivePath) -> LivePath | None:
        """Add a path; return the one that it replaces."""
        replaced = self.paths.pop(live.key, None)
        self.paths[live.key] = live
        if self._current is replaced:
            self._use(live)
        self._tell()
        return replaced

    def remove(self, live: LivePath) -> bool:
        """Forget a path that has ended; return True if messages now go over another one."""
        if self.paths.get(live.key) is not live:
            return False  # another has replaced it
        del self.paths[live.key]
        before, now = self._flaps.get(live.key, PathFlaps()), trio.current_time()
        self._flaps[live.key] = paths.lost(live.state(), before, now=now)
        if len(self._flaps) > MAX_FLAPS:
            del self._flaps[next(iter(self._flaps))]
        self._tell()
        if self._current is not live:
            return False
        self._current = None
        return self.choose()

    def begin_switch(self, why: str, *, since: float) -> None:
        """Note that the current path has replaced another; `since` is when that was last heard."""
        if self._switch is None:
            self._switch = Switch(since, why)
        if self._current is not None:
            self._current.ask()

    def end_switch(self, live: LivePath) -> tuple[float, str] | None:
        """Return how long the switch to this path took, in seconds, and why; None if none did.

        Call it for each packet that the path has brought.
        """
        if self._switch is None or live is not self._current:
            return None
        (began, why), self._switch = self._switch, None
        return live.last_heard - began, why

    def ways(self, local: Sequence[LocalAddress]) -> tuple[Way, ...]:
        """Return how the peer can be reached directly from this machine's addresses."""
        return paths.ways_to(self.peer.interfaces, port=self.port, local=local)

    def states(self) -> tuple[PathState, ...]:
        """Return what is known of each path, in the order of `paths`."""
        states = (live.state() for live in self.paths.values())
        return paths.compared(states, self._current_key)

    @property
    def _current_key(self) -> PathKey | None:
        return None if self._current is None else self._current.key

    def measure_again(self) -> None:
        """Measure the bandwidth of its paths anew, since interfaces have changed."""
        for live in self.paths.values():
            live.bandwidth.expect_change()

    def flaps_of(self, key: PathKey) -> int:
        return self._flaps.get(key, PathFlaps()).left(trio.current_time())

    def choose(self) -> bool:
        """Take the best path for messages; return True if that is another than before."""
        key = paths.choose(self.states(), self._current_key, now=trio.current_time())
        if key is None or (self._current is not None and self._current.key == key):
            return False
        self._use(self.paths[key])
        return True

    def carriers(self) -> tuple[LivePath, ...]:
        """Return the paths for tensors, the best first: only direct ones."""
        return self._carriers(self.states())

    def _carriers(self, states: Sequence[PathState]) -> tuple[LivePath, ...]:
        keys = paths.carriers(states, self._current_key, now=trio.current_time())
        return tuple(live for key in keys if (live := self.paths[key]).relay is None)

    def introduce(self, member: Member) -> None:
        """Note a member that the peer has named."""
        self.introduced[member.incarnation] = member
        if len(self.introduced) > MAX_INTRODUCED:
            del self.introduced[next(iter(self.introduced))]

    @property
    def port(self) -> int:
        """Where the peer listens; 0 if it does not say."""
        return self.peer.addresses[0].port if self.peer.addresses else 0

    def addresses(self) -> tuple[BoundAddress, ...]:
        """Return where the peer listens at the end of each path, the best path for tensors first.

        A path that the peer has dialled is one that a firewall may not let us dial.
        """
        direct = (live for live in self.paths.values() if live.relay is None)
        ordered = dict.fromkeys((*self.carriers(), *direct))
        return tuple(dict.fromkeys(map(self._end_of, ordered)))

    def _end_of(self, live: LivePath) -> BoundAddress:
        return live.dialled or (Address(live.path.remote_address.host, self.port), live.own)

    def spread(self) -> tuple[LanePath, ...]:
        """Return the paths over which a lane goes at once, the best first: only direct ones."""
        return tuple(self._carrier(self.paths[key]) for key in self._spread_keys(self.states()))

    def _spread_keys(self, states: Sequence[PathState]) -> tuple[PathKey, ...]:
        direct = [state for state in states if state.kind != paths.RELAYED]
        return paths.spread(direct, self._current_key, now=trio.current_time())

    def probed(self) -> tuple[ProbedPath, ...]:
        """Return what is measured of the paths for tensors, the best first."""
        carriers: tuple[LivePath, ...] = ()
        used: tuple[PathKey, ...] = ()
        if len(self.paths) != 1 or self._current is None:
            states = self.states()
            carriers, used = self._carriers(states), self._spread_keys(states)
        elif self._current.relay is None:  # the usual case, and this is asked at each heartbeat
            carriers = (self._current,)
        best = next(iter(carriers), None)
        return tuple(
            ProbedPath(
                live.bandwidth,
                live.hosts,
                in_use=live is best or live.key in used,
                least_round_trip_s=live.wired_round_trip_s,
            )
            for live in carriers
        )

    def _carrier(self, live: LivePath) -> LanePath:
        bytes_per_s = (live.mbit_s or live.speed_mbit_s) * 1e6 / 8 or UNKNOWN_BYTES_PER_S
        facts = ConnectionFacts(bytes_per_s, live.health.least_round_trip_s)
        return LanePath(live.hosts, facts, partial(_dial, self._end_of(live)))

    def close(self) -> None:
        """End its paths, and the task that keeps them."""
        self.scope.cancel()
        for live in self.paths.values():
            live.scope.cancel()

    def update(self, hello: Hello) -> None:
        """Take what the peer says anew about itself: its interfaces have changed."""
        self.peer = hello
        self.measure_again()
        self._tell()

    def _use(self, live: LivePath) -> None:
        self._current = live
        for packet in self._delivery.packets_again():
            live.path.send_packet(packet)

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


async def _dial(end: BoundAddress) -> trio.SocketStream:
    stream, _ = await dial_any((end,))
    return stream


def live_path(
    path: Path,
    local: Sequence[LocalAddress],
    *,
    dialled: BoundAddress | None,
    again: bool,
    link: Link | None,
    relay: Hello | None,
) -> LivePath:
    """Return a new path, with what the interfaces at its two ends are.

    Args:
        path: The connection.
        local: This machine's addresses.
        dialled: Where it was dialled; None if it was accepted.
        again: As `LivePath.again`.
        link: The link with the peer, if there is one.
        relay: The member that forwards its bytes; None if it is direct.
    """
    if relay is not None:
        key = PathKey(relay.name, path.peer.name)
        return LivePath(
            path=path,
            key=key,
            kind=paths.RELAYED,
            speed_mbit_s=0,
            dialled=None,
            own=None,
            again=False,
            hosts=(frozenset(), frozenset()),
            flaps=0 if link is None else link.flaps_of(key),
            relay=relay.member,
        )
    there = bare_host(path.remote_address)
    own = interface_of(path.local_address, local=local)
    theirs = _interface_with(path.peer.interfaces, there)
    key = PathKey("" if own is None else own.interface, there if theirs is None else theirs.name)
    kinds = ["" if own is None else own.kind, "" if theirs is None else theirs.kind]
    speeds = [0 if own is None else own.speed_mbit_s, 0 if theirs is None else theirs.speed_mbit_s]
    return LivePath(
        path=path,
        key=key,
        kind=max(kinds, key=paths.kind_rank),
        speed_mbit_s=min(speeds),
        dialled=dialled,
        own=None if own is None or own.kind == "loopback" else own,
        again=again,
        hosts=(
            frozenset({bare_host(path.local_address)} if own is None else _hosts_on(own, local)),
            frozenset({there} if theirs is None else theirs.hosts),
        ),
        flaps=0 if link is None else link.flaps_of(key),
    )


def _hosts_on(own: LocalAddress, local: Sequence[LocalAddress]) -> Iterator[str]:
    return (other.host for other in local if other.interface == own.interface)


def _interface_with(interfaces: Iterable[PeerInterface], host: str) -> PeerInterface | None:
    return next((theirs for theirs in interfaces if host in theirs.hosts), None)


def is_at(address: Address, own: LocalAddress) -> bool:
    """Return True if a connection's local address is this one."""
    host, _, scope = address.host.partition("%")
    return host == own.host and scope in {"", own.interface}


def bare_host(address: Address) -> str:
    """Return the host without the scope, which differs at the two ends."""
    return address.host.partition("%")[0]


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def why_full(links: Collection[Link], new: Path) -> PeerUnreachable | None:
    """Return why no link with one more peer may begin; None if one may."""
    host = new.remote_address.host
    here = sum(link.begun_from == host for link in links)
    if len(links) < MAX_LINKS and here < MAX_LINKS_PER_ADDRESS:
        return None
    text = f"{new} gets no link: {len(links)} exist already, {here} from {host}"
    return PeerUnreachable(text)


def begins_at(gone: Sequence[LocalAddress], live: LivePath) -> bool:
    return any(is_at(live.path.local_address, own) for own in gone)


def hosts_of(hello: Hello) -> set[str]:
    return {host for interface in hello.interfaces for host in interface.hosts}


def copied_from(one: Hello, other: Hello, path: Path) -> NodeKeyCopied:
    where = ", ".join(str(address) for address in one.addresses[:1]) or "unknown address"
    return NodeKeyCopied(
        f"{one.name} ({where}) and {other.name} ({path.remote_address}) have the same node "
        f"key ({short_node(path.node)}): a home was copied; on one of them run 'pmesh down', "
        "remove node_key from its home, and run 'pmesh up'"
    )
