"""The link with one peer: its messages, and the paths over which they go."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from pmesh.core.links import health, paths
from pmesh.core.links.addresses import LocalAddress
from pmesh.core.links.delivery import Delivery, Packet
from pmesh.core.links.health import WIFI, WIRED, Health, Thresholds
from pmesh.core.links.paths import PathKey, PathState
from pmesh.core.wire.link import (
    Address,
    Hello,
    LinkMessage,
    PathMessage,
    PeerInterface,
    Ping,
    Pong,
    encode,
)
from pmesh.errors import PeerUnreachable
from pmesh.ids import Incarnation, Member, NodeId
from pmesh.net.links.path import MAX_QUEUED_BYTES, MAX_QUEUED_MESSAGES, Path

MAX_INTRODUCED = 64  # members that one peer has named: as many as a view has


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
    dialled: Address | None
    """Where we dialled it; None if the peer dialled us."""
    again: bool
    """True if it was dialled immediately after the link's last path had ended (V6)."""
    flaps: int
    relay: Member | None = None
    """The member that forwards its bytes; None if it is direct."""
    since: float = field(default_factory=trio.current_time)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    last_heard: float = field(default_factory=trio.current_time)
    asked_at: float | None = None
    health: Health = field(init=False)

    def __post_init__(self) -> None:
        self.health = health.begin(self.thresholds, now=self.since)

    def __str__(self) -> str:
        """Return how a user knows it: the interface, its kind, and where it leads."""
        if self.relay is not None:
            return f"{self.key.interface} (relayed)"
        kind = f" ({self.kind})" if self.kind else ""
        return f"{self.key.interface or self.path.local_address.host}{kind} to {self.key.remote}"

    @property
    def door(self) -> Address:
        """Where the peer accepts connections, if the path is direct."""
        if self.dialled is not None or not self.path.peer.addresses:
            return self.dialled or self.path.remote_address
        return Address(self.path.remote_address.host, self.path.peer.addresses[0].port)

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
            health=self.health,
            last_heard=self.last_heard,
            asked_at=self.asked_at,
        )

    def ask(self) -> None:
        """Ask for a sign of life."""
        now = trio.current_time()
        self.path.send(Ping(_microseconds(now)))
        if self.asked_at is None:
            self.asked_at = now

    def hear(self, message: PathMessage) -> bool:
        """Note a sign of life; return True if the message is the path's own matter."""
        now = self.last_heard = trio.current_time()
        self.asked_at = None
        match message:
            case Ping(sent_us):
                self.path.send(Pong(sent_us))
            case Pong(sent_us):
                round_trip_s = health.measure_round_trip_s(
                    now_us=_microseconds(now), echo_us=sent_us, held_us=0
                )
                self.health = health.heard_from(
                    self.health, now=now, round_trip_s=round_trip_s
                ).health
            case _:
                return False
        return True

    def judge(self) -> None:
        """Weigh its present silence, for V12."""
        if self.asked_at is None:
            self.health = health.heard_from(self.health, now=self.last_heard).health
        else:
            self.health = health.pass_time(self.health, now=trio.current_time()).health


class Link:
    """The control messages exchanged with one peer: in order, and each once.

    It lasts as long as one of its paths, and the time that V6 gives for dialling another.
    """

    def __init__(self, first: LivePath) -> None:
        self.peer: Hello = first.path.peer
        self.numbers = numbers_of(first.path)
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
        self._flaps: dict[PathKey, int] = {}
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

    def send(self, message: LinkMessage) -> None:
        """Send a message; never waits. It is kept until the peer has acknowledged it."""
        packet = self._delivery.send(encode(message))
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
        self._flaps.setdefault(live.key, 0)
        if self._current is replaced:
            self._use(live)
        self._tell()
        return replaced

    def remove(self, live: LivePath) -> bool:
        """Forget a path that has ended; return True if messages now go over another one."""
        if self.paths.get(live.key) is not live:
            return False  # another has replaced it
        del self.paths[live.key]
        lasted_s = trio.current_time() - live.since
        self._flaps[live.key] = 0 if lasted_s > paths.LONGEST_STEADY_S else live.flaps + 1
        self._tell()
        if self._current is not live:
            return False
        self._current = None
        return self.choose()

    def flaps_of(self, key: PathKey) -> int:
        return self._flaps.get(key, 0)

    def choose(self) -> bool:
        """Take the best path for messages; return True if that is another than before."""
        key = paths.choose(
            [live.state() for live in self.paths.values()],
            None if self._current is None else self._current.key,
            now=trio.current_time(),
        )
        if key is None or (self._current is not None and self._current.key == key):
            return False
        self._use(self.paths[key])
        return True

    def carriers(self) -> tuple[LivePath, ...]:
        """Return the paths for tensors, the best first: only direct ones."""
        keys = paths.carriers(
            [live.state() for live in self.paths.values()],
            None if self._current is None else self._current.key,
            now=trio.current_time(),
        )
        return tuple(live for key in keys if (live := self.paths[key]).relay is None)

    def introduce(self, member: Member) -> None:
        """Note a member that the peer has named."""
        self.introduced[member.incarnation] = member
        if len(self.introduced) > MAX_INTRODUCED:
            del self.introduced[next(iter(self.introduced))]

    def update(self, hello: Hello) -> None:
        """Take what the peer says anew about itself: its interfaces have changed."""
        self.peer = hello
        self._tell()

    def _use(self, live: LivePath) -> None:
        self._current = live
        for packet in self._delivery.packets_again():
            live.path.send_packet(packet)

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


def live_path(
    path: Path,
    local: Sequence[LocalAddress],
    *,
    dialled: Address | None,
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
            again=False,
            flaps=0 if link is None else link.flaps_of(key),
            relay=relay.member,
        )
    here, there = path.local_address, bare_host(path.remote_address)
    own = next((own for own in local if is_at(here, own)), None)
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
        again=again,
        flaps=0 if link is None else link.flaps_of(key),
    )


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
