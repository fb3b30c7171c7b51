"""A member forwards a connection between two others that can't reach each other."""

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent.lanes.rendezvous import LaneEnd, LaneRendezvous
from pmesh.agent.lanes.splices import ARRIVAL_S, IDLE_S, MAX_ALL_SPLICES, MAX_DIALS, MAX_SPLICES
from pmesh.core.ops.moving import plan_broadcast
from pmesh.core.ops.plan import RankPlan
from pmesh.core.wire.lanes import OfferLane, Splice
from pmesh.core.wire.preamble import PREAMBLE_BYTES, Preamble, encode_preamble
from pmesh.errors import LaneBroken, NetworkError, PeerUnreachable
from pmesh.ids import Member
from pmesh.net.lanes import native
from pmesh.net.lanes.executor import run_plan
from pmesh.net.lanes.opening import dial_lane, welcome_lane
from tests.agent.lanes.sides import A, B, C, edge
from tests.worlds.builders import make_member
from tests.worlds.faults import Faults, Real
from tests.worlds.kept import kept
from tests.worlds.lanes import EMPTY, descriptors, header, offer_between
from tests.worlds.trainer import together, until
from tests.worlds.village import NoReach

TICKET = b"t" * 16


def connection() -> tuple[trio.SocketStream, trio.SocketStream]:
    ours, theirs = socket.socketpair()
    near, far = (trio.SocketStream(trio.socket.from_stdlib_socket(end)) for end in (ours, theirs))
    return near, far


class SplicingAgent(NoReach):
    """The one that forwards, and what Cara gets."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.rendezvous = LaneRendezvous(B, self, nursery, bytes, awaits=lambda _: True)
        self.caras: list[trio.SocketStream] = []
        self.complaints: list[NetworkError] = []
        self.is_cara_up = True

    def we_dialled(self, member: Member) -> bool:
        return member in (A, C)

    async def dial_member(self, member: Member) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        assert member == C
        if not self.is_cara_up:
            raise PeerUnreachable("it refuses connections")
        near, far = connection()
        self.caras.append(far)
        return near

    def complain(self, member: Member, error: NetworkError) -> None:
        assert member in {A, C}
        self.complaints.append(error)

    async def connect(self, ticket: bytes = TICKET) -> trio.SocketStream:
        """Ada's end of a connection whose preamble names this ticket."""
        near, far = connection()
        with suppress(LaneBroken):
            await self.rendezvous.welcome(far, encode_preamble(Preamble(ticket)), lambda: None)
            return near
        await far.aclose()
        return near


@asynccontextmanager
async def between() -> AsyncGenerator[SplicingAgent]:
    async with trio.open_nursery() as nursery:
        there = SplicingAgent(nursery)
        yield there
        nursery.cancel_scope.cancel()
    for stream in there.caras:
        await stream.aclose()


async def receive(stream: trio.SocketStream, size: int) -> bytes:
    received = b""
    while len(received) < size and (data := await stream.receive_some(size - len(received))):
        received += data
    return received


async def test_bytes_go_both_ways_and_an_end_ends_both(autojump_clock: MockClock) -> None:
    assert autojump_clock
    async with between() as here:
        here.rendezvous.accept(A, Splice(TICKET, C))
        ada = await here.connect()
        await ada.send_all(b"sealed for Cara")
        await until(lambda: bool(here.caras))
        (cara,) = here.caras
        assert await receive(cara, 15) == b"sealed for Cara"
        sent = bytes(range(256)) * 4096
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cara.send_all, sent)
            assert await receive(ada, len(sent)) == sent
        await ada.aclose()
        assert await receive(cara, 1) == b""


async def test_the_library_runs_ops_over_a_connection_that_is_forwarded(faults: Faults) -> None:
    """At both ends it is a lane like any other."""
    runs = list[RankPlan]()

    def run(real: Real, library: Any, plan: RankPlan, *rest: Any, **values: Any) -> Any:  # noqa: ANN401
        runs.append(plan)
        return real(library, plan, *rest, **values)

    faults.around(native, "run", run)
    offer, value = offer_between(0, 1), np.random.default_rng(1).bytes(3_000_000)
    got, plans = bytearray(len(value)), [message_plan(rank, len(value)) for rank in (0, 1)]
    async with between() as here:
        here.rendezvous.accept(A, Splice(TICKET, C))
        ada = await here.connect()

        async def send() -> None:
            lane = await dial_lane(ada, offer, peer="cara")
            source = memoryview(value)
            await run_plan(plans[0], {1: lane}, {}, header(), source=source, result=EMPTY)
            lane.close()

        async def receive_it() -> None:
            await until(lambda: bool(here.caras))
            await receive(here.caras[0], PREAMBLE_BYTES)
            lane = await welcome_lane(here.caras[0], offer, peer="ada")
            target = memoryview(got)
            await run_plan(plans[1], {}, {0: lane}, header(), source=EMPTY, result=target)
            lane.close()

        await together(send, receive_it)
    assert got == value
    assert len(runs) == 2


def message_plan(rank: int, nbytes: int) -> RankPlan:
    return plan_broadcast(rank=rank, size=2, root=0, nbytes=nbytes)


async def test_a_ticket_serves_once_and_not_for_long(autojump_clock: MockClock) -> None:
    assert autojump_clock
    async with between() as here:
        here.rendezvous.accept(A, Splice(TICKET, C))
        first, second = await here.connect(), await here.connect()
        assert await receive(second, 1) == b""
        here.rendezvous.accept(A, Splice(b"u" * 16, C))
        await trio.sleep(ARRIVAL_S + 1)
        late = await here.connect(b"u" * 16)
        assert await receive(late, 1) == b""
        for stream in (first, second, late):
            await stream.aclose()


@pytest.mark.parametrize("room_again_after", ["they have ended", "nobody came"])
async def test_what_one_member_makes_another_forward_is_limited(
    autojump_clock: MockClock, room_again_after: str
) -> None:
    assert autojump_clock
    async with between() as here:
        tickets = [bytes([number]) * 16 for number in range(MAX_SPLICES)]
        for ticket in tickets:
            here.rendezvous.accept(A, Splice(ticket, C))
        here.rendezvous.accept(A, Splice(TICKET, C))
        refused = await here.connect()
        assert await receive(refused, 1) == b""
        await refused.aclose()

        if room_again_after == "they have ended":
            for ticket in tickets:
                await (await here.connect(ticket)).aclose()
        await trio.sleep(ARRIVAL_S + 1)
        here.rendezvous.accept(A, Splice(TICKET, C))
        ada = await here.connect()
        await ada.send_all(b"x")
        await trio.sleep(0.1)
        assert await receive(here.caras[-1], 1) == b"x"
        await ada.aclose()


async def test_what_all_members_make_another_forward_is_limited(autojump_clock: MockClock) -> None:
    assert autojump_clock
    async with between() as here:
        splices = here.rendezvous.splices
        askers = [make_member(letter) for letter in "qrstuvwx"]
        for number in range(len(askers) * MAX_SPLICES):
            ticket = number.to_bytes(16, "big")
            here.rendezvous.accept(askers[number // MAX_SPLICES], Splice(ticket, C))
        await wait_all_tasks_blocked()
        assert kept(splices)["awaited"] == MAX_ALL_SPLICES
        for asker in askers:
            here.rendezvous.lose(asker)
        await wait_all_tasks_blocked()
        assert not any(kept(splices).values())


async def test_what_is_idle_for_a_minute_is_closed(autojump_clock: MockClock) -> None:
    async with between() as here:
        before = descriptors()
        here.rendezvous.accept(A, Splice(TICKET, C))
        ada = await here.connect()
        await until(lambda: bool(here.caras))
        (cara,) = here.caras
        for sends, receives in ((ada, cara), (cara, ada)):
            await trio.sleep(IDLE_S - 1)
            await sends.send_all(b"x")
            assert await receive(receives, 1) == b"x"
        since = autojump_clock.current_time()
        with trio.fail_after(2 * IDLE_S):
            assert await receive(ada, 1) == await receive(cara, 1) == b""
        assert autojump_clock.current_time() == pytest.approx(since + IDLE_S, abs=0.1)
        await ada.aclose()
        await cara.aclose()
        assert descriptors() == before


@pytest.mark.parametrize("lost", [A, C], ids=["who has asked", "where it leads"])
async def test_what_is_continued_for_a_peer_or_to_it_goes_with_its_link(
    autojump_clock: MockClock, lost: Member
) -> None:
    async with between() as here:
        before = descriptors()
        adas = list[trio.SocketStream]()
        for number in range(MAX_SPLICES):
            ticket = bytes([number]) * 16
            here.rendezvous.accept(A, Splice(ticket, C))
            if number % 2:  # the others never come
                adas.append(await here.connect(ticket))
        await until(lambda: len(here.caras) == len(adas))
        here.rendezvous.lose(lost)
        for stream in (*adas, *here.caras):
            assert await receive(stream, 1) == b""
            await stream.aclose()
        assert descriptors() == before
        assert not kept(here.rendezvous.splices)["under_way"]
        assert autojump_clock.current_time() < 1


async def test_a_member_makes_another_dial_a_few_at_a_time(
    autojump_clock: MockClock, faults: Faults
) -> None:
    dials = 0

    async def nobody_answers(_: Member) -> trio.SocketStream:
        nonlocal dials
        dials += 1
        await trio.sleep_forever()
        raise AssertionError("nobody answers")

    async with between() as here:
        faults.instead(here, "dial_member", nobody_answers)
        for number in range(MAX_SPLICES):
            here.rendezvous.accept(A, Splice(bytes([number]) * 16, C, dial=True))
        await trio.sleep(1)
        assert dials == MAX_DIALS
        assert autojump_clock.current_time() >= 1


async def test_a_connection_that_can_not_go_on_is_closed(autojump_clock: MockClock) -> None:
    assert autojump_clock
    async with between() as here:
        here.is_cara_up = False
        here.rendezvous.accept(A, Splice(TICKET, C))
        ada = await here.connect()
        assert await receive(ada, 1) == b""
        await until(lambda: bool(here.complaints))
        assert [str(error) for error in here.complaints] == ["it refuses connections"]
        await ada.aclose()


class FirewalledAgents(NoReach):
    """Three agents, of which the outer two can't reach each other; links go one way only."""

    def __init__(self, nursery: trio.Nursery, dialled: set[tuple[Member, Member]]) -> None:
        self._nursery = nursery
        self._dialled = dialled
        self.ends = {member: FirewalledAgent(member, self, nursery) for member in (A, B, C)}

    async def dial(self, member: Member, peer: Member) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        if (member, peer) not in self._dialled:
            raise PeerUnreachable("there is a firewall")
        near, far = connection()
        self._nursery.start_soon(self.ends[peer].answer, far)
        return near

    def has_dialled(self, member: Member, peer: Member) -> bool:
        return (member, peer) in self._dialled or (member, peer) == (A, C)


class FirewalledAgent(NoReach):
    """One of them."""

    def __init__(self, me: Member, agents: FirewalledAgents, nursery: trio.Nursery) -> None:
        self.me = me
        self.agents = agents
        numbers = count(me.incarnation * 1000)
        self.rendezvous = LaneRendezvous(
            me,
            self,
            nursery,
            lambda size: next(numbers).to_bytes(size, "big"),
            awaits=lambda _: True,
        )

    def send(self, member: Member, message: OfferLane | Splice) -> None:
        self.agents.ends[member].rendezvous.accept(self.me, message)

    def we_dialled(self, member: Member) -> bool:
        return self.agents.has_dialled(self.me, member)

    def relay_of(self, member: Member) -> Member | None:
        return B if {self.me, member} == {A, C} else None

    async def dial_member(self, member: Member) -> trio.SocketStream:
        return await self.agents.dial(self.me, member)

    async def answer(self, stream: trio.SocketStream) -> None:
        authenticated: list[bool] = []
        try:
            preamble = await receive(stream, PREAMBLE_BYTES)
            await self.rendezvous.welcome(stream, preamble, lambda: authenticated.append(True))
        finally:
            if not authenticated:
                await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("first", [(A, B), (B, A)], ids=["A dialled B", "B dialled A"])
@pytest.mark.parametrize("second", [(B, C), (C, B)], ids=["B dialled C", "C dialled B"])
async def test_each_leg_is_dialled_as_its_link_was(
    autojump_clock: MockClock, first: tuple[Member, Member], second: tuple[Member, Member]
) -> None:
    assert autojump_clock
    async with trio.open_nursery() as nursery:
        agents = FirewalledAgents(nursery, {first, second})
        for sender, receiver in ((A, C), (C, A)):
            there = edge(host=sender)
            agents.ends[sender].rendezvous.offer(there, receiver)
            for member in (sender, receiver):
                end = LaneEnd(there, sending=member == sender)
                (await agents.ends[member].rendezvous.take(end)).close()
        nursery.cancel_scope.cancel()


async def test_who_asks_to_be_dialled_and_names_no_lane_gets_nothing(
    autojump_clock: MockClock,
) -> None:
    assert autojump_clock
    async with between() as here:
        here.rendezvous.accept(A, Splice(TICKET, B))
        ada = await here.connect()
        await ada.send_all(bytes(PREAMBLE_BYTES))
        assert await receive(ada, 1) == b""
        await until(lambda: bool(here.complaints))
        await ada.aclose()
