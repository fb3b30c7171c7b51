"""Measures the bandwidth from each peer to this agent: from the data of lanes, or by short probes.

A probe is asked for by its receiver, where nothing else has been measured lately, and only between
machines that train together: an idle mesh stays idle. It is some messages on the link. The time
from the question to the last of them shows at least how fast the way is: a busy machine, other data
on the way, the round trip and TCP's small window at first only lengthen it. So the fastest of
three probes is one measurement. (The time between the messages would also get shorter where the
receiver reads them late, as it does while an op runs.)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import trio

from pmesh.core.links.bandwidth import STEADY_S, Bandwidth, Source, measured
from pmesh.core.wire.link import (
    MAX_PROBE_BYTES,
    PROBE_PART_BYTES,
    AskProbe,
    LinkMessage,
    Probe,
)
from pmesh.ids import Member

PROBE_EVERY_S = 60.0
PROBES = 3  # of which the fastest counts
BYTES_PER_MBIT_S = 2_500  # of each, or 20 ms: all are 0.1 % of what the edge carries in a minute
SLOWEST_MBIT_S = 10  # what an edge is taken for at first
ANSWER_EVERY_S = 1.0  # a peer that asks more often is not answered
PATIENCE_S = 5.0  # a probe that has not ended by then is asked for again
SHORTEST_S = 0.5e-3  # a shorter time says more of the event loop than of the network


@dataclass(slots=True)
class _Edge:
    """The edge from one peer."""

    bandwidth: Bandwidth = Bandwidth()  # noqa: RUF009 - it is frozen
    guess_mbit_s: float = SLOWEST_MBIT_S
    """How fast it is, as far as the next probe's length matters."""
    due_at: float = 0.0
    answered_at: float = -ANSWER_EVERY_S
    found_mbit_s: list[float] = field(default_factory=list[float])
    """By the probes since the last measurement."""
    asked_bytes: int = 0
    asked_at: float = 0.0
    arrived_bytes: int = 0


class Probing:
    """What one agent measures of the edges from its peers."""

    def __init__(self, send: Callable[[Member, LinkMessage], None]) -> None:
        self._send = send
        self._edges: dict[Member, _Edge] = {}

    def settled_mbit_s(self, member: Member) -> int:
        """Return the settled bandwidth from a peer; 0 while it is unknown."""
        edge = self._edges.get(member)
        return 0 if edge is None else edge.bandwidth.settled_mbit_s

    def note(self, member: Member, mbit_s: float, source: Source) -> None:
        """Add a measurement; while data tell enough, no probe is due."""
        edge, now = self._edge(member), trio.current_time()
        is_first = edge.bandwidth.source == "nominal"
        edge.bandwidth = measured(edge.bandwidth, mbit_s, source, now=now)
        edge.guess_mbit_s = max(mbit_s, SLOWEST_MBIT_S)
        edge.found_mbit_s.clear()
        soon = is_first or edge.bandwidth.is_changing
        edge.due_at = now + (STEADY_S if soon else PROBE_EVERY_S)

    def forget(self, member: Member) -> None:
        """The peer is gone."""
        self._edges.pop(member, None)

    def ask(self, members: Iterable[Member]) -> None:
        """Ask one of these peers for a probe, if one is due: two would share an interface."""
        now = trio.current_time()
        due = [m for m in members if self._edge(m).due_at <= now]
        if due:
            self._ask(min(due, key=lambda member: self._edge(member).due_at))

    def _ask(self, member: Member) -> None:
        edge, now = self._edge(member), trio.current_time()
        edge.asked_at, edge.due_at = now, now + PATIENCE_S
        edge.asked_bytes = min(MAX_PROBE_BYTES, int(edge.guess_mbit_s * BYTES_PER_MBIT_S))
        edge.arrived_bytes = 0
        self._send(member, AskProbe(edge.asked_bytes))

    def answer(self, member: Member, ask: AskProbe) -> None:
        """Send a probe to the peer that asks for it."""
        edge, now = self._edge(member), trio.current_time()
        if now - edge.answered_at < ANSWER_EVERY_S:
            return
        edge.answered_at = now
        for begin in range(0, ask.nbytes, PROBE_PART_BYTES):
            self._send(member, Probe(bytes(min(PROBE_PART_BYTES, ask.nbytes - begin))))

    def receive(self, member: Member, probe: Probe) -> None:
        """A part of a probe has arrived; the last one gives a measurement."""
        edge, now = self._edge(member), trio.current_time()
        if edge.arrived_bytes >= edge.asked_bytes:
            return  # we have not asked for it
        edge.arrived_bytes += len(probe.padding)
        if edge.arrived_bytes < edge.asked_bytes:
            return
        mbit_s = 8e-6 * edge.arrived_bytes / max(now - edge.asked_at, SHORTEST_S)
        if edge.asked_bytes < MAX_PROBE_BYTES and mbit_s > 2 * edge.guess_mbit_s:
            edge.guess_mbit_s = mbit_s  # too short for so fast an edge: again, and longer
            edge.due_at = now + ANSWER_EVERY_S
            return
        edge.found_mbit_s.append(mbit_s)
        edge.due_at = now + ANSWER_EVERY_S
        if len(edge.found_mbit_s) == PROBES:
            self.note(member, max(edge.found_mbit_s), "probe")

    def _edge(self, member: Member) -> _Edge:
        return self._edges.setdefault(member, _Edge())
