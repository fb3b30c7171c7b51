"""Keeps open lanes on all paths that exist.

A lane of several connections gets one on each path that is fast enough, and another when such a
path appears. The side that dialled the lane dials them, each with an index of its own. A lane of
one connection is broken when a second such path appears: its op runs again over a lane of several.
"""

import contextlib
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakSet

import trio

from pmesh.agent.containment import Tasks
from pmesh.agent.lanes.splices import Reach
from pmesh.core.wire.lanes import OfferLane
from pmesh.core.wire.preamble import Preamble
from pmesh.errors import LaneBroken, NetworkError
from pmesh.ids import Member
from pmesh.net.lanes.lane import Lane
from pmesh.net.lanes.multipath import LanePath, MultipathLane
from pmesh.net.lanes.opening import dial_lane, welcome_lane
from pmesh.net.lanes.subflows import ConnectionFacts

LOOK_S = 0.25  # between two looks for new paths, of 50 us each, while a lane is open
RETRY_S = 2.0  # before a path over which no connection came up is tried again
WIDEN_EVERY_S = 60.0  # a lane to a member is broken for a second path at most this often

EndHosts = tuple[AbstractSet[str], AbstractSet[str]]


@dataclass(slots=True, eq=False)
class _Several:
    """An open lane of several connections."""

    lane: MultipathLane
    offer: OfferLane
    member: Member
    indices: Iterator[int] = field(default_factory=lambda: count(1))
    dialling: set[EndHosts] = field(default_factory=set[EndHosts])


class LanePaths:
    """All open lanes to other agents."""

    def __init__(self, reach: Reach, tasks: Tasks) -> None:
        self._reach = reach
        self._tasks = tasks
        self._lanes = WeakSet[Lane]()
        self._several: dict[bytes, _Several] = {}  # by the lane's id
        self._widened: dict[Member, float] = {}

    def __contains__(self, lane: bytes) -> bool:
        """Return whether this is the id of an open lane of several connections."""
        return lane in self._several

    def is_worth_several(self, member: Member) -> bool:
        """Return whether a lane to this member gets several connections."""
        return len(self._reach.paths_to(member)) > 1

    def begin(self, first: Lane, offer: OfferLane, member: Member) -> Lane:
        """Return the lane of an offer, given its first connection.

        Raises:
            LaneBroken: The system has no descriptor left for it. The connection is closed.
        """
        lane = first
        if offer.several:
            lane = MultipathLane(first, self._facts_of(first, member), offer)
            several = self._several[offer.lane] = _Several(lane, offer, member)
            self._tasks.start_soon(self._keep, several)
        elif first.sending and offer.op == -1:
            self._tasks.start_soon(self._widen, first, member)
        self._lanes.add(lane)
        return lane

    async def welcome(
        self, stream: trio.SocketStream, preamble: Preamble, authenticated: Callable[[], None]
    ) -> None:
        """Add a connection from the door to its lane; raise LaneBroken if that can't use it."""
        several = self._several.get(preamble.lane)
        if several is None or several.lane.has_used(preamble.connection):
            raise LaneBroken("a connection names a lane that does not await it")
        lane, offer, member = several.lane, several.offer, several.member
        name = self._reach.name_of(member)
        opened = await welcome_lane(stream, offer, peer=name, index=preamble.connection)
        try:
            authenticated()
        except NetworkError:
            opened.close()
            raise
        with contextlib.suppress(LaneBroken):  # it was closed meanwhile
            lane.join(opened, preamble.connection, self._facts_of(opened, member))

    def lose(
        self, ours: AbstractSet[str], theirs: AbstractSet[str], *, outranked: bool = False
    ) -> None:
        """Take all lanes off the path between these addresses, which has failed.

        If it was `outranked` by a better path, only lanes of one connection leave it.
        """
        for lane in list(self._lanes):
            if not lane.runs_between(ours, theirs):
                continue
            if not isinstance(lane, MultipathLane):
                lane.lose_path()
            elif not outranked:
                lane.drop(ours, theirs)

    def forget(self, member: Member) -> None:
        """Forget a peer that is gone."""
        self._widened.pop(member, None)

    def carries(self, ours: AbstractSet[str], theirs: AbstractSet[str]) -> bool:
        """Return whether an open lane has a connection on the path between these addresses."""
        return any(lane.runs_between(ours, theirs) for lane in self._lanes if not lane.is_closed)

    def _facts_of(self, connection: Lane, member: Member) -> ConnectionFacts:
        known = self._reach.paths_to(member)
        return next(
            (c.facts for c in known if connection.runs_between(*c.hosts)), ConnectionFacts()
        )

    async def _widen(self, lane: Lane, member: Member) -> None:
        """Break a lane when a second path is there, so that it is opened again over both."""
        while not lane.is_closed:
            await trio.sleep(LOOK_S)
            now = trio.current_time()
            is_due = now - self._widened.get(member, -WIDEN_EVERY_S) >= WIDEN_EVERY_S
            if is_due and self.is_worth_several(member) and not lane.is_closed:
                self._widened[member] = now
                lane.lose_path()

    # --- lanes of several connections

    async def _keep(self, several: _Several) -> None:
        lane, offer = several.lane, several.offer
        try:
            async with trio.open_nursery() as nursery:
                if offer.dial != lane.sending:
                    nursery.start_soon(self._add_paths, several, nursery)
                await lane.tend()
                nursery.cancel_scope.cancel()
        finally:
            self._several.pop(offer.lane, None)  # a peer may have given the id to two lanes

    async def _add_paths(self, several: _Several, nursery: trio.Nursery) -> None:
        while True:
            for carrier in self._reach.paths_to(several.member):
                is_used = several.lane.runs_between(*carrier.hosts)
                if not is_used and carrier.hosts not in several.dialling:
                    several.dialling.add(carrier.hosts)
                    nursery.start_soon(self._add, several, carrier)
            await trio.sleep(LOOK_S)

    async def _add(self, several: _Several, carrier: LanePath) -> None:
        index, name = next(several.indices), self._reach.name_of(several.member)
        try:
            stream = await carrier.dial()
            connection = await dial_lane(stream, several.offer, peer=name, index=index)
            known = [other.hosts for other in self._reach.paths_to(several.member)]
            if connection.runs_between(*carrier.hosts) and carrier.hosts in known:
                several.lane.join(connection, index, carrier.facts)
            else:  # the system has taken another route, or the path has failed meanwhile
                connection.close()
        except NetworkError as e:
            self._reach.complain(several.member, e)
        if not several.lane.runs_between(*carrier.hosts):
            await trio.sleep(RETRY_S)
        several.dialling.discard(carrier.hosts)
