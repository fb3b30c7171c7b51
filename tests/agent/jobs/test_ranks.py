"""One rank's attempts, fences and memory, while views steer it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent.jobs.ranks import KeptResult, LocalRank
from pmesh.agent.lanes.rendezvous import LaneRendezvous
from pmesh.net.sessions.arena_pools import SessionArenas
from tests.worlds.lanes import share_of_one
from tests.worlds.ranks import (
    BARRIER,
    FAILED,
    ME,
    ONE,
    OTHER,
    THIRD,
    ZERO,
    A,
    failed,
    roster,
    trainer,
)
from tests.worlds.village import NoReach


@asynccontextmanager
async def rank_of() -> AsyncGenerator[LocalRank]:
    arenas = SessionArenas(share_of_one(2**20))
    rank = LocalRank(roster(2), trainer(ME), arenas, "test.py")
    try:
        yield rank
    finally:
        await arenas.aclose()


async def output(rank: LocalRank, nbytes: int = 8) -> KeptResult:
    return KeptResult(arena=await rank.arenas.outputs.acquire(nbytes), nbytes=nbytes)


async def test_what_waits_behind_a_fence_is_delivered_when_the_roster_stays() -> None:
    async with rank_of() as rank:
        rank.start(ZERO, BARRIER)
        with rank.attempt() as attempt:
            rank.fence("view change")
            rank.fence("view change")  # a second proposal
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rank.unfenced)
                await wait_all_tasks_blocked()
                rank.follow(roster(2))
        assert not attempt.cancelled_caught


async def test_what_waits_behind_a_fence_is_never_delivered_under_another_number() -> None:
    delivered = False

    async def deliver(rank: LocalRank) -> None:
        nonlocal delivered
        with rank.attempt():
            await rank.unfenced()
            delivered = True

    async with rank_of() as rank:
        rank.start(ZERO, BARRIER)
        rank.fence("view change")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deliver, rank)
            await wait_all_tasks_blocked()
            rank.follow(roster(3))
        assert not delivered


async def test_nor_is_what_was_about_to_run_when_the_view_came() -> None:
    delivered, data = False, trio.Event()

    async def deliver(rank: LocalRank) -> None:
        nonlocal delivered
        with rank.attempt():
            await data.wait()
            await rank.unfenced()
            delivered = True

    async with rank_of() as rank:
        rank.start(ZERO, BARRIER)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deliver, rank)
            await wait_all_tasks_blocked()
            data.set()  # its last record has come: the task is already on its way
            rank.follow(roster(3))
        assert not delivered


async def test_a_view_change_stops_what_serves_results_of_the_last_roster() -> None:
    async with rank_of() as rank:
        serving = trio.CancelScope()
        rank.serving.add(serving)
        rank.follow(roster(2))
        assert not serving.cancel_called
        rank.follow(roster(3))
        assert serving.cancel_called


async def test_an_op_stands_still_since_something_last_moved_but_not_before_it_began(
    autojump_clock: MockClock,
) -> None:
    async with rank_of() as rank:
        rank.fence("view change")  # between two ops
        assert rank.halted_since is None
        await trio.sleep(1)
        rank.busy_since = autojump_clock.current_time()
        rank.start(ZERO, BARRIER)
        rank.fence("view change")
        assert rank.halted_since == 1.0
        rank.follow(roster(2))  # it was not concerned
        assert rank.halted_since is None
        for _ in range(2):
            await trio.sleep(1)
            rank.lanes.ended_traffic = (5, 0)  # by the first count, and no more after it
            rank.lanes.note_traffic()
        rank.fence("view change")
        assert rank.halted_since == 2.0
        rank.fail(failed(ZERO))
        rank.start(ONE, BARRIER)
        assert rank.halted_since is None


async def test_a_rank_without_a_place_waits_for_the_view_that_says_so() -> None:
    async with rank_of() as rank:
        rank.follow(roster(3, trainers=[trainer(OTHER), trainer(THIRD)]))
        with rank.attempt() as attempt:
            async with trio.open_nursery() as nursery:
                rendezvous = LaneRendezvous(A, NoReach(), nursery, bytes, awaits=lambda _: True)
                nursery.start_soon(rank.ring, rendezvous)
                await wait_all_tasks_blocked()
                rendezvous.close()
                rank.end(FAILED)
        assert attempt.cancelled_caught


async def test_results_are_held_until_stable_and_then_given_back() -> None:
    async with rank_of() as rank:
        rank.start(ZERO, BARRIER)
        rank.complete(ZERO, await output(rank), (ME, OTHER))
        assert rank.retained_bytes == 8
        held = rank.results.get(ZERO)
        rank.stabilize(0)
        assert rank.retained_bytes == 0
        again = await output(rank)
        assert held is not None
        assert again.arena is held.arena  # reused
        rank.start(ONE, BARRIER)
        rank.complete(ONE, again, (ME, OTHER))
        rank.give_up_results()  # the session's memory goes
        rank.stabilize(1)
        assert rank.results.get(ONE) is None
