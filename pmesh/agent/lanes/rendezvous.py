"""Opens the lanes of an agent: it sends and accepts offers, dials or welcomes, and hands lanes out.

Both ends know a lane by its `LaneKey`. The rank that sends the tensors offers the lane. The agent
that dialled the link dials the lane, too, since that direction is known to pass firewalls. The rank
that needs the lane takes it by its `LaneEnd`.

An offer may come before its receiver has installed the roster (V4: early is not late). It then
waits, and no connection is opened. So a peer that has no rank in a job can cause no connection.
"""

from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from pmesh.agent.containment import Tasks
from pmesh.agent.lanes.lane_paths import LanePaths
from pmesh.agent.lanes.splices import MAX_DIALS, Reach, Splices
from pmesh.core.wire.lanes import OfferLane, Splice
from pmesh.core.wire.preamble import LANE_ID_BYTES, decode_preamble_untrusted
from pmesh.errors import LaneBroken, NetworkError, ProtocolError
from pmesh.ids import Epoch, JobName, Member, TrainerId
from pmesh.net.lanes.lane import Lane, PathLost
from pmesh.net.lanes.opening import dial_lane, local_lanes, welcome_lane
from pmesh.net.links.interfaces import local_address_of, remote_address_of

ATTEMPTS = 3  # if a connection fails thrice in a row, the leader decides
RETRY_S = 0.2
ATTEMPT_S = 5.0  # as long as a connection may take to authenticate
MAX_EARLY = 64  # offers of one peer, 1 KiB each: from eight ranks to each of eight
EARLY_S = 10.0  # an offer waits for its roster: longer than all attempts of its sender
OFFER_PATIENCE_S = 4.0  # a connection may precede its offer, or our roster; the door gives 5 s
UNTAKEN_S = 10.0  # for results and messages: the rank that asked has given up long before
MAX_BESIDE = 4  # between two ranks: a result, messages, and for each the one that replaces it
MAX_JOBS_OVER = 1024  # names of jobs that programs here have chosen
RING = -1  # the `op` of lanes that ops use
_KEY_BYTES = 32


class LaneKey(NamedTuple):
    """Names a lane by what it is for: the data of a roster from one trainer to another."""

    job: JobName
    born: Epoch
    number: int
    host: Member | None
    """The sender's agent, which alone may offer the lane (V4): two views may each make a roster of
    one number, and give one id to two trainers. None if the roster does not have the sender."""
    sender: TrainerId
    receiver: TrainerId
    op: int = RING
    """-1: for ops; from 0 on: for the retained result of this op (O2); below -1: messages (O4)."""


class LaneEnd(NamedTuple):
    """One of a lane's two ends; both may be at one agent."""

    edge: LaneKey
    sending: bool


@dataclass(slots=True)
class _LaneSlot:
    """The place in which one end's lane appears."""

    lane: Lane | None = None
    failure: str = ""
    """Why there is none, as text. A raised exception refers to frames, and one of them to this
    slot, so that the arenas in them would stay until the garbage collector runs."""
    filled: trio.Event = field(default_factory=trio.Event)


class _Early(NamedTuple):
    """An offer for a roster that is not installed here yet."""

    offer: OfferLane
    until: float


@dataclass(frozen=True, slots=True)
class _Expected:
    """A lane that the peer dials."""

    end: LaneEnd
    offer: OfferLane
    member: Member


class LaneRendezvous:
    """All lanes of one agent that are being opened, and those not yet taken.

    Args:
        me: This agent.
        reach: Its links.
        tasks: Runs what opens lanes, and keeps them.
        entropy: Returns random bytes.
        awaits: Returns whether a lane leads to a rank here, under its current roster.
    """

    def __init__(
        self,
        me: Member,
        reach: Reach,
        tasks: Tasks,
        entropy: Callable[[int], bytes],
        *,
        awaits: Callable[[LaneKey], bool],
    ) -> None:
        self._me = me
        self._reach = reach
        self._tasks = tasks
        self._entropy = entropy
        self._awaits_edge = awaits
        self._places: dict[LaneEnd, _LaneSlot] = {}
        self._expected: dict[bytes, _Expected] = {}
        self._openings: dict[LaneEnd, trio.CancelScope] = {}
        """The tasks that open the lane of an end. If a peer offers it, its task also keeps it until
        it is taken: there is one for each pair of ranks, and MAX_BESIDE more."""
        self._early: dict[Member, dict[LaneEnd, _Early]] = {}
        self._news = trio.Event()
        self.splices = Splices(me, reach, tasks, entropy, awaits=self._notify, welcome=self.welcome)
        self.paths = LanePaths(reach, tasks)
        self._over: dict[JobName, int] = {}  # all rosters below this number
        self._given_up: dict[LaneEnd, int] = {}
        """For each pair of ranks (an end with op 0), the last lane for messages that was given up,
        as were all before it."""
        self._opening: dict[trio.CancelScope, tuple[str, str]] = {}
        """The connections that do not yet carry a lane, with the addresses of their two ends."""

    def offer(self, edge: LaneKey, to: Member) -> None:
        """Open a lane whose sending end is here; `take` returns it."""
        if to == self._me:
            self._join_locally(edge)
        else:
            end = LaneEnd(edge, sending=True)
            self._tasks.start_soon(self._keep_offering, end, to, self._begin_opening(end))

    def accept(self, member: Member, offer: OfferLane | Splice) -> None:
        """Accept a peer's offer of a lane whose receiving end is here."""
        if isinstance(offer, Splice):
            self.splices.accept(member, offer)
            return
        end = LaneEnd(_edge_of(offer, member), sending=False)
        if self._is_over(end):
            return  # a view was installed here while the offer was on its way
        if self._awaits_edge(end.edge):
            self._open_offered(end, offer, member)
            return
        now, early = trio.current_time(), self._early.setdefault(member, {})
        for late in [other for other, kept in early.items() if kept.until <= now]:
            del early[late]
        if end in early or len(early) < MAX_EARLY:  # a peer offers again if nothing happens
            early[end] = _Early(offer, now + EARLY_S)

    def _open_early(self) -> None:
        """Open the lanes that were offered before their roster was installed."""
        now = trio.current_time()
        for member, early in self._early.items():
            for end, (offer, until) in list(early.items()):
                awaited = self._awaits_edge(end.edge)
                if awaited or until <= now or self._is_over(end):
                    del early[end]
                if awaited and until > now:
                    self._open_offered(end, offer, member)

    def _open_offered(self, end: LaneEnd, offer: OfferLane, member: Member) -> None:
        scope = self._begin_opening(end)
        if offer.op != RING:
            scope.deadline = trio.current_time() + UNTAKEN_S
            self._make_room(end)
        self._tasks.start_soon(self._receive, end, offer, member, scope)

    def _begin_opening(self, end: LaneEnd) -> trio.CancelScope:
        """Return the scope of a new attempt to open an end, and cancel an earlier one."""
        if end in self._openings:
            self._openings[end].cancel()
        scope = self._openings[end] = trio.CancelScope()
        return scope

    def _make_room(self, end: LaneEnd) -> None:
        """Cancel the oldest lanes between two ranks that ops don't use, beyond MAX_BESIDE."""
        beside = [
            other
            for other in self._openings
            if other.edge.op != RING and _pair_of(other) == _pair_of(end)
        ]
        for oldest in beside[:-MAX_BESIDE]:
            self._openings[oldest].cancel()

    async def _receive(
        self, end: LaneEnd, offer: OfferLane, member: Member, scope: trio.CancelScope
    ) -> None:
        """Open the lane that a peer has offered, and keep it until it is taken."""
        try:
            with scope:
                if offer.dial:
                    async with self.splices.turns_of(member):
                        await self._dial(end, offer, member)
                else:
                    self._expect(end, offer, member)
                if not offer.dial or self.holds(end):
                    await trio.sleep_forever()
        finally:
            self._expected.pop(offer.lane, None)
            if self._openings.get(end) is scope and (lane := self.withdraw(end)) is not None:
                lane.close()
            self._end_opening(end, scope)

    def _end_opening(self, end: LaneEnd, scope: trio.CancelScope) -> None:
        if self._openings.get(end) is scope:
            del self._openings[end]

    def lose(self, member: Member) -> None:
        """End what a peer has caused, except lanes that ops use: the link with it has ended."""
        self._early.pop(member, None)
        for end, scope in self._openings.items():
            if end.edge.host == member and not end.sending:
                scope.cancel()
        self.splices.lose(member)
        self.paths.forget(member)

    async def welcome(
        self, stream: trio.SocketStream, first_bytes: bytes, authenticated: Callable[[], None]
    ) -> None:
        """Take a connection from the door, which names a lane.

        Raises LaneBroken if nobody has offered the lane, ProtocolError for a wrong preamble.
        """
        preamble = decode_preamble_untrusted(first_bytes)
        lane, index = preamble
        with trio.move_on_after(OFFER_PATIENCE_S):
            while not self._awaits(lane, index):
                await self._news.wait()
        if index:
            await self.paths.welcome(stream, preamble, authenticated)
            return
        expected = self._expected.get(lane)
        if expected is None and lane in self.splices:  # lanes first: a ticket must not hide one
            authenticated()
            self.splices.arrive(lane, stream)
            return
        if expected is None:
            raise LaneBroken("a connection names a lane that nobody has offered")
        name = self._reach.name_of(expected.member)
        opened = await self._open(stream, welcome_lane(stream, expected.offer, peer=name))
        try:
            authenticated()
        except NetworkError:
            opened.close()
            raise
        # Not before: the lane's id was in clear, and an eavesdropper must not use it up.
        if self._expected.pop(lane, None) is None:  # a second connection, which replays the first
            opened.close()
            return
        self._begin(expected.end, opened, expected.offer, expected.member)

    def is_offered(self, first_bytes: bytes) -> bool:
        """Return whether a member has offered the lane, or asked for the ticket, that these name.

        Of a lane with several connections, only the first one is meant.
        """
        try:
            lane, index = decode_preamble_untrusted(first_bytes)
        except ProtocolError:
            return False
        early = (each.offer.lane for ends in self._early.values() for each in ends.values())
        return not index and (self._awaits(lane, index) or lane in early)

    def _begin(self, end: LaneEnd, opened: Lane, offer: OfferLane, member: Member) -> None:
        try:
            lane = self.paths.begin(opened, offer, member)
        except LaneBroken as e:
            self._reach.complain(member, e)
        else:
            self._fill(end, lane)

    def _awaits(self, lane: bytes, index: int) -> bool:
        if index:
            return lane in self.paths
        return lane in self._expected or lane in self.splices

    async def take(self, end: LaneEnd) -> Lane:
        """Return the lane of one of our ends, as soon as it is open.

        Raises:
            LaneBroken: it could not be opened in three attempts, or its roster is over.
        """
        if self._is_over(end):
            raise LaneBroken("its roster is over")
        place = self._place(end)
        await place.filled.wait()
        if self._places.get(end) is place:
            del self._places[end]
        lane, place.lane = place.lane, None
        self._stop_opening(end)
        if lane is None:
            raise LaneBroken(place.failure or "somebody else has taken the lane")
        return lane

    def holds(self, end: LaneEnd) -> bool:
        """Return whether the lane of this end is open, and nobody has taken it."""
        place = self._places.get(end)
        return place is not None and place.lane is not None

    def withdraw(self, end: LaneEnd) -> Lane | None:
        """Take back and return the lane of this end, if it is open and nobody has taken it."""
        if not self.holds(end):
            return None
        self._stop_opening(end)
        return self._places.pop(end).lane

    def give_up(self, end: LaneEnd) -> None:
        """Drop this lane for messages, and all earlier ones of the same pair of ranks."""
        if not self._is_over(end):
            self._given_up[_pair_of(end)] = end.edge.op
            self._drop(end)

    def forget(self, job: JobName, *, below: int) -> None:
        """End the job's rosters below this number, with their lanes; open those of newer ones."""
        self._over[job] = max(below, self._over.pop(job, below))
        if len(self._over) > MAX_JOBS_OVER:
            del self._over[next(iter(self._over))]
        for end in {*self._openings, *self._places}:
            if self._is_over(end):
                self._drop(end)
        given_up = self._given_up.items()
        self._given_up = {end: op for end, op in given_up if not self._is_outdated(end)}
        self._open_early()
        self._notify()

    def _drop(self, end: LaneEnd) -> None:
        self._stop_opening(end)
        if end in self._places:
            _give_up(self._places.pop(end), "its roster is over")

    def _stop_opening(self, end: LaneEnd) -> None:
        scope = self._openings.pop(end, None)
        if scope is not None:
            scope.cancel()

    def lose_path(
        self, ours: AbstractSet[str], theirs: AbstractSet[str], *, outranked: bool = False
    ) -> None:
        """Take lanes off a path, as `LanePaths.lose`; open those in progress over another one."""
        self.paths.lose(ours, theirs, outranked=outranked)
        for scope, (here, there) in self._opening.items():
            if here in ours and there in theirs:
                scope.cancel()

    async def _open(self, stream: trio.SocketStream, opening: Awaitable[Lane]) -> Lane:
        """Return the lane that `opening` opens; raise PathLost if its path fails meanwhile."""
        ends = local_address_of(stream), remote_address_of(stream)
        here, there = (end.host.partition("%")[0] for end in ends)
        lane: Lane | None = None
        with trio.CancelScope() as scope:
            self._opening[scope] = here, there
            try:
                lane = await opening
            finally:
                del self._opening[scope]
        if lane is not None and not scope.cancel_called:
            return lane
        if lane is not None:
            lane.close()
        raise PathLost(f"the path to {there} has failed")

    def close(self) -> None:
        """Close the lanes that nobody has taken."""
        for place in self._places.values():
            _give_up(place, "the agent ends")

    def _is_over(self, end: LaneEnd) -> bool:
        return self._is_outdated(end) or self._given_up.get(_pair_of(end), 0) <= end.edge.op < RING

    def _is_outdated(self, end: LaneEnd) -> bool:
        return end.edge.number < self._over.get(end.edge.job, 0)

    def _place(self, end: LaneEnd) -> _LaneSlot:
        return self._places.setdefault(end, _LaneSlot())

    def _fill(self, end: LaneEnd, lane: Lane) -> None:
        if self._is_over(end):
            lane.close()
            return
        place = self._place(end)
        if place.lane is not None:
            place.lane.close()  # of an earlier attempt, which the other side has repeated
        place.lane = lane
        self._notify()
        place.filled.set()

    def _expect(self, end: LaneEnd, offer: OfferLane, member: Member) -> None:
        self._expected[offer.lane] = _Expected(end, offer, member)
        self._notify()

    def _notify(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def _join_locally(self, edge: LaneKey) -> None:
        me = self._reach.name_of(self._me)
        names = f"trainer {edge.receiver} ({me})", f"trainer {edge.sender} ({me})"
        try:
            sending, receiving = local_lanes(self._make_offer(edge, dial=False), peers=names)
        except OSError as e:  # no descriptor is left: the op must fail, and not this agent
            failure = f"no data connection within {me}: {e.strerror}"
            _give_up(self._place(LaneEnd(edge, sending=True)), failure)
            return
        self._fill(LaneEnd(edge, sending=True), sending)
        self._fill(LaneEnd(edge, sending=False), receiving)

    async def _keep_offering(self, end: LaneEnd, to: Member, scope: trio.CancelScope) -> None:
        """Offer a lane, again if that fails, until it is open, given up or forgotten."""
        try:
            with scope:
                await self._offer_again(end, to)
        finally:
            self._end_opening(end, scope)

    async def _offer_again(self, end: LaneEnd, to: Member) -> None:
        if self._is_over(end):
            return  # the roster has ended before this task has run
        edge, place = end.edge, self._place(end)
        for _ in range(ATTEMPTS):
            several = edge.op == RING and self.paths.is_worth_several(to)
            offer = self._make_offer(edge, dial=not self._reach.we_dialled(to), several=several)
            if offer.dial:
                await self._await_dial(end, offer, to, place)
            else:
                self._reach.send(to, offer)
                async with self.splices.turns_of(to):  # else they all knock at its door at once
                    await self._dial(end, offer, to)
            if place.filled.is_set() or self._places.get(end) is not place:
                return
            await trio.sleep(RETRY_S)
        name = self._reach.name_of(to)
        _give_up(place, f"no data connection to {name} can be made")

    async def _await_dial(
        self, end: LaneEnd, offer: OfferLane, to: Member, place: _LaneSlot
    ) -> None:
        self._expect(end, offer, to)
        try:
            self._reach.send(to, offer)
            before = sum(expected.member == to for expected in self._expected.values()) - 1
            turns = 1 + before // MAX_DIALS  # it dials so many at once, in the order of offers
            with trio.move_on_after(turns * ATTEMPT_S):
                await place.filled.wait()
        finally:
            self._expected.pop(offer.lane, None)

    async def _dial(self, end: LaneEnd, offer: OfferLane, member: Member) -> None:
        """Dial the lane of an offer; the side that offered it tries again if that fails."""
        try:
            lane = await self._dialled(offer, member)
        except NetworkError as e:
            self._reach.complain(member, e)
        else:
            self._begin(end, lane, offer, member)

    async def _dialled(self, offer: OfferLane, member: Member) -> Lane:
        """Dial, again over the next path for each that fails: all get the very same greeting."""
        while True:
            stream, name = await self.splices.dial(member), self._reach.name_of(member)
            with suppress(PathLost):
                return await self._open(stream, dial_lane(stream, offer, peer=name))

    def _make_offer(self, edge: LaneKey, *, dial: bool, several: bool = False) -> OfferLane:
        return OfferLane(
            job=edge.job,
            born=edge.born,
            number=edge.number,
            sender=edge.sender,
            receiver=edge.receiver,
            op=edge.op,
            lane=self._entropy(LANE_ID_BYTES),
            key=self._entropy(_KEY_BYTES),
            return_key=self._entropy(_KEY_BYTES),
            dial=dial,
            several=several,
        )


def _edge_of(offer: OfferLane, host: Member) -> LaneKey:
    return LaneKey(
        offer.job, offer.born, offer.number, host, offer.sender, offer.receiver, offer.op
    )


def _pair_of(end: LaneEnd) -> LaneEnd:
    """Return an end that is the same for all lanes from one rank to another."""
    return LaneEnd(end.edge._replace(op=0), end.sending)


def _give_up(place: _LaneSlot, failure: str) -> None:
    """Close the lane in this place; a task that waits for it gets the failure."""
    if place.lane is not None:
        place.lane.close()
    place.lane, place.failure = None, failure
    place.filled.set()
