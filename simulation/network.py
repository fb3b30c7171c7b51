"""A seeded network on simulated time: it delays, loses, repeats, cuts and closes.

Time is callbacks in the order in which they are due; nothing ever waits.

Hosts are numbered. A pair has at most one connection, with named channels that are first in,
first out, as TCP streams are. A cut delays what is under way, as TCP does; a closed connection
may lose it. Single messages are lost and repeated on the channels named so, although TCP does
neither: what an agent says on a link must bear it. A third host may forward what two others say to
each other, until their own way is mended.

On a slow network each way between two hosts has a delay of its own, which changes every minute,
and a lost segment delays all that follows it on its channel until it has been sent again.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Generic, Protocol, TypeVar, TypeVarTuple

_Arguments = TypeVarTuple("_Arguments")


class Timeline:
    """A clock that jumps from one callback to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start."""
        self._count = 0
        self._due: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []

    def after(
        self, delay_s: float, callback: Callable[[*_Arguments], None], *arguments: *_Arguments
    ) -> None:
        """Call back in `delay_s` seconds; what is due together runs in the order of the calls."""
        self.at(self.now + delay_s, callback, *arguments)

    def at(
        self, due: float, callback: Callable[[*_Arguments], None], *arguments: *_Arguments
    ) -> None:
        """Call back when `now` is exactly `due`."""
        self._count += 1  # breaks ties, so that the same seed gives the same history
        heappush(self._due, (due, self._count, callback, arguments))

    def run_until(self, end: float) -> None:
        """Run everything that is due before `end`, and then be there."""
        due = self._due
        while due and due[0][0] < end:
            self.now, _, callback, arguments = heappop(due)
            callback(*arguments)
        self.now = end


_Message = TypeVar("_Message")

HANDSHAKE_TIMEOUT_S = 1.0
"""After this long a dial that nobody answers has failed."""

DELAYS_LAST_S = 60.0
"""How long the delay of a way stays the same."""

LEAST_RETRANSMISSION_S = 0.2
"""What a sender adds to the round trip before it sends a segment again, as Linux does."""


class Host(Protocol[_Message]):
    """What lives at a number of the network."""

    @property
    def greeting(self) -> _Message:
        """What the other end of a new connection gets: the Hello."""
        ...

    def connected(self, peer: int, greeting: _Message) -> None:
        """A connection is up; an earlier one with this peer is gone."""
        ...

    def unreachable(self, peer: int) -> None:
        """A dial has failed."""
        ...

    def received(self, peer: int, channel: str, message: _Message) -> None:
        """A message has arrived."""
        ...

    def disconnected(self, peer: int) -> None:
        """The other side has closed the connection."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How well the network does."""

    latency_s: float = 0.02
    """At most this long a message is under way, as a rule."""
    late_chance: float = 0.0
    late_s: float = 0.3
    """Such a message takes up to this much longer."""
    loss: float = 0.0
    """The share of messages that are lost, on the channels in `lossy`."""
    repeats: float = 0.0
    """The share of messages that arrive twice, on the channels in `lossy`."""
    orderly: float = 0.5
    """The share of closed connections whose other side still reads what was under way."""
    lossy: Collection[str] = ("link",)
    slowest_s: float = 0.0
    """The delay of each way is drawn anew every minute, between 0 and this."""
    segment_loss: float = 0.0
    """The share of segments that are lost and sent again, on all channels: TCP keeps the order."""

    @property
    def calm(self) -> "Conditions":
        """What is left of them once all faults are over: delays and lost segments are no faults."""
        return Conditions(
            latency_s=self.latency_s, slowest_s=self.slowest_s, segment_loss=self.segment_loss
        )


class _Stream(Generic[_Message]):
    def __init__(self) -> None:
        self.queue: deque[tuple[float, _Message]] = deque()
        self.last_due = 0.0


class _SimulatedConnection(Generic[_Message]):
    def __init__(self, *ends: int, via: int | None = None) -> None:
        self.via = via
        """The host that forwards between the two ends; None if it is direct."""
        self.ends = set(ends)
        """The hosts that know of it, and may send on it: one that is frozen does so later."""
        self.streams: dict[tuple[int, str], _Stream[_Message]] = {}


class Network(Generic[_Message]):
    """Connections of numbered hosts under a seed; all faults are methods."""

    def __init__(self, timeline: Timeline, random: Random, conditions: Conditions) -> None:
        self.conditions = conditions
        self.delivered = 0
        self.swallow: Callable[[int, int, str, _Message], bool] | None = None
        """Whether a message from one to the other, on a channel, is lost: to aim at one."""
        self._timeline = timeline
        self._random = random
        self._hosts: dict[int, Host[_Message]] = {}
        self._connections: dict[tuple[int, int], _SimulatedConnection[_Message]] = {}
        self._latest: dict[tuple[int, int], _SimulatedConnection[_Message]] = {}
        """The last connection of each pair, which may be closed."""
        self._cuts: set[tuple[int, int]] = set()
        self._frozen: dict[int, list[Callable[[], None]]] = {}
        self._ways: dict[tuple[int, int], tuple[float, float]] = {}
        """Until when the delay of a way between 0 and 1 lasts, as a share of the slowest."""

    def attach(self, number: int, host: Host[_Message]) -> None:
        """A host starts; it is connected with itself only."""
        self._hosts[number] = host
        self._connections[number, number] = _SimulatedConnection[_Message](number)

    def detach(self, number: int) -> None:
        """A host stops: the system closes its connections."""
        for pair in [pair for pair in self._connections if number in pair]:
            self.close(number, pair[0] + pair[1] - number)
        del self._hosts[number]
        self._frozen.pop(number, None)

    def dial(self, number: int, peer: int) -> None:
        """Connect; the dialling host learns of failure, both of success."""
        delay = self._delay(number, peer)
        self._timeline.after(delay, self._answer, number, peer, self._hosts[number], None)

    def reaches(self, number: int, peer: int) -> bool:
        """Whether the two are connected directly, and nothing is in the way."""
        connection = self._connections.get(_pair(number, peer))
        cut = {(number, peer), (peer, number)} & self._cuts
        return connection is not None and connection.via is None and not cut

    def relay(self, number: int, peer: int, via: int) -> None:
        """Let a third host forward: their connection goes on over it, or a new one comes up.

        Nothing happens where their own way is merely slow: a link prefers it.
        """
        if not {(number, peer), (peer, number)} & self._cuts:
            return
        connection = self._connections.get(_pair(number, peer))
        if connection is None:
            delay = self._travel_s(number, peer, via)
            self._timeline.after(delay, self._answer, number, peer, self._hosts[number], via)
        else:
            connection.via = via
            self._go_on(connection, number, peer)
            self._go_on(connection, peer, number)

    def close(self, number: int, peer: int) -> None:
        """Close the connection: the peer reads its end, and now and then the rest before it."""
        connection = self._connections.pop(_pair(number, peer), None)
        if connection is None:
            return
        if connection.via is None:
            self._end_relayed(number, peer)
        if self._is_held_up(number, peer, connection.via):
            return
        rest: list[tuple[str, _Message]] = []
        if self._random.random() < self.conditions.orderly:
            for (to, channel), stream in connection.streams.items():
                if to == peer:
                    rest += [(channel, message) for _, message in stream.queue]
        host = self._hosts.get(peer)
        delay = self._travel_s(number, peer, connection.via)
        self._timeline.after(delay, self._end, connection, number, peer, host, rest)

    def _end_relayed(self, number: int, peer: int) -> None:
        """Close what either of two hosts, no longer connected, forwards to the other."""
        for pair, connection in list(self._connections.items()):
            if connection.via in {number, peer} and {number, peer} - {connection.via} <= {*pair}:
                del self._connections[pair]
                for end, far in (pair, pair[::-1]):
                    host = self._hosts.get(end)
                    nothing = list[tuple[str, _Message]]()
                    self._timeline.after(0.0, self._end, connection, far, end, host, nothing)

    def send(self, number: int, peer: int, channel: str, message: _Message) -> None:
        """Send a message; without a connection it goes nowhere, as into a dead socket."""
        connection = self._connections.get(_pair(number, peer))
        if connection is None or number not in connection.ends:
            return
        if self.swallow is not None and self.swallow(number, peer, channel, message):
            return
        copies = 1
        if channel in self.conditions.lossy and number != peer:
            draw = self._random.random()
            copies += (draw < self.conditions.repeats) - (draw > 1 - self.conditions.loss)
        stream = connection.streams.setdefault((peer, channel), _Stream[_Message]())
        for _ in range(copies):
            delay = self._travel_s(number, peer, connection.via)
            stream.last_due = max(stream.last_due, self._timeline.now + delay)
            stream.queue.append((stream.last_due, message))
            self._timeline.at(stream.last_due, self._pump, connection, number, peer, channel)

    def cut(self, number: int, peer: int) -> None:
        """From now on nothing gets from the one to the other; the reverse does."""
        self._cuts.add((number, peer))

    def partition(self, side: Collection[int], others: Collection[int]) -> None:
        """Cut both ways between two groups of hosts."""
        for a in side:
            for b in others:
                self._cuts |= {(a, b), (b, a)}

    def mend(self, number: int, peer: int) -> None:
        """End a cut; what it held up goes on its way."""
        self._cuts.discard((number, peer))
        connection = self._connections.get(_pair(number, peer))
        if connection is not None:
            if (peer, number) not in self._cuts:
                connection.via = None
            self._go_on(connection, number, peer)
        self._go_on_over(number)
        self._go_on_over(peer)

    def _go_on_over(self, via: int) -> None:
        for pair, connection in list(self._connections.items()):
            if connection.via == via:
                self._go_on(connection, *pair)
                self._go_on(connection, *pair[::-1])

    def _go_on(self, connection: _SimulatedConnection[_Message], number: int, peer: int) -> None:
        for to, channel in connection.streams:
            if to == peer:
                delay = self._travel_s(number, peer, connection.via)
                self._timeline.after(delay, self._pump, connection, number, peer, channel)

    def heal(self) -> None:
        """End all cuts."""
        for number, peer in sorted(self._cuts):
            self.mend(number, peer)

    def freeze(self, number: int) -> None:
        """The host's process stands still, as in a sleep: what arrives is kept for it."""
        self._frozen.setdefault(number, [])

    def is_frozen(self, number: int) -> bool:
        """Whether the host's process stands still."""
        return number in self._frozen

    def thaw(self, number: int, first: Callable[[], None] | None = None) -> None:
        """The host's process goes on: with what it does `first`, then with all that has arrived."""
        arrived = self._frozen.pop(number, [])
        if first is not None:
            first()
        for event in arrived:
            if number in self._hosts:
                event()
        self._go_on_over(number)

    def _is_held_up(self, number: int, peer: int, via: int | None) -> bool:
        if via is None:
            return (number, peer) in self._cuts
        return via in self._frozen or bool({(number, via), (via, peer)} & self._cuts)

    def _travel_s(self, number: int, peer: int, via: int | None) -> float:
        if via is None:
            return self._delay(number, peer)
        return self._delay(number, via) + self._delay(via, peer)

    def _delay(self, number: int, peer: int) -> float:
        conditions = self.conditions
        delay = self._random.random() * conditions.latency_s
        if self._random.random() < conditions.late_chance:
            delay += self._random.random() * conditions.late_s
        if conditions.slowest_s and number != peer:
            delay += self._way_s(number, peer)
            timeout_s = (
                LEAST_RETRANSMISSION_S + self._way_s(number, peer) + self._way_s(peer, number)
            )
            while self._random.random() < conditions.segment_loss:
                delay += timeout_s  # what follows on the stream shows each loss (RACK, RFC 8985)
        return delay

    def _way_s(self, number: int, peer: int) -> float:
        until, share = self._ways.get((number, peer), (0.0, 0.0))
        if self._timeline.now >= until:
            # Not all at once: the first ones last for less.
            lasts_s = DELAYS_LAST_S if until else self._random.random() * DELAYS_LAST_S
            until, share = self._timeline.now + lasts_s, self._random.random()
            self._ways[number, peer] = until, share
        return share * self.conditions.slowest_s

    def _pump(
        self, connection: _SimulatedConnection[_Message], number: int, peer: int, channel: str
    ) -> None:
        queue = connection.streams[peer, channel].queue
        while (
            queue
            and queue[0][0] <= self._timeline.now
            and self._connections.get(_pair(number, peer)) is connection
            and not self._is_held_up(number, peer, connection.via)
        ):
            _, message = queue.popleft()
            self.delivered += 1
            self._hand(peer, self._hosts[peer].received, number, channel, message)

    def _answer(self, number: int, peer: int, dialler: Host[_Message], via: int | None) -> None:
        if self._hosts.get(number) is not dialler or _pair(number, peer) in self._connections:
            return
        host = self._hosts.get(peer)
        forwards = via is None or (self.reaches(number, via) and self.reaches(via, peer))
        if host is None or not forwards:  # refused
            self._hand(number, dialler.unreachable, peer)
        elif (
            self._is_held_up(number, peer, via)
            or self._is_held_up(peer, number, via)
            or peer in self._frozen
        ):
            self._timeline.after(HANDSHAKE_TIMEOUT_S, self._time_out, number, peer, dialler)
        else:
            connection = _SimulatedConnection[_Message](via=via)
            self._connections[_pair(number, peer)] = self._latest[_pair(number, peer)] = connection
            self._hand(number, self._begin, connection, number, dialler, peer, host.greeting)
            self._hand(peer, self._begin, connection, peer, host, number, dialler.greeting)

    def _begin(
        self,
        connection: _SimulatedConnection[_Message],
        number: int,
        host: Host[_Message],
        peer: int,
        greeting: _Message,
    ) -> None:
        connection.ends.add(number)
        host.connected(peer, greeting)

    def _time_out(self, number: int, peer: int, dialler: Host[_Message]) -> None:
        if self._hosts.get(number) is dialler and _pair(number, peer) not in self._connections:
            self._hand(number, dialler.unreachable, peer)

    def _end(
        self,
        connection: _SimulatedConnection[_Message],
        number: int,
        peer: int,
        host: Host[_Message] | None,
        rest: list[tuple[str, _Message]],
    ) -> None:
        if host is None or self._latest.get(_pair(number, peer)) is not connection:
            return
        for channel, message in rest:
            if self._hosts.get(peer) is host:  # what it read may have ended it
                self._hand(peer, host.received, number, channel, message)
        if self._hosts.get(peer) is host:
            self._hand(peer, host.disconnected, number)

    def _hand(
        self, number: int, method: Callable[[*_Arguments], None], *arguments: *_Arguments
    ) -> None:
        if number in self._frozen:
            self._frozen[number].append(lambda: method(*arguments))
        else:
            method(*arguments)


def _pair(number: int, peer: int) -> tuple[int, int]:
    return (number, peer) if number < peer else (peer, number)
