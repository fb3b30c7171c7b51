"""The lane rendezvous of two agents, joined by a fake link and by socket pairs."""

import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from itertools import count

import trio

from pmesh.agent.lanes.rendezvous import LaneEnd, LaneKey, LaneRendezvous
from pmesh.core.wire.lanes import OfferLane, Splice
from pmesh.core.wire.preamble import PREAMBLE_BYTES
from pmesh.errors import NetworkError, PeerUnreachable
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, TrainerId
from pmesh.net.lanes.lane import Lane
from pmesh.net.lanes.multipath import LanePath
from pmesh.net.lanes.opening import dial_lane
from tests.worlds.kept import kept

A, B, C = (Member(NodeId(bytes([i]) * 32), Incarnation(i)) for i in (1, 2, 3))
JOB = JobName("digits")


def edge(number: int = 5, op: int = -1, *, host: Member = A) -> LaneKey:
    return LaneKey(JOB, Epoch(1, *A), number, host, TrainerId(0), TrainerId(1), op)


class Side:
    """One agent's rendezvous, its link to the other, and its door."""

    def __init__(self, me: Member, nursery: trio.Nursery, *, dials: bool) -> None:
        numbers = count(me.incarnation * 1000)
        self.entropy: Callable[[int], bytes] = lambda size: next(numbers).to_bytes(size, "big")
        self.rendezvous = LaneRendezvous(
            me,
            self,
            nursery,
            self.entropy,
            awaits=lambda _: self.has_roster,
        )
        self.has_roster = True
        self.me = me
        self.dials = dials
        self.offers: list[OfferLane] = []
        self.complaints: list[NetworkError] = []
        self.other: Side
        self.link_is_up = True
        self.unreachable = 0
        self.late = False
        self._nursery = nursery
        self.begun: list[Lane] = []
        """The lanes that have been opened to other agents."""
        self._begin = self.rendezvous.paths.begin
        self.rendezvous.paths.begin = self._note_begin  # type: ignore[method-assign]

    def _note_begin(self, first: Lane, offer: OfferLane, member: Member) -> Lane:
        self.begun.append(self._begin(first, offer, member))
        return self.begun[-1]

    @property
    def keeps_nothing(self) -> bool:
        """True if no lane is here, is being opened, or is awaited."""
        found = kept(self.rendezvous)
        return not (found["places"] or found["openings"] or found["expected"])

    def send(self, member: Member, message: OfferLane | Splice) -> None:
        assert member == self.other.me
        assert isinstance(message, OfferLane)
        self.offers.append(message)
        if self.link_is_up:
            self.other.rendezvous.accept(self.me, message)

    def we_dialled(self, member: Member) -> bool:
        assert member == self.other.me
        return self.dials

    async def dial_member(self, member: Member) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        assert member == self.other.me
        if self.unreachable:
            self.unreachable -= 1
            raise PeerUnreachable("it refuses connections")
        ours, theirs = socket.socketpair()
        streams = [trio.SocketStream(trio.socket.from_stdlib_socket(end)) for end in (ours, theirs)]
        self._nursery.start_soon(self.other.answer_acceptor, streams[1])
        return streams[0]

    def relay_of(self, _: Member) -> Member | None:
        return None

    def paths_to(self, _: Member) -> tuple[LanePath, ...]:
        return ()

    async def answer_acceptor(self, stream: trio.SocketStream) -> None:
        preamble = await stream.receive_some(PREAMBLE_BYTES)

        def authenticated() -> None:
            if self.late:
                raise PeerUnreachable("its time at the door was over")

        try:
            await self.rendezvous.welcome(stream, bytes(preamble), authenticated)
        except NetworkError as e:
            self.complaints.append(e)
        finally:
            await trio.aclose_forcefully(stream)  # if the rendezvous has not taken it

    def name_of(self, member: Member) -> str:
        return "ada" if member == A else "bob"

    def complain(self, member: Member, error: NetworkError) -> None:
        assert member == self.other.me
        self.complaints.append(error)


@asynccontextmanager
async def two_sides(*, ada_dials: bool = True) -> AsyncGenerator[tuple[Side, Side]]:
    async with trio.open_nursery() as nursery:
        ada, bob = Side(A, nursery, dials=ada_dials), Side(B, nursery, dials=not ada_dials)
        ada.other, bob.other = bob, ada
        try:
            yield ada, bob
        finally:
            nursery.cancel_scope.cancel()
            ada.rendezvous.close()
            bob.rendezvous.close()


async def take(side: Side, *, sending: bool, of: LaneKey | None = None) -> Lane:
    with trio.fail_after(60):
        return await side.rendezvous.take(LaneEnd(of or edge(), sending=sending))


async def dial_as_offered(side: Side, offer: OfferLane) -> Lane:
    """Dial once more than a side would by itself."""
    return await dial_lane(await side.dial_member(B), offer, peer="bob")


def made_offer(side: Side, of: LaneKey, *, dial: bool) -> OfferLane:
    """An offer as the side would send it."""
    return OfferLane(
        job=of.job,
        born=of.born,
        number=of.number,
        sender=of.sender,
        receiver=of.receiver,
        op=of.op,
        lane=side.entropy(16),
        key=side.entropy(32),
        return_key=side.entropy(32),
        dial=dial,
    )


async def opened(ada: Side, bob: Side) -> None:
    sending, receiving = await take(ada, sending=True), await take(bob, sending=False)
    assert (sending.sending, sending.peer) == (True, "bob")
    assert (receiving.sending, receiving.peer) == (False, "ada")
    sending.close()
    receiving.close()
