"""Which of the paths of a link is used, when one has failed, and which others to dial.

A path is one way between two agents: an interface here, one there, and a connection between them.
Each side chooses for itself over which it sends.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, log2
from typing import Final, NamedTuple

from pmesh.core.links.addresses import LocalAddress
from pmesh.core.links.health import Health
from pmesh.core.wire.link import Address, PeerInterface

MAX_PATHS: Final = 8
"""Of one link: two machines on a cable, on Wi-Fi and on Thunderbolt have five that differ."""
ASK_AFTER_S: Final = 0.1
"""A path in use that has brought nothing for so long is asked whether it lives."""
IDLE_ASK_AFTER_S: Final = 1.0
"""The same for one that is not in use."""
STEADY_S: Final = 1.0
"""A path is used before another only if it has lasted for so long, longer after flaps."""
FREE_FLAPS: Final = 1
"""So many flaps change nothing: anybody may pull a cable. Each more doubles the time."""
LONGEST_STEADY_S: Final = 60.0
FORGET_S: Final = 60.0
"""A flap is forgotten for each such time without another."""
MUCH: Final = 4
"""How many times as long a round trip must be to count as worse: noise is less."""
FAST_S: Final = 0.01
"""Shorter round trips are alike: on a busy machine those of one cable differ by that much."""
SLOW: Final = 4
"""A path that was measured to carry so many times less than it claims may be outdone."""
OUTDONE: Final = 2
"""Another path must carry so many times more for that, if the slow one is in use."""
LEAST_SHARE: Final = 0.05
"""A path with less of the bandwidth of the best one is not worth a connection of each lane."""
REDIAL_S: Final = 1.0
"""Before a way that could not be dialled is tried again; twice as long each time."""
LONGEST_REDIAL_S: Final = 60.0
LONGEST_RELAYED_S: Final = 5.0
"""The longest pause while no direct path is left."""
SECOND_S: Final = 2.0
"""The larger node dials a way so much later: it is for a way that only one side can dial."""

RELAYED: Final = "relayed"
"""The kind of a path whose bytes another member forwards."""

_KINDS: Final = ("loopback", "thunderbolt", "wired", "", "wifi", "vpn")
"""The best first; "" is an interface that neither side knows, as behind a router."""


def kind_rank(kind: str) -> int:
    """Return the place of a kind of path, the best first; one of a later version is next to last.

    The last is a relayed one.
    """
    if kind == RELAYED:
        return len(_KINDS) + 1
    return _KINDS.index(kind) if kind in _KINDS else len(_KINDS)


class PathKey(NamedTuple):
    """What distinguishes the paths of one link."""

    interface: str
    """Ours; "" if the connection's local address is not one that we know."""
    remote: str
    """The peer's interface, or its address where the peer does not name one with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathState:
    """What is known of a path. Times are seconds of this machine's monotonic clock."""

    key: PathKey
    kind: str
    """The worse of the kinds of its two interfaces."""
    speed_mbit_s: int
    """The lower of what the two interfaces claim; 0 if one does not say."""
    since: float
    flaps: int = 0
    """As `PathFlaps.left` said when it came up."""
    measured_mbit_s: int = 0
    """What it carries in the slower direction, settled; 0 while unknown."""
    is_outdone: bool = False
    """See `compared`."""
    health: Health
    last_heard: float
    asked_at: float | None = None
    """When it was first asked for a sign of life since it has given one."""

    @property
    def steady_at(self) -> float:
        """When it may replace another that works."""
        doubled = min(max(0, self.flaps - FREE_FLAPS), 20)
        return self.since + min(STEADY_S * 2.0**doubled, LONGEST_STEADY_S)

    @property
    def rank(self) -> tuple[bool, int, float]:
        """Sort key, the best first: those not outdone, the kind, and the speed in octaves."""
        octaves = -round(log2(self.speed_mbit_s)) if self.speed_mbit_s else inf
        return self.is_outdone, kind_rank(self.kind), octaves

    @property
    def brings_mbit_s(self) -> int:
        """What it was measured to carry, or else what it claims; 0 while both are unknown."""
        return self.measured_mbit_s or self.speed_mbit_s

    @property
    def is_slow(self) -> bool:
        """True if it was measured to carry far less than its interfaces claim."""
        return 0 < SLOW * self.measured_mbit_s <= self.speed_mbit_s

    @property
    def round_trip_s(self) -> float:
        """The least, since a path that carries tensors has a queue."""
        return max(self.health.least_round_trip_s, FAST_S)

    def is_better_than(self, other: "PathState") -> bool:
        """Return True by rank, or of those of one rank by much the shorter round trip."""
        if self.rank == other.rank:
            return MUCH * self.round_trip_s <= other.round_trip_s
        return self.rank < other.rank

    def silence_s(self, now: float) -> float:
        """Return for how long it has not answered; 0 if it owes no answer."""
        return 0.0 if self.asked_at is None else now - self.asked_at


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFlaps:
    """How often a path was lost lately.

    As in route flap damping (RFC 2439), flaps are forgotten with time, whether the path is up or
    not, and the first has no effect: for each cable that flaps many are plugged in twice. But only
    the loss of a path that had been steady counts. That of another one disturbs nobody, since
    nothing runs over it, so a cable that comes and goes every second is used 1 s after it stays.
    """

    count: int = 0
    last: float = -inf

    def left(self, now: float) -> int:
        """Return how many are not forgotten."""
        return 0 if self.count == 0 else max(0, self.count - int((now - self.last) / FORGET_S))


def lost(path: PathState, before: PathFlaps, *, now: float) -> PathFlaps:
    """Count the loss of a path, if it is a flap.

    Args:
        path: As it was.
        before: Of the paths between the same interfaces.
        now: The monotonic clock.
    """
    return before if now < path.steady_at else PathFlaps(count=before.left(now) + 1, last=now)


def to_ask(path: PathState, *, in_use: bool, doubted: bool, now: float) -> bool:
    """Return True if the path shall show whether it lives.

    Args:
        path: Which has not been asked since it was last heard.
        in_use: It carries messages or tensors.
        doubted: Another path of the link owes an answer.
        now: The monotonic clock.
    """
    after_s = ASK_AFTER_S if in_use else IDLE_ASK_AFTER_S
    return path.asked_at is None and (doubted or now - path.last_heard >= after_s)


def failed(paths: Sequence[PathState], *, now: float) -> Iterator[PathKey]:
    """Yield the paths that are silent, but another one was heard since they were asked.

    If none answers, the peer itself is silent, which is for the failure detection to judge.
    """
    for path in paths:
        limits, asked_at = path.health.thresholds, path.asked_at
        limit_s = path.health.patience * limits.degraded_after_s + path.health.timeout_s
        if asked_at is None or path.silence_s(now) < limit_s:
            continue
        if any(other.last_heard > asked_at for other in paths):
            yield path.key


def compared(paths: Iterable[PathState], current: PathKey | None) -> tuple[PathState, ...]:
    """Return the paths, each with `is_outdone`: it is slow, and another carries more.

    A cable of 1 Gbit/s may carry 100 Mbit/s, as there is a slow switch between. Only measured
    values decide, which are settled: one that differs by less than 30 %, or for less than 10 s,
    moves nothing. The current path is left for one that carries twice as much, and is not taken
    again before it carries as much itself.
    """
    known = tuple(paths)
    most = max((path.measured_mbit_s for path in known), default=0)

    def judged(path: PathState) -> PathState:
        times = most / path.measured_mbit_s if path.is_slow else 0
        outdone = times >= OUTDONE if path.key == current else times > 1
        # Few change, and each heartbeat compares all: a copy takes as long as the comparison.
        return path if path.is_outdone == outdone else replace(path, is_outdone=outdone)

    return tuple(map(judged, known))


def choose(paths: Sequence[PathState], current: PathKey | None, *, now: float) -> PathKey | None:
    """Return the path to send messages over; None if there is none.

    The current one stays until it is lost, or a better one has been steady for a while.
    """
    ranked = sorted(paths, key=lambda path: (path.rank, path.key))
    here = next((path for path in paths if path.key == current), None)
    if here is None:
        return ranked[0].key if ranked else None
    better = (path for path in ranked if path.is_better_than(here) and _may_replace(path, now))
    return next((path.key for path in better), here.key)


def _may_replace(path: PathState, now: float) -> bool:
    return path.asked_at is None and now >= path.steady_at


def carriers(
    paths: Sequence[PathState], current: PathKey | None, *, now: float
) -> tuple[PathKey, ...]:
    """Return the paths for tensors, the best first: the current one, and those that are steady."""
    usable = [path for path in paths if path.key == current or _may_replace(path, now)]
    return tuple(path.key for path in sorted(usable, key=lambda path: (path.rank, path.key)))


def spread(
    paths: Sequence[PathState], current: PathKey | None, *, now: float
) -> tuple[PathKey, ...]:
    """Return the paths over which a lane goes at once, the best first; one if that is as fast.

    Two that end at one interface share what it carries, so only the better one counts.
    """
    chosen: list[PathState] = []
    for path in sorted(paths, key=lambda path: (path.rank, path.key)):
        is_heard = path.silence_s(now) < path.health.thresholds.degraded_after_s
        is_usable = path.key == current or (is_heard and now >= path.steady_at)
        if is_usable and (not chosen or _brings_more(path, chosen)):
            chosen.append(path)
    return tuple(path.key for path in chosen)


def _brings_more(path: PathState, chosen: Sequence[PathState]) -> bool:
    ours, theirs = path.key
    if any(ours == other.key.interface or theirs == other.key.remote for other in chosen):
        return False
    return path.brings_mbit_s >= LEAST_SHARE * chosen[0].brings_mbit_s > 0


# --- the ways that are not yet paths


class Way(NamedTuple):
    """Where a path may be dialled."""

    key: PathKey
    own: LocalAddress
    address: Address


def ways_to(
    interfaces: Iterable[PeerInterface], *, port: int, local: Sequence[LocalAddress]
) -> tuple[Way, ...]:
    """Return how a peer's interfaces can be reached directly: one way for each pair of interfaces.

    Args:
        interfaces: Of the peer, as it says.
        port: Where it listens.
        local: This machine's addresses.
    """
    ways: dict[PathKey, Way] = {}
    for theirs in interfaces:
        for host in theirs.hosts:
            for own in local:
                key = PathKey(own.interface, theirs.name)
                if key not in ways and own.kind != "loopback" and own.reaches(host):
                    scoped = f"{host}%{own.interface}" if own.is_link_local_v6 else host
                    ways[key] = Way(key, own, Address(scoped, port))
    return tuple(ways.values())[:MAX_PATHS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """How often a way has failed, or its path was lost soon, and when to try again."""

    count: int = 0
    due: float = -inf


def tried_again(attempts: Attempts, *, now: float, longest_s: float = LONGEST_REDIAL_S) -> Attempts:
    """Handle that a way is tried: the next time is after a pause, each twice as long."""
    return Attempts(count=attempts.count + 1, due=now + _pause_s(attempts.count, longest_s))


def lost_after(attempts: Attempts, *, lasted_s: float) -> Attempts:
    """Handle the loss of a path: one that has lasted for longer than the last pause begins anew."""
    return Attempts() if lasted_s >= _pause_s(attempts.count - 1, LONGEST_REDIAL_S) else attempts


def _pause_s(count: int, longest_s: float) -> float:
    return min(REDIAL_S * 2.0 ** min(count, 20), longest_s)
