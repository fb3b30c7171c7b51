"""One rank's ledger, fence and results, while views steer it."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent.jobs.ranks import LocalRank, Result
from pmesh.agent.lanes.rendezvous import LaneDesk
from pmesh.core.values import OpOutcome, Primary, Roster, Trainer, Verdict
from pmesh.core.wire.link import Call, Concern
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, OpNumber, Slot, TrainerId
from pmesh.net.local.arena_pools import SessionArenas
from tests.worlds.lanes import share_of_one
from tests.worlds.village import NoReach

A, B = (Member(NodeId(bytes([i]) * 32), Incarnation(i)) for i in (1, 2))
BARRIER = Call("barrier", "float32", (0,))
ME, OTHER, THIRD = (TrainerId(i) for i in range(3))
FAILED = Verdict("OpTimedOut", "too late", (OTHER,))
ZERO, ONE, TWO = (OpNumber(i) for i in range(3))
NOTHING = Result(arena=None, nbytes=0)


def trainer(number: TrainerId, enters: OpNumber = ZERO) -> Trainer:
    return Trainer(number, A, Slot(number), f"mac-{number}", enters)


def roster(
    number: int,
    *outcomes: OpOutcome,
    trainers: Sequence[Trainer] = (trainer(ME), trainer(OTHER)),
    witnesses: Sequence[Trainer] = (),
) -> Roster:
    born = Epoch(2, *A)
    return Roster(
        JobName("digits"),
        born,
        number,
        tuple(trainers),
        Primary(born, (A,)),
        TrainerId(9),
        outcomes=outcomes,
        witnesses=tuple(witnesses),
    )


def failed(op: OpNumber, verdict: Verdict = FAILED) -> OpOutcome:
    return OpOutcome(op, (ME, OTHER), verdict=verdict)


@asynccontextmanager
async def rank_of(
    *outcomes: OpOutcome, enters: OpNumber = ZERO
) -> AsyncGenerator[tuple[LocalRank, LaneDesk]]:
    arenas = SessionArenas(share_of_one(2**20))
    me = trainer(ME, enters)
    first = roster(2, *outcomes, trainers=[me, trainer(OTHER)])
    rank = LocalRank(first, me, arenas, "test.py")
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
            rank.fence("view change")
            rank.fence("view change")  # a second proposal
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
        rank.fence("view change")
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
        rank.follow(roster(3, failed(ZERO)), desk)
        rank.stabilize(0)  # the others have told theirs
        assert rank.failure_of(ZERO) == failed(ZERO)
        rank.fail(failed(ZERO))
        rank.stabilize(0)
        assert rank.ledger.stable == 0


async def test_an_op_in_question_is_kept_until_the_leader_has_compared_the_calls() -> None:
    async with rank_of() as (rank, _):
        rank.start(ZERO, BARRIER)
        rank.complete(ZERO, NOTHING, (ME, OTHER))
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
            rank.complete(ZERO, NOTHING, (ME, OTHER))
            if stable:
                rank.stabilize(0)
            rank.follow(roster(3, failed(ZERO)), desk)
            assert rank.owed == failed(ZERO)
            rank.owed = None
            rank.follow(roster(4, failed(ZERO)), desk)
            assert rank.owed is None  # once


async def test_what_the_trainer_knows_to_have_failed_is_not_owed_when_a_later_view_repeats_it() -> (
    None
):
    async with rank_of() as (rank, desk):
        rank.start(ZERO, BARRIER)
        rank.follow(roster(3, failed(ZERO)), desk)
        rank.fail(failed(ZERO))
        rank.start(ONE, BARRIER)
        rank.stabilize(0)
        rank.follow(roster(4, failed(ZERO)), desk)  # another rank has not made it stable yet
        assert rank.ledger.stable == 0
        assert rank.owed is None


async def test_what_failed_before_a_trainer_entered_is_no_matter_of_its_own() -> None:
    async with rank_of(failed(ZERO), enters=ONE) as (rank, desk):
        rank.start(ONE, BARRIER)
        both = [rank.trainer, trainer(OTHER)]
        rank.follow(roster(3, failed(ZERO), trainers=both), desk)
        assert rank.owed is None


async def test_a_call_that_is_taken_back_was_never_made() -> None:
    async with rank_of() as (rank, _):
        rank.start(ZERO, BARRIER)
        rank.complete(ZERO, NOTHING, (ME, OTHER))
        rank.start(ONE, BARRIER)
        rank.take_back(ONE)
        assert rank.ledger.started == 0
        rank.stabilize(0)
        assert rank.ledger.stable == 0


async def test_a_late_failure_takes_the_running_call_back_before_anybody_hears_of_it_again() -> (
    None
):
    """I5: the others may be in another call of the same number by then, which would differ."""
    async with rank_of() as (rank, desk):
        rank.start(ZERO, BARRIER)
        rank.complete(ZERO, NOTHING, (ME, OTHER))
        rank.start(ONE, BARRIER)
        rank.follow(roster(3, failed(ZERO)), desk)
        assert rank.owed == failed(ZERO)
        assert [report.op for report in rank.report().ranks[0].ops] == [ZERO]
        mark = rank.marks()
        assert (mark.started, mark.fingerprint) == (0, 0)


async def test_a_late_failure_leaves_alone_what_others_have_completed() -> None:
    """I4: the result is fetched, and the failure is told by the next call."""
    async with rank_of() as (rank, desk):
        rank.start(ZERO, BARRIER)
        rank.complete(ZERO, NOTHING, (ME, OTHER))
        rank.start(ONE, BARRIER)
        elsewhere = OpOutcome(ONE, (ME, OTHER), holders=(OTHER,))
        rank.follow(roster(3, failed(ZERO), elsewhere), desk)
        assert rank.owed == failed(ZERO)
        assert rank.marks().started == 1


async def test_each_view_resolves_the_ops_anew() -> None:
    async with rank_of(OpOutcome(ZERO, (ME, OTHER), holders=(OTHER,))) as (rank, desk):
        outcome = rank.result_elsewhere(ZERO)  # it missed the view in which its job began
        assert outcome is not None
        assert outcome.holders == (OTHER,)
        rank.follow(roster(3), desk)
        assert rank.result_elsewhere(ZERO) is None
        rank.follow(roster(4, failed(ZERO)), desk)
        assert rank.failure_of(ZERO) == failed(ZERO)
        assert rank.failure_of(ONE) is None
        assert rank.result_elsewhere(ZERO) is None


async def test_the_first_reason_for_the_end_of_a_job_stays() -> None:
    async with rank_of() as (rank, _):
        rank.end(FAILED)
        rank.end(Verdict("RankLost", "rank 1 is lost"))
        assert rank.over == FAILED
        assert rank.released.is_set()
        failure = rank.failure_of(ZERO)
        assert failure is not None
        assert failure.verdict == FAILED


async def test_a_rank_that_the_others_go_on_without_is_superseded_and_serves_what_it_holds() -> (
    None
):
    async with rank_of() as (rank, desk):
        rank.start(ZERO, BARRIER)
        rank.complete(ZERO, await output(rank), (ME, OTHER))
        rank.start(ONE, BARRIER)
        others = [trainer(OTHER), trainer(THIRD)]
        rank.follow(roster(3, trainers=others, witnesses=[rank.trainer]), desk)
        assert rank.rank is None
        failure = rank.failure_of(ONE)
        assert failure is not None
        assert failure.verdict is not None
        assert failure.verdict.error == "HistorySuperseded"
        assert rank.result_of(ZERO) is not None
        assert rank.is_needed
        rank.take_back(ONE)
        rank.stabilize(0)  # the others have ended it
        assert not rank.is_needed


async def test_the_world_changes_when_a_call_returns_and_is_told_once() -> None:
    async with rank_of() as (rank, desk):
        rank.follow(roster(3, trainers=[trainer(ME), trainer(THIRD)]), desk)
        assert rank.world == (ME, OTHER)
        assert rank.describe_world().names == ("mac-0", "mac-1")
        assert rank.see((ME, OTHER)) is None
        seen = rank.see((ME, THIRD))
        assert seen is not None
        assert (seen.rank, seen.trainers, seen.names) == (0, (ME, THIRD), ("mac-0", "mac-2"))
        left = rank.see((THIRD,))
        assert left is not None
        assert left.rank == -1


async def test_who_has_just_entered_sees_nobody_yet() -> None:
    async with rank_of(enters=ONE) as (rank, _):
        assert rank.ledger.started == 0
        assert rank.world == ()
        assert rank.describe_world().rank == -1


async def test_after_an_own_stall_only_trust_ends_the_fence() -> None:
    async with rank_of() as (rank, desk):
        delivered = False

        async def deliver() -> None:
            nonlocal delivered
            await rank.unfenced()
            delivered = True

        rank.start(ZERO, BARRIER)
        rank.fence("own stall")
        rank.fence("view change")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deliver)
            rank.follow(roster(3), desk)
            await wait_all_tasks_blocked()
            assert not delivered
            rank.lift("own stall")
        assert delivered


async def test_a_view_change_stops_what_serves_results_of_the_last_roster() -> None:
    async with rank_of() as (rank, desk):
        serving = trio.CancelScope()
        rank.serving.add(serving)
        rank.follow(roster(2), desk)
        assert not serving.cancel_called
        rank.follow(roster(3), desk)
        assert serving.cancel_called


async def test_an_op_stands_still_since_something_last_moved_but_not_before_it_began(
    autojump_clock: MockClock,
) -> None:
    async with rank_of() as (rank, desk):
        rank.fence("view change")  # between two ops
        assert rank.halted_since is None
        await trio.sleep(1)
        rank.busy_since = autojump_clock.current_time()
        rank.start(ZERO, BARRIER)
        rank.fence("view change")
        assert rank.halted_since == 1.0
        rank.follow(roster(2), desk)  # it was not concerned
        assert rank.halted_since is None
        for _ in range(2):
            await trio.sleep(1)
            rank.lanes.ended_traffic = (5, 0)  # by the first look, and no more after it
            rank.lanes.look()
        rank.fence("view change")
        assert rank.halted_since == 2.0
        rank.fail(failed(ZERO))
        rank.start(ONE, BARRIER)
        assert rank.halted_since is None


async def test_a_rank_without_a_place_waits_for_the_view_that_says_so() -> None:
    async with rank_of() as (rank, desk):
        rank.follow(roster(3, trainers=[trainer(OTHER), trainer(THIRD)]), desk)
        with rank.attempt() as attempt:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rank.ring, desk)
                await wait_all_tasks_blocked()
                rank.end(FAILED)
        assert attempt.cancelled_caught


async def test_results_are_held_until_stable_and_then_given_back() -> None:
    async with rank_of() as (rank, _):
        rank.start(ZERO, BARRIER)
        rank.complete(ZERO, await output(rank), (ME, OTHER))
        assert rank.retained_bytes == 8
        held = rank.result_of(ZERO)
        rank.stabilize(0)
        assert rank.retained_bytes == 0
        await output(rank)
        again = await output(rank)
        assert held is not None
        assert again.arena is held.arena  # reused
        rank.start(ONE, BARRIER)
        rank.complete(ONE, again, (ME, OTHER))
        rank.give_up_results()  # the session's memory goes
        rank.stabilize(1)
        assert rank.result_of(ONE) is None


def test_a_rank_says_which_it_is() -> None:
    rank = LocalRank(roster(2), trainer(OTHER), SessionArenas(share_of_one(1)), "test.py")
    assert repr(rank) == "<LocalRank 1 of 'digits', roster 2>"
