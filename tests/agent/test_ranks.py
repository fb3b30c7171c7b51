"""One rank's ledger, fence and results, while views steer it."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import trio
from trio.testing import wait_all_tasks_blocked

from pmesh.agent.lane_desk import LaneDesk
from pmesh.agent.ranks import LocalRank, Result
from pmesh.core.messages import Call, Concern
from pmesh.core.views import OpOutcome, Roster, Trainer, Verdict
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, OpNumber, Rank, Slot
from pmesh.net.arena_pools import SessionArenas
from tests.agent.fakes import NoReach

A, B = (Member(NodeId(bytes([i]) * 32), Incarnation(i)) for i in (1, 2))
BARRIER = Call("barrier", "float32", (0,))
FAILED = Verdict("OpTimedOut", "too late", (Rank(1),))
ZERO, ONE = OpNumber(0), OpNumber(1)


def roster(number: int, *outcomes: OpOutcome, lost: Sequence[Verdict] = ()) -> Roster:
    trainers = Trainer(A, Slot(0)), Trainer(A, Slot(1))
    born = Epoch(2, *A)
    names = ("a", "a")
    return Roster(JobName("digits"), born, number, trainers, names, outcomes, tuple(lost))


@asynccontextmanager
async def rank_of(*outcomes: OpOutcome) -> AsyncGenerator[tuple[LocalRank, LaneDesk]]:
    arenas = SessionArenas(limit_bytes=2**20)
    rank = LocalRank(roster(2, *outcomes), Rank(0), arenas, "test.py")
    async with trio.open_nursery() as nursery:
        desk = LaneDesk(A, NoReach(), nursery, bytes)
        try:
            yield rank, desk
        finally:
            desk.close()
            await arenas.aclose()


async def output(rank: LocalRank, nbytes: int = 8) -> Result:
    return Result(arena=await rank.arenas.outputs.acquire(nbytes), nbytes=nbytes)


async def test_what_waits_behind_a_fence_is_delivered_when_the_roster_stays() -> None:
    async with rank_of() as (rank, desk):
        rank.start(ZERO, BARRIER)
        with rank.attempt() as attempt:
            rank.fence()
            rank.fence()  # a second proposal
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rank.unfenced)
                await wait_all_tasks_blocked()
                rank.follow(roster(2), desk)
        assert not attempt.cancelled_caught


async def test_what_waits_behind_a_fence_is_never_delivered_under_another_number() -> None:
    delivered = False

    async def deliver(rank: LocalRank) -> None:
        nonlocal delivered
        with rank.attempt():
            await rank.unfenced()
            delivered = True

    async with rank_of() as (rank, desk):
        rank.start(ZERO, BARRIER)
        rank.fence()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deliver, rank)
            await wait_all_tasks_blocked()
            rank.follow(roster(3), desk)
        assert not delivered


async def test_nor_is_what_was_about_to_run_when_the_view_came() -> None:
    delivered, data = False, trio.Event()

    async def deliver(rank: LocalRank) -> None:
        nonlocal delivered
        with rank.attempt():
            await data.wait()
            await rank.unfenced()
            delivered = True

    async with rank_of() as (rank, desk):
        rank.start(ZERO, BARRIER)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deliver, rank)
            await wait_all_tasks_blocked()
            data.set()  # its last record has come: the task is already on its way
            rank.follow(roster(3), desk)
        assert not delivered


async def test_a_failed_op_is_kept_until_its_trainer_has_been_told() -> None:
    async with rank_of() as (rank, desk):
        rank.start(ZERO, BARRIER)
        rank.follow(roster(3, OpOutcome(ZERO, verdict=FAILED)), desk)
        rank.stabilize(0)  # the others have told theirs
        assert rank.verdict_on(ZERO) == FAILED
        rank.fail(ZERO, FAILED)
        rank.stabilize(0)
        assert rank.ledger.stable == 0


async def test_an_op_in_question_is_kept_until_the_leader_has_compared_the_calls() -> None:
    async with rank_of() as (rank, _):
        rank.start(ZERO, BARRIER)
        rank.complete(ZERO, Result(arena=None, nbytes=0))
        rank.concern = Concern(JobName("digits"), rank.roster.born, 2, FAILED, 0)
        rank.stabilize(0)
        assert rank.report().ranks[0].ops
        rank.concern = Concern(JobName("digits"), rank.roster.born, 2, FAILED)
        rank.stabilize(0)
        assert not rank.report().ranks[0].ops


async def test_an_op_that_had_returned_is_owed_to_the_trainer_also_when_it_is_stable() -> None:
    for stable in (False, True):
        async with rank_of() as (rank, desk):
            rank.start(ZERO, BARRIER)
            rank.complete(ZERO, Result(arena=None, nbytes=0))
            if stable:
                rank.stabilize(0)
            rank.follow(roster(3, OpOutcome(ZERO, verdict=FAILED)), desk)
            assert rank.owed == FAILED
            rank.owed = None
            if not stable:
                rank.follow(roster(4, OpOutcome(ZERO, verdict=FAILED)), desk)
                assert rank.owed is None  # once


async def test_a_call_that_is_taken_back_was_never_made() -> None:
    async with rank_of() as (rank, _):
        rank.start(ZERO, BARRIER)
        rank.complete(ZERO, Result(arena=None, nbytes=0))
        rank.start(ONE, BARRIER)
        rank.take_back(ONE)
        assert rank.ledger.started == 0
        rank.stabilize(0)
        assert rank.ledger.stable == 0


async def test_each_view_resolves_the_ops_anew() -> None:
    async with rank_of(OpOutcome(ZERO, holders=(Rank(1),))) as (rank, desk):
        assert rank.holders_of(ZERO) == (1,)  # it missed the view in which its job began
        rank.follow(roster(3), desk)
        assert rank.holders_of(ZERO) == ()
        lost = Verdict("RankLost", "rank 1 is lost", (Rank(1),))
        rank.follow(roster(4, lost=[lost]), desk)
        assert rank.verdict_on(ZERO) == lost
        rank.end(FAILED)
        rank.end(lost)
        assert rank.over == FAILED
        assert rank.released.is_set()


async def test_results_are_held_until_stable_and_then_given_back() -> None:
    async with rank_of() as (rank, _):
        rank.start(ZERO, BARRIER)
        rank.complete(ZERO, await output(rank))
        assert rank.retained_bytes == 8
        held = rank.result_of(ZERO)
        rank.stabilize(0)
        assert rank.retained_bytes == 0
        again = await output(rank)
        assert held is not None
        assert again.arena is held.arena  # reused
        rank.start(ONE, BARRIER)
        rank.complete(ONE, again)
        rank.give_up_results()  # the session's memory goes
        rank.stabilize(1)
        assert rank.result_of(ONE) is None


def test_a_rank_says_which_it_is() -> None:
    rank = LocalRank(roster(2), Rank(1), SessionArenas(limit_bytes=1), "test.py")
    assert repr(rank) == "<LocalRank 1 of 'digits', roster 2>"
