"""Measures the bandwidth of each path to this agent: by the data of lanes, or by short probes.

A probe is asked for by its receiver, where nothing else has been measured lately, and only between
machines that train together: an idle mesh stays idle. It is some messages on the path. The time
from the question to the last of them shows at least how fast the way is: a busy machine, other data
on the way, the round trip and TCP's small window at first only lengthen it. So the fastest of
three probes is one measurement. (The time between the messages would also get shorter where the
receiver reads them late, as it does while an op runs.) Of a path that is known, one probe is
enough if it shows the same. A probe of which the first message has taken longer than all others
says little, and is repeated with more bytes.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import trio

from pmesh.core.links.bandwidth import CHANGED, STEADY_S, Bandwidth, SpeedSource, measured
from pmesh.core.wire.probes import MAX_PROBE_BYTES, PROBE_PART_BYTES, AskProbe, Probe
from pmesh.ids import Member

PROBE_EVERY_S = 900.0  # more would be most of the control traffic: each member has n - 3 such paths
CHECK_EVERY_S = 180.0  # at most, over all known paths to this machine: 0.01 % of what one carries
OTHERS_EVERY_S = 3600.0  # of a path that carries no tensors, which may show more than they would
PROBES = 3  # of which the fastest counts
MOST_PROBES = 8  # of one measurement, with those that were too short to say anything
LONGER = 4  # times as many bytes has the next one then
BYTES_PER_MBIT_S = 2_200  # of each, or 18 ms: one in PROBE_EVERY_S is 0.002 % of what it carries
SLOWEST_MBIT_S = 10  # what an edge is taken for at first
ANSWER_EVERY_S = 0.5  # a peer that asks more often is not answered
PATIENCE_S = 5.0  # a probe that has not ended by then is asked for again
SHORTEST_S = 0.5e-3  # a shorter time says more of the event loop than of the network


class PathBandwidth:
    """The bandwidth of one path, from the peer to this agent.

    Args:
        send: Sends over this path.
        settled: Is called when the settled bandwidth has changed.
    """

    def __init__(
        self, send: Callable[[AskProbe | Probe], None], settled: Callable[[], None]
    ) -> None:
        self._send = send
        self._settled = settled
        self._bandwidth = Bandwidth()
        self._guess_mbit_s: float = SLOWEST_MBIT_S
        """How fast it is, as far as the next probe's length matters."""
        self._due_at = 0.0, 0.0
        """When to ask for a probe if tensors take this path, and if they take another one."""
        self._measured_times = 0
        """Since it came, or an interface has changed."""
        self._answered_at = -ANSWER_EVERY_S
        self._found_mbit_s: list[float] = []
        """By the probes since the last measurement."""
        self._asked_bytes = 0
        self._asked_at = -PATIENCE_S
        self._began_at = 0.0
        self._asked_times = 0
        """Since the last measurement."""
        self._arrived_bytes = 0

    @property
    def settled_mbit_s(self) -> int:
        """0 while it is unknown."""
        return self._bandwidth.settled_mbit_s

    def due_at(self, *, in_use: bool) -> float:
        """Return when the next probe is due, by whether tensors take this path."""
        return self._due_at[not in_use]

    def expect_change(self) -> None:
        """An interface has changed, so a probe is due."""
        due_at = max(trio.current_time(), self._asked_at + PATIENCE_S)  # else two would mix
        self._due_at = due_at, due_at
        self._measured_times = 0

    def check_soon(self) -> None:
        """Another path to this machine brings more or less, so this one may, too."""
        soon = max(trio.current_time(), self._asked_at + CHECK_EVERY_S)
        self._due_at = min(self._due_at[0], soon), self._due_at[1]

    @property
    def is_known(self) -> bool:
        """True if it was measured twice, as the first time something may have disturbed it."""
        return self._measured_times > 1

    @property
    def is_changing(self) -> bool:
        """True if what was last measured differs from what is settled."""
        return self._bandwidth.is_changing

    def note(self, mbit_s: float, source: SpeedSource) -> None:
        """Add a measurement; while data tell enough, no probe is due."""
        now = trio.current_time()
        is_first, before = self._bandwidth.source == "nominal", self._bandwidth
        self._bandwidth = measured(self._bandwidth, mbit_s, source, now=now)
        self._guess_mbit_s = max(mbit_s, SLOWEST_MBIT_S)
        self._end_series()
        if self._bandwidth.settled_mbit_s != before.settled_mbit_s:
            self._settled()
        if is_first or self._bandwidth.is_changing:
            self._due_at = now + STEADY_S, now + PROBE_EVERY_S

    def _end_series(self) -> None:
        now = trio.current_time()
        self._found_mbit_s.clear()
        self._asked_times = 0
        self._measured_times += 1
        self._due_at = now + PROBE_EVERY_S, now + OTHERS_EVERY_S

    def ask(self) -> None:
        """Ask the peer for a probe."""
        now = trio.current_time()
        self._asked_at, self._due_at = now, (now + PATIENCE_S, now + PATIENCE_S)
        self._asked_bytes = min(MAX_PROBE_BYTES, int(self._guess_mbit_s * BYTES_PER_MBIT_S))
        self._arrived_bytes = 0
        self._asked_times += 1
        self._send(AskProbe(self._asked_bytes))

    def answer(self, ask: AskProbe) -> None:
        """Send a probe to the peer that asks for it."""
        now = trio.current_time()
        if now - self._answered_at < ANSWER_EVERY_S:
            return
        self._answered_at = now
        for begin in range(0, ask.nbytes, PROBE_PART_BYTES):
            self._send(Probe(bytes(min(PROBE_PART_BYTES, ask.nbytes - begin))))

    def receive(self, probe: Probe) -> None:
        """A part of a probe has arrived; the last one gives a measurement."""
        now = trio.current_time()
        if self._arrived_bytes >= self._asked_bytes:
            return  # we have not asked for it
        if self._arrived_bytes == 0:
            self._began_at = now
        self._arrived_bytes += len(probe.padding)
        if self._arrived_bytes >= self._asked_bytes:
            self._measure(now)

    def _measure(self, now: float) -> None:
        mbit_s = 8e-6 * self._arrived_bytes / max(now - self._asked_at, SHORTEST_S)
        self._due_at = now + ANSWER_EVERY_S, now + ANSWER_EVERY_S
        is_longest = self._asked_bytes == MAX_PROBE_BYTES
        is_dwarfed = now - self._began_at < self._began_at - self._asked_at
        if is_dwarfed:  # it says more of the round trip, or of how busy the two machines are
            self._guess_mbit_s = max(mbit_s, LONGER * self._guess_mbit_s)
        elif mbit_s > 2 * self._guess_mbit_s and not is_longest:
            self._guess_mbit_s = mbit_s  # too short for so fast a path: again, and longer
        else:
            self._found_mbit_s.append(mbit_s)
        is_enough = len(self._found_mbit_s) == PROBES or self._asked_times == MOST_PROBES
        if self._found_mbit_s and not self.is_changing:
            low, high = sorted((max(self._found_mbit_s), self.settled_mbit_s))
            is_enough = is_enough or high <= CHANGED * low
        if is_enough or (is_dwarfed and is_longest):
            if self._found_mbit_s:
                self.note(max(self._found_mbit_s), "probe")
            else:
                self._end_series()


class ProbedPath(NamedTuple):
    """A path to a peer, and what is measured of it."""

    bandwidth: PathBandwidth
    hosts: tuple[AbstractSet[str], AbstractSet[str]]
    """The addresses of its two interfaces, ours first."""
    in_use: bool
    """Tensors take it, perhaps with others."""
    least_round_trip_s: Callable[[], float | None] = lambda: None
    """Returns that of the network alone; None where the system does not tell."""


class Probing:
    """What one agent measures of the paths from its peers.

    Args:
        paths_to: Returns the paths to a peer, the best for tensors first.
    """

    def __init__(self, paths_to: Callable[[Member], Sequence[ProbedPath]]) -> None:
        self._paths_to = paths_to
        self._known_mbit_s: dict[Member, int] = {}
        self._members: tuple[Member, ...] = ()
        """Those that train with this machine."""
        self._may_check_at = 0.0
        """When the next probe may go over a path that is known."""

    def settled_mbit_s(self, member: Member) -> int:
        """Return the settled bandwidth from a peer; 0 while it is unknown.

        It is that of all paths that tensors take, or of those before until one is measured.
        """
        used = (path.bandwidth for path in self._paths_to(member) if path.in_use)
        if known := sum(bandwidth.settled_mbit_s for bandwidth in used):
            self._known_mbit_s[member] = known
        return self._known_mbit_s.get(member, 0)

    def least_round_trip_s(self, member: Member) -> float | None:
        """Return the least round trip of the network by the best path; None if it is not known."""
        return next((path.least_round_trip_s() for path in self._paths_to(member)), None)

    def note(self, member: Member, hosts: tuple[str, str], mbit_s: float) -> None:
        """Add what the data of a lane have shown of the path between these addresses.

        What came between others, as through a translation of addresses, is said of the best path.
        """
        known, (here, there) = self._paths_to(member), hosts
        between = (path for path in known if here in path.hosts[0] and there in path.hosts[1])
        for path in (*between, *known)[:1]:
            path.bandwidth.note(mbit_s, "data")
            if path.bandwidth.is_changing:
                self._check_others(path.bandwidth)

    def _check_others(self, changing: PathBandwidth) -> None:
        """A ring that avoids the path is planned by what the others bring now, not long ago."""
        for member in self._members:
            for path in self._paths_to(member):
                if path.bandwidth is not changing:
                    path.bandwidth.check_soon()

    def forget(self, member: Member) -> None:
        """The peer is gone."""
        self._known_mbit_s.pop(member, None)

    def ask(self, members: Iterable[Member], following: Collection[Member]) -> None:
        """Ask for one probe, if any is due: two would share an interface.

        Args:
            members: Those that train with this machine.
            following: Those that it sends tensors to. The data would hold up our question and what
                acknowledges the probe, and show there how fast the path is.
        """
        self._members = tuple(members)
        now = trio.current_time()
        due: list[tuple[float, int, PathBandwidth]] = []
        for member in self._members:
            for path in self._paths_to(member):
                due_at = path.bandwidth.due_at(in_use=path.in_use)
                is_filled = path.in_use and member in following
                may_ask = now >= self._may_check_at or not path.bandwidth.is_known
                if due_at <= now and may_ask and not is_filled:
                    due.append((due_at, len(due), path.bandwidth))
        if due:
            chosen = min(due)[-1]
            if chosen.is_known:
                self._may_check_at = now + CHECK_EVERY_S
            chosen.ask()
