"""The links of one simulated agent: with whom it is connected, and when it last heard of them."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import msgspec

from pmesh.core.links import health
from pmesh.core.links.health import WIRED, Condition, Health
from pmesh.core.wire.link import Hello
from pmesh.core.wire.views import Heartbeat
from pmesh.ids import Member
from simulation.lane_messages import LaneMessage
from simulation.network import Network
from simulation.wire import AnyMessage

REDIAL_S = 1.0
"""How often a peer that is gone is dialled."""

RELAY_AFTER_S = 2.0
"""V5: How long a peer is missing before another one forwards to it."""

Message = Hello | AnyMessage | LaneMessage
"""What simulated agents send each other; values that nobody changes, so they travel as they are."""


@dataclass(slots=True)
class SimulatedLink:
    """An authenticated connection."""

    member: Member
    health: Health
    heard_at: float
    """When its last heartbeat came."""
    sent_us: int = 0
    """The peer's clock in the last heartbeat that came from it."""


class Links:
    """By the number of the other host."""

    def __init__(self, network: Network[Message], number: int) -> None:
        self._network = network
        self._number = number
        self.up: dict[int, SimulatedLink] = {}
        self._before: dict[int, SimulatedLink] = {}
        """The last links with those that are gone."""
        self._dialled_at: dict[int, float] = {}
        self._missing_since: dict[int, float] = {}

    def add(self, peer: int, member: Member, now: float) -> None:
        """A connection is up, and the Hello has come."""
        before = self._before.pop(peer, None)
        known = before.health if before is not None and before.member == member else None
        self.up[peer] = SimulatedLink(
            member, health.begin(health.WIRED, now=now, before=known), now
        )

    def get(self, peer: int) -> SimulatedLink | None:
        """The link with a host, if there is one."""
        return self.up.get(peer)

    def remove(self, peer: int) -> SimulatedLink | None:
        """The link with a host is over; there may have been none."""
        link = self.up.pop(peer, None)
        if link is not None:
            self._before[peer] = link
        return link

    def forgive(self, stalled_s: float, now: float) -> None:
        """V8: for so long we have not listened, so nobody was silent."""
        for link in self.up.values():
            link.health = health.forgive_stall(link.health, stalled_s=stalled_s, now=now)

    def silent(self) -> list[Member]:
        """The peers that have been silent for long."""
        links = self.up.values()
        return [link.member for link in links if link.health.condition is Condition.SUSPECT]

    @property
    def timeout_s(self) -> float:
        """The longest retransmission timeout among the links."""
        return max((link.health.timeout_s for link in self.up.values()), default=0.0)

    def gone_after_s(self, members: Collection[Member]) -> float:
        """How long the slowest of these peers may be silent."""
        known = [link.health for link in self.up.values() if link.member in members]
        return max((health.gone_after_s for health in known), default=WIRED.gone_after_s)

    def close_silent(self, now: float, vouched: Callable[[Member], bool]) -> list[SimulatedLink]:
        """Judge the silence of all peers, and close the links of those that are gone."""
        deaf = len(self.silent()) == len(self.up) > 1
        gone = list[SimulatedLink]()
        for peer, link in list(self.up.items()):
            step = health.pass_time(link.health, now=now, vouched=vouched(link.member), deaf=deaf)
            link.health = step.health
            if step.health.condition is Condition.GONE:
                self._network.close(self._number, peer)
                self.remove(peer)
                gone.append(link)
        return gone

    def dial(self, peer: int, now: float) -> None:
        """Try to connect."""
        self._dialled_at[peer] = now
        self._network.dial(self._number, peer)

    def dial_missing(self, peers: Iterable[int], now: float) -> None:
        """Try again to connect with those whom we have no link with."""
        for peer in peers:
            if peer not in self.up and now - self._dialled_at.get(peer, -9.0) > REDIAL_S:
                self.dial(peer, now)

    def relay_missing(self, peers: Iterable[int], now: float) -> None:
        """V5: Let others forward to those whom we can't reach; of two the smaller one does so."""
        for peer in peers:
            link = self.up.get(peer)
            if link is None:
                since = self._missing_since.setdefault(peer, now)
                due = now - since > RELAY_AFTER_S
            else:
                self._missing_since.pop(peer, None)
                due = link.health.condition is Condition.SUSPECT
            via = self._relay_to(peer) if due and peer > self._number else None
            if via is not None:
                self._network.relay(self._number, peer, via)

    def _relay_to(self, peer: int) -> int | None:
        """A peer that we hear, and that reaches another one."""
        heard = (
            other
            for other, link in self.up.items()
            if other != peer and link.health.condition is not Condition.SUSPECT
        )
        network = self._network
        return next(
            (
                via
                for via in heard
                if network.reaches(self._number, via) and network.reaches(via, peer)
            ),
            None,
        )

    def send_control(self, to: Member, message: AnyMessage) -> None:
        """Send a control message to a member, if there is a link."""
        self.send(to, "link", message)

    def beat(self, beat: Heartbeat, now: float) -> None:
        """Send a heartbeat on all links, with the echo of what has come on each."""
        now_us = round(now * 1e6)
        for peer, link in self.up.items():
            held_us = round((now - link.heard_at) * 1e6)
            message = msgspec.structs.replace(
                beat, sent_us=now_us, echo_us=link.sent_us, held_us=held_us
            )
            self._network.send(self._number, peer, "link", message)

    def send(self, to: Member, channel: str, message: Message) -> None:
        """Send a message on a channel to a member, if there is a link."""
        for peer, link in self.up.items():
            if link.member == to:
                self._network.send(self._number, peer, channel, message)


def says_the_same(beat: Heartbeat, other: Heartbeat) -> bool:
    """Whether both say the same of what others act on: all but clocks and progress."""
    return (
        beat.view == other.view
        and beat.promised == other.promised
        and beat.flushed == other.flushed
        and beat.acting == other.acting
        and beat.needs_epoch == other.needs_epoch
        and beat.heard == other.heard
        and beat.waiting == other.waiting
        and beat.view_requests == other.view_requests
        and beat.in_force == other.in_force
        and beat.silent == other.silent
    )
