"""Brings lanes about: offers over links, connections through the door or dialled, one result.

A lane is known at both ends by its `Edge`. Who sends the tensors offers; who dialled the link dials
the lane too, since that direction is known to pass firewalls. Whoever waits for it takes it by its
end, and an offer may come before the taker has installed the roster (V4: early is not late).
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from pmesh.agent.lanes.lane_paths import LanePaths
from pmesh.agent.lanes.splices import Reach, Splices
from pmesh.core.wire.link import OfferLane, Splice
from pmesh.core.wire.records import LANE_ID_BYTES, decode_preamble_untrusted
from pmesh.errors import LaneBroken, NetworkError, ProtocolError
from pmesh.ids import Epoch, JobName, Member, TrainerId
from pmesh.net.lanes.lane import Lane, PathLost
from pmesh.net.lanes.opening import dial_lane, local_lanes, welcome_lane
from pmesh.net.links.interfaces import local_address_of, remote_address_of

ATTEMPTS = 3  # a connection that fails thrice in a row is for the leader to judge
RETRY_S = 0.2
MAX_OFFERED = 1024  # by one peer, and not yet taken: a few jobs and ranks; more is an attack
MAX_DIALS = 16  # at once as one peer asks; each costs a descriptor
ATTEMPT_S = 5.0  # as long as a connection may take to authenticate
OFFER_PATIENCE_S = 2.0  # a connection may overtake the offer that it belongs to
_KEY_BYTES = 32


class LaneKey(NamedTuple):
    """What a lane is for: the data of a roster from one trainer to another."""

    job: JobName
    born: Epoch
    number: int
    host: Member | None
    """The sender's agent, which alone may offer it (V4): two views may each settle a roster under
    one number, and give one trainer's number to two trainers. None: the roster has no such one."""
    sender: TrainerId
    receiver: TrainerId
    op: int = -1
    """-1: the ring; the retained result of this op (O2); below -1: messages (O4)."""


class LaneEnd(NamedTuple):
    """One of an edge's two ends; both may be of one agent."""

    edge: LaneKey
    sending: bool


@dataclass(slots=True)
class _LaneSlot:
    """Where one end's lane appears."""

    lane: Lane | None = None
    failure: LaneBroken | None = None
    filled: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True, slots=True)
class _Expected:
    """A lane that somebody else dials."""

    end: LaneEnd
    offer: OfferLane
    member: Member


class LaneRendezvous:
    """All lanes of one agent that are being opened, and those not yet taken."""

    def __init__(
        self, me: Member, reach: Reach, nursery: trio.Nursery, entropy: Callable[[int], bytes]
    ) -> None:
        self._me = me
        self._reach = reach
        self._nursery = nursery
        self._entropy = entropy
        self._places: dict[LaneEnd, _LaneSlot] = {}
        self._expected: dict[bytes, _Expected] = {}
        self._dials: Counter[Member] = Counter()  # under way, as this peer has asked
        self._turns: dict[Member, trio.CapacityLimiter] = {}
        self._news = trio.Event()
        self.splices = Splices(
            me, reach, nursery, entropy, awaits=self._tell_news, welcome=self.welcome
        )
        self.paths = LanePaths(reach, nursery)
        self._over: dict[JobName, int] = {}  # every roster below this number
        self._given_up: set[LaneEnd] = set()
        self._opening: dict[trio.CancelScope, tuple[str, str]] = {}
        """The connections that do not yet carry a lane, with the addresses of their two ends."""

    def offer(self, edge: LaneKey, to: Member) -> None:
        """Open an edge whose sending end is ours; `take` gives it."""
        if to == self._me:
            self._join_locally(edge)
        else:
            self._nursery.start_soon(self._keep_offering, edge, to)

    def accept(self, member: Member, offer: OfferLane | Splice) -> None:
        """A peer offers the receiving end of an edge. ProtocolError: beyond all reason."""
        if isinstance(offer, Splice):
            self.splices.accept(member, offer)
            return
        if self._offered_by(member) >= MAX_OFFERED:
            raise ProtocolError("more lanes are offered than any job needs")
        end = LaneEnd(_edge_of(offer, member), sending=False)
        if self._is_over(end):
            return  # on its way while a view was installed here
        if offer.dial:
            self._dials[member] += 1
            self._nursery.start_soon(self._dial_as_asked, end, offer, member)
        else:
            self._expect(end, offer, member)

    def _offered_by(self, member: Member) -> int:
        """What this peer has made us keep; what others have offered does not count against it."""
        expected = sum(expected.member == member for expected in self._expected.values())
        places = sum(e.edge.host == member and not e.sending for e in self._places)
        return max(expected, places) + self._dials[member]

    async def _dial_as_asked(self, end: LaneEnd, offer: OfferLane, member: Member) -> None:
        turns = self._turns.setdefault(member, trio.CapacityLimiter(MAX_DIALS))
        try:
            async with turns:
                await self._dial(end, offer, member)
        finally:
            self._dials[member] -= 1
            if not self._dials[member]:
                del self._dials[member], self._turns[member]

    async def welcome(
        self, stream: trio.SocketStream, first_bytes: bytes, authenticated: Callable[[], None]
    ) -> None:
        """A connection through the door that names a lane; LaneBroken if nobody has offered it.

        ProtocolError if its first bytes are no preamble.
        """
        preamble = decode_preamble_untrusted(first_bytes)
        lane, index = preamble
        with trio.move_on_after(OFFER_PATIENCE_S):
            while not self._awaits(lane, index):
                await self._news.wait()
        if index:
            await self.paths.welcome(stream, preamble, authenticated)
            return
        if lane in self.splices:
            authenticated()
            self.splices.arrive(lane, stream)
            return
        expected = self._expected.get(lane)
        if expected is None:
            raise LaneBroken("a connection names a lane that nobody has offered")
        name = self._reach.name_of(expected.member)
        opened = await self._open(stream, welcome_lane(stream, expected.offer, peer=name))
        try:
            authenticated()
        except NetworkError:
            opened.close()
            raise
        # Not before: the lane's id was in clear, and whoever overheard it must not use it up.
        if self._expected.pop(lane, None) is None:  # a second one, which was recorded
            opened.close()
            return
        self._fill(expected.end, self.paths.begin(opened, expected.offer, expected.member))

    def _awaits(self, lane: bytes, index: int) -> bool:
        if index:
            return lane in self.paths
        return lane in self._expected or lane in self.splices

    async def take(self, end: LaneEnd) -> Lane:
        """The lane of one of our ends, as soon as it is open.

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
        if lane is None:
            raise place.failure or LaneBroken("somebody else has taken the lane")
        return lane

    def holds(self, end: LaneEnd) -> bool:
        """Whether the lane of this end is open, and nobody has taken it."""
        place = self._places.get(end)
        return place is not None and place.lane is not None

    def withdraw(self, end: LaneEnd) -> Lane | None:
        """The lane of this end, if it is open and nobody has taken it."""
        return self._places.pop(end).lane if self.holds(end) else None

    def give_up(self, end: LaneEnd) -> None:
        """Nobody wants this lane any more, though its roster goes on."""
        if not self._is_over(end):
            self._given_up.add(end)
            self._drop_what_is_over()

    def forget(self, job: JobName, *, below: int) -> None:
        """The job's rosters below this number are over: so are their lanes."""
        self._over[job] = max(below, self._over.get(job, below))
        self._drop_what_is_over()
        self._given_up = {end for end in self._given_up if not self._is_of_the_past(end)}

    def _drop_what_is_over(self) -> None:
        for lane, expected in list(self._expected.items()):
            if self._is_over(expected.end):
                del self._expected[lane]
        for end, place in list(self._places.items()):
            if self._is_over(end):
                del self._places[end]
                _give_up(place, LaneBroken("its roster is over"))

    def lose_path(
        self, ours: AbstractSet[str], theirs: AbstractSet[str], *, outranked: bool = False
    ) -> None:
        """As `LanePaths.lose`; what is being opened over the path is opened over another one."""
        self.paths.lose(ours, theirs, outranked=outranked)
        for scope, (here, there) in self._opening.items():
            if here in ours and there in theirs:
                scope.cancel()

    async def _open(self, stream: trio.SocketStream, opening: Awaitable[Lane]) -> Lane:
        """Await what opens a lane over a connection; PathLost if its path fails meanwhile."""
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
        """Close what nobody has taken."""
        for place in self._places.values():
            _give_up(place, LaneBroken("the agent ends"))

    def _is_over(self, end: LaneEnd) -> bool:
        return self._is_of_the_past(end) or end in self._given_up

    def _is_of_the_past(self, end: LaneEnd) -> bool:
        return end.edge.number < self._over.get(end.edge.job, 0)

    def _place(self, end: LaneEnd) -> _LaneSlot:
        return self._places.setdefault(end, _LaneSlot())

    def _fill(self, end: LaneEnd, lane: Lane) -> None:
        if self._is_over(end):
            lane.close()
            return
        place = self._place(end)
        if place.lane is not None:
            place.lane.close()  # an earlier attempt, of which the other side has heard no end
        place.lane = lane
        self._tell_news()
        place.filled.set()

    def _expect(self, end: LaneEnd, offer: OfferLane, member: Member) -> None:
        self._expected[offer.lane] = _Expected(end, offer, member)
        self._tell_news()

    def _tell_news(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def _join_locally(self, edge: LaneKey) -> None:
        me = self._reach.name_of(self._me)
        names = f"trainer {edge.receiver} ({me})", f"trainer {edge.sender} ({me})"
        try:
            sending, receiving = local_lanes(self._make_offer(edge, dial=False), peers=names)
        except OSError as e:  # no descriptor is left: a matter for all ranks, not for this agent
            failure = LaneBroken(f"no data connection within {me}: {e.strerror}")
            _give_up(self._place(LaneEnd(edge, sending=True)), failure)
            return
        self._fill(LaneEnd(edge, sending=True), sending)
        self._fill(LaneEnd(edge, sending=False), receiving)

    async def _keep_offering(self, edge: LaneKey, to: Member) -> None:
        """Offer, again if it fails, until the lane is open, given up or forgotten."""
        end = LaneEnd(edge, sending=True)
        if self._is_over(end):
            return  # before this task has had its first turn
        place = self._place(end)
        for _ in range(ATTEMPTS):
            several = edge.op == -1 and self.paths.is_worth_several(to)
            offer = self._make_offer(edge, dial=not self._reach.we_dialled(to), several=several)
            if offer.dial:
                self._expect(end, offer, to)
            self._reach.send(to, offer)
            if offer.dial:
                with trio.move_on_after(ATTEMPT_S):
                    await place.filled.wait()
                self._expected.pop(offer.lane, None)
            else:
                await self._dial(end, offer, to)
            if place.filled.is_set() or self._places.get(end) is not place:
                return
            await trio.sleep(RETRY_S)
        name = self._reach.name_of(to)
        _give_up(place, LaneBroken(f"no data connection to {name} can be made"))

    async def _dial(self, end: LaneEnd, offer: OfferLane, member: Member) -> None:
        """Dial the lane of an offer; whoever offered it tries again if that fails."""
        try:
            lane = await self._dialled(offer, member)
        except NetworkError as e:
            self._reach.complain(member, e)
            return
        self._fill(end, self.paths.begin(lane, offer, member))

    async def _dialled(self, offer: OfferLane, member: Member) -> Lane:
        """Dial again over the next path for each that fails meanwhile: greetings are all alike."""
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


def _give_up(place: _LaneSlot, failure: LaneBroken) -> None:
    """Nobody shall get this lane; whoever waits for it gets the reason."""
    if place.lane is not None:
        place.lane.close()
    place.lane, place.failure = None, failure
    place.filled.set()
