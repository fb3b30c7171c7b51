"""What a peer has offered and nobody has taken: how much that is, and when it goes."""

import tracemalloc

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent.lanes.rendezvous import (
    EARLY_S,
    MAX_BESIDE,
    MAX_EARLY,
    MAX_JOBS_OVER,
    UNTAKEN_S,
    LaneEnd,
)
from pmesh.core.wire.lanes import Splice
from pmesh.core.wire.preamble import Preamble, encode_preamble
from pmesh.errors import LaneBroken
from pmesh.ids import JobName, Member, TrainerId
from tests.agent.lanes.sides import (
    JOB,
    A,
    B,
    C,
    dial_as_offered,
    edge,
    made_offer,
    opened,
    take,
    two_sides,
)
from tests.worlds.faults import Faults
from tests.worlds.kept import kept
from tests.worlds.lanes import descriptors


@pytest.mark.parametrize("ada_dials", [True, False])
async def test_an_offer_for_a_roster_that_is_not_here_waits_and_opens_nothing(
    autojump_clock: MockClock, *, ada_dials: bool
) -> None:
    async with two_sides(ada_dials=ada_dials) as (ada, bob):
        bob.has_roster = False
        ada.rendezvous.offer(edge(), B)
        await trio.sleep(3)
        assert bob.keeps_nothing
        bob.has_roster = True
        bob.rendezvous.forget(JOB, below=5)  # as when a view is installed
        await opened(ada, bob)
        assert len(ada.offers) == 1
        assert autojump_clock.current_time() < 3.1


async def test_offers_for_a_roster_that_never_comes_are_few_and_kept_for_10_s(
    autojump_clock: MockClock,
) -> None:
    async with two_sides() as (ada, bob):
        bob.has_roster = False
        before = descriptors()
        offers = [made_offer(ada, edge(n), dial=bool(n % 2)) for n in range(5, 2000)]
        for offer in offers:
            bob.rendezvous.accept(A, offer)
        other = made_offer(ada, edge(5, host=C), dial=True)
        bob.rendezvous.accept(C, other)
        await wait_all_tasks_blocked()
        preambles = [encode_preamble(Preamble(offer.lane)) for offer in (*offers, other)]
        kept_early = [bob.rendezvous.is_offered(preamble) for preamble in preambles]
        assert (sum(kept_early[:-1]), kept_early[-1]) == (MAX_EARLY, True)
        assert descriptors() == before
        await trio.sleep(EARLY_S + 0.1)
        bob.has_roster = True
        bob.rendezvous.forget(JOB, below=5)
        assert not any(map(bob.rendezvous.is_offered, preambles))
        assert bob.keeps_nothing
        assert autojump_clock.current_time() > EARLY_S


@pytest.mark.parametrize("op", [3, -2])
async def test_a_lane_beside_the_ring_that_nobody_takes_is_closed_after_10_s(
    autojump_clock: MockClock, op: int
) -> None:
    async with two_sides() as (ada, bob):
        before = descriptors()
        ada.rendezvous.offer(edge(op=op), B)
        (await take(ada, sending=True, of=edge(op=op))).close()
        await trio.sleep(UNTAKEN_S - 1)
        assert descriptors() == before + 1
        await trio.sleep(2)
        assert descriptors() == before
        assert bob.keeps_nothing
        assert autojump_clock.current_time() > UNTAKEN_S


async def test_a_lane_of_the_ring_waits_for_the_first_op_of_its_roster(
    autojump_clock: MockClock,
) -> None:
    async with two_sides() as (ada, bob):
        ada.rendezvous.offer(edge(), B)
        await trio.sleep(3600)
        await opened(ada, bob)
        assert bob.keeps_nothing
        assert autojump_clock.current_time() < 3601


async def test_between_two_ranks_a_few_lanes_wait_beside_the_ring_and_the_oldest_makes_way(
    autojump_clock: MockClock,
) -> None:
    async with two_sides() as (ada, bob):
        before = descriptors()
        for op in (-1, *range(50)):
            ada.rendezvous.offer(edge(op=op), B)
            (await take(ada, sending=True, of=edge(op=op))).close()
        await trio.sleep(0.1)
        assert descriptors() == before + 1 + MAX_BESIDE
        for op in (-1, 49):
            (await take(bob, sending=False, of=edge(op=op))).close()
        assert autojump_clock.current_time() < 1


@pytest.mark.parametrize("dial", [False, True])
async def test_offering_the_same_lane_again_and_again_keeps_one(
    autojump_clock: MockClock,
    dial: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    async with two_sides() as (ada, bob):
        before = descriptors()
        for _ in range(500):
            bob.rendezvous.accept(A, made_offer(ada, edge(), dial=dial))
        await trio.sleep(20)
        assert kept(bob.rendezvous)["openings"] <= 1
        assert kept(bob.rendezvous)["expected"] <= 1
        assert descriptors() <= before + 1
        assert autojump_clock.current_time() >= 20


async def test_all_that_a_peer_has_offered_goes_with_its_link(autojump_clock: MockClock) -> None:
    async with two_sides() as (ada, bob):
        before = descriptors()
        for receiver in range(1, 40):
            there = edge()._replace(receiver=TrainerId(receiver))
            ada.rendezvous.offer(there, B)
            (await take(ada, sending=True, of=there)).close()
        bob.rendezvous.accept(A, made_offer(ada, edge(op=-7), dial=False))
        await trio.sleep(0.1)
        assert descriptors() == before + 39
        bob.rendezvous.lose(A)
        await trio.sleep(0.1)
        assert descriptors() == before
        assert bob.keeps_nothing
        assert not kept(bob.rendezvous)["early"]
        assert autojump_clock.current_time() < 1


async def test_a_rank_that_asks_for_new_lanes_without_end_costs_one(
    autojump_clock: MockClock, faults: Faults
) -> None:
    """Of the lanes for messages between two ranks the latest counts: the others are given up."""
    under_way = 0

    async def nobody_answers(_: Member) -> trio.SocketStream:
        nonlocal under_way
        under_way += 1
        try:
            await trio.sleep_forever()
        finally:
            under_way -= 1
        raise AssertionError("nobody answers")

    async with two_sides() as (ada, _):
        faults.instead(ada, "dial_member", nobody_answers)
        for op in range(-2, -500, -1):
            ada.rendezvous.offer(edge(op=op), B)
            await wait_all_tasks_blocked()
            ada.rendezvous.give_up(LaneEnd(edge(op=op + 1), sending=True))
        await wait_all_tasks_blocked()
        assert under_way == 1
        assert kept(ada.rendezvous)["given_up"] == 1
        assert kept(ada.rendezvous)["places"] == 1
        for over in (-2, -100):
            with pytest.raises(LaneBroken, match="over"):
                await take(ada, sending=True, of=edge(op=over))
        assert autojump_clock.current_time() == 0


async def test_lanes_that_nobody_has_used_take_little_memory(autojump_clock: MockClock) -> None:
    async with two_sides() as (ada, bob):
        tracemalloc.start()
        try:
            for receiver in range(32):
                ada.rendezvous.offer(edge()._replace(receiver=TrainerId(receiver)), B)
            await trio.sleep(0.1)
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert len(bob.begun) == 32
        assert taken < 32 * 64 * 1024  # both ends: a record would take 16 times as much
        assert autojump_clock.current_time() < 1


async def test_names_of_jobs_that_are_over_are_not_kept_for_ever() -> None:
    async with two_sides() as (ada, _):
        for number in range(MAX_JOBS_OVER + 5):
            ada.rendezvous.forget(JobName(f"job {number}"), below=1)
        assert kept(ada.rendezvous)["over"] == MAX_JOBS_OVER


async def test_a_ticket_takes_no_connection_of_an_offered_lane() -> None:
    async with two_sides() as (ada, bob):
        offer = made_offer(ada, edge(), dial=False)
        bob.rendezvous.accept(A, offer)
        bob.rendezvous.accept(C, Splice(offer.lane, A))  # from one who has heard of it
        await wait_all_tasks_blocked()
        (await dial_as_offered(ada, offer)).close()
        (await take(bob, sending=False)).close()
