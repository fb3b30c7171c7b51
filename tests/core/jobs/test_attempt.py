"""What an op does next, and how it ends."""

import math

import msgspec
import pytest

from pmesh.core.jobs import attempt as attempts
from pmesh.core.jobs.attempt import (
    Fail,
    FetchResult,
    NextStep,
    OpState,
    ReportLate,
    RequestView,
    Run,
    WaitForNews,
)
from pmesh.core.jobs.progress import Progress
from pmesh.core.jobs.rank import RankState
from pmesh.core.values import OpOutcome, Roster, Terms, Verdict
from pmesh.core.wire.calls import Call
from pmesh.core.wire.views import RankProgress
from pmesh.ids import OpNumber
from tests.worlds.ranks import (
    BARRIER,
    FAILED,
    ME,
    ONE,
    OTHER,
    RESULT,
    THIRD,
    ZERO,
    failed,
    rank_of,
    roster,
    trainer,
)

ELSEWHERE = OpOutcome(ZERO, (ME, OTHER), holders=(OTHER,))
ALONE = roster(3, trainers=[trainer(ME)])


def call(rank: RankState[str], called: Call = BARRIER, *, timeout_s: float = 2.0) -> OpState:
    root, receivers = attempts.roles_in(rank, called)
    number = OpNumber(rank.ledger.started + 1)
    op = OpState(number=number, call=called, timeout_s=timeout_s, root=root, receivers=receivers)
    attempts.start(rank, op, 0.0)
    return op


def next_of(rank: RankState[str], op: OpState, *, newcomers: int = 0, nbytes: int = 0) -> NextStep:
    return attempts.next_step(rank, op, newcomers=lambda: newcomers, retained_bytes=nbytes)


def end(rank: RankState[str], called: Call = BARRIER) -> None:
    op = call(rank, called)
    rank.complete(op.number, RESULT, (ME, OTHER))


def test_an_op_runs_where_nothing_is_in_its_way() -> None:
    rank = rank_of()
    assert next_of(rank, call(rank)) == Run()


def test_what_a_view_has_failed_fails_and_uses_up_its_number() -> None:
    rank = rank_of()
    op = call(rank)
    rank.follow(roster(3, failed(ZERO)))
    assert next_of(rank, op) == Fail(failed(ZERO))
    told = attempts.end_failed(rank, op, failed(ZERO))
    assert (told.verdict, told.consumed, told.world) == (FAILED, True, None)
    assert rank.ledger.ended == 0


@pytest.mark.parametrize(("later", "world"), [((), (ME,)), ((ELSEWHERE,), None)])
def test_a_failure_changes_no_world_if_a_later_op_has_ended_elsewhere(
    later: tuple[OpOutcome, ...], world: tuple[object, ...] | None
) -> None:
    """O5: it has ended among the ranks of before, so its call must mean the same ranks here."""
    rank = rank_of()
    op = call(rank)
    failure = OpOutcome(ZERO, (ME,), verdict=FAILED)
    rank.follow(roster(3, failure, *(msgspec.structs.replace(each, op=ONE) for each in later)))
    told = attempts.end_failed(rank, op, failure)
    assert (told.world and told.world.trainers) == world


def test_a_rank_that_is_left_behind_takes_its_call_back() -> None:
    rank = rank_of()
    op = call(rank)
    rank.end(FAILED)
    step = next_of(rank, op)
    assert isinstance(step, Fail)
    assert not attempts.end_failed(rank, op, step.outcome).consumed
    assert rank.ledger.started < 0


def test_a_late_failure_answers_a_call_that_nobody_has_the_result_of() -> None:
    rank = rank_of()
    end(rank)
    op = call(rank)
    rank.follow(roster(3, failed(ZERO)))
    assert next_of(rank, op) == ReportLate()
    told = attempts.report_late(rank)
    assert (told.verdict, told.consumed, rank.late_failure) == (FAILED, False, None)


@pytest.mark.parametrize(("ended", "world"), [(1, (ME,)), (2, None)])
def test_the_world_of_a_failure_is_told_only_if_no_later_op_has_ended_here(
    ended: int, world: tuple[object, ...] | None
) -> None:
    """I5 and O5."""
    rank = rank_of()
    for _ in range(ended):
        end(rank)
    rank.late_failure = OpOutcome(ZERO, (ME,), verdict=FAILED)
    told = attempts.report_late(rank)
    assert (told.world and told.world.trainers) == world


def test_what_others_have_completed_is_fetched_before_a_late_failure_is_reported() -> None:
    """I4; and the failure is the cause of this op's, should that fail after all."""
    rank = rank_of()
    end(rank)
    op = call(rank)
    elsewhere = msgspec.structs.replace(ELSEWHERE, op=ONE)
    rank.follow(roster(3, failed(ZERO), elsewhere))
    assert next_of(rank, op) == FetchResult(elsewhere)
    other = Verdict("RankLost", "its last holder is lost")
    assert attempts.end_failed(rank, op, failed(ONE, other)).verdict == FAILED


def test_a_late_fetch_has_a_new_deadline_with_each_view() -> None:
    rank = rank_of()
    op = call(rank)
    attempts.begin_attempt(rank, op, 1.0)
    assert op.deadline == 2.0
    rank.follow(roster(3, ELSEWHERE))
    attempts.begin_attempt(rank, op, 1.0)
    assert op.deadline == 3.0
    assert math.isfinite(call(rank_of(), timeout_s=math.inf).deadline)


def test_what_a_rank_cannot_run_is_a_matter_for_all() -> None:
    rank = rank_of()
    op = call(rank)
    op.doomed = Verdict("UsageError", "no memory", (ME,))
    assert next_of(rank, op) == RequestView(op.doomed, ZERO)
    rank.follow(roster(3, ELSEWHERE))  # the others have it, and go on without this rank
    step = next_of(rank, op)
    assert isinstance(step, RequestView)
    assert step.op == -1
    assert step.verdict is not None
    assert (step.verdict.error, step.verdict.trainers) == ("RankLost", (ME,))


def test_unstable_ops_are_bounded_in_number_and_bytes() -> None:
    rank = rank_of()
    for _ in range(attempts.MAX_UNSTABLE_OPS):
        end(rank)
    op = call(rank)
    assert next_of(rank, op) == WaitForNews("room")
    rank.stabilize(0)
    assert next_of(rank, op) == Run()
    assert next_of(rank, op, nbytes=attempts.MAX_UNSTABLE_BYTES + 1) == WaitForNews("room")


def test_an_op_waits_for_a_quorum_for_ranks_and_for_the_end_of_a_fence() -> None:
    rank = rank_of()
    op = call(rank)
    rank.fence("own stall")
    assert next_of(rank, op) == WaitForNews("fence")
    rank.roster = msgspec.structs.replace(rank.roster, terms=Terms(min_ranks=3))
    assert next_of(rank, op) == WaitForNews("ranks")
    assert next_of(rank, op, newcomers=1) == WaitForNews("fence")
    rank.in_force = False
    assert next_of(rank, op) == WaitForNews("quorum")
    rank.follow(roster(3, ELSEWHERE))
    rank.in_force = False
    assert next_of(rank, op) == WaitForNews("quorum")  # V10: for what others have completed too


def test_newcomers_wait_for_an_op_that_their_view_would_fail() -> None:
    """O4: an op that is bound to its ranks can't run again at those that have not ended it."""
    rank = rank_of()
    end(rank, Call("scatter", "float32", (8,)))
    op = call(rank, Call("sync", "int64", (8,)))
    assert next_of(rank, op, newcomers=1) == WaitForNews("room")
    assert next_of(rank, op) == Run()
    rank.stabilize(0)
    assert next_of(rank, op, newcomers=1) == RequestView(None, op.number)


def test_a_sync_lets_newcomers_in_first() -> None:
    rank = rank_of()
    op = call(rank, Call("sync", "int64", (8,)))
    assert next_of(rank, op, newcomers=1) == RequestView(None, ZERO)
    assert next_of(rank, op) == Run()


def test_a_broadcast_whose_root_is_lost_fails() -> None:
    """O5: the root is the trainer that it was at the call."""
    rank = rank_of()
    op = call(rank, Call("broadcast", "float32", (8,), root=1, receivers=(0,)))
    assert (op.root, op.receivers) == (OTHER, (ME,))
    assert next_of(rank, op) == Run()
    rank.follow(ALONE)
    step = next_of(rank, op)
    assert isinstance(step, RequestView)
    assert step.verdict is not None
    assert step.verdict.error == "RankLost"
    assert "its root, rank 1, is lost" in step.verdict.message


@pytest.mark.parametrize(
    ("after", "lost"),
    [(ALONE, (OTHER,)), (roster(3, trainers=[trainer(i) for i in (ME, OTHER, THIRD)]), ())],
)
def test_what_is_bound_to_its_ranks_fails_once_they_have_changed(
    after: Roster, lost: tuple[object, ...]
) -> None:
    """O4."""
    rank = rank_of()
    op = call(rank, Call("all_gather", "float32", (8,)))
    assert next_of(rank, op) == Run()
    rank.follow(after)
    step = next_of(rank, op)
    assert isinstance(step, RequestView)
    assert step.verdict is not None
    assert (step.verdict.error, step.verdict.trainers) == ("RosterChanged", lost)


def test_an_op_that_breaks_its_lanes_thrice_fails() -> None:
    rank = rank_of()
    op = call(rank)
    verdicts = [attempts.break_lanes(rank, op, "a lane has ended") for _ in range(3)]
    assert verdicts == [None, None, Verdict("LaneBroken", "a lane has ended", (ME,))]


def test_a_call_that_differs_is_blamed_on_nobody_but_who_saw_it() -> None:
    verdict = attempts.differs(rank_of(), ONE, "rank 1 called a barrier")
    assert verdict.error == "OpMismatch"
    assert verdict.message == "op 1 of job 'digits': rank 1 called a barrier"


def test_a_timeout_says_on_whom_the_op_has_waited() -> None:
    rank = rank_of()
    op, progress = call(rank), Progress([rank])
    late = attempts.timed_out(rank, op, progress, 0)
    assert (late.error, late.trainers) == ("OpTimedOut", (OTHER,))
    assert late.message.endswith("did not end within 2 s: not started by rank 1 (mac-1)")
    progress.hear(RankProgress(rank.roster.job, 2, OTHER, 0, -1, 1))
    assert "the network is slow" in attempts.timed_out(rank, op, progress, 0).message
    rank.roster = msgspec.structs.replace(rank.roster, terms=Terms(min_ranks=3))
    assert attempts.timed_out(rank, op, progress, 0).error == "NotEnoughRanks"


@pytest.mark.parametrize(("kind", "stable"), [("barrier", 0), ("broadcast", -1)])
def test_what_was_before_a_barrier_has_ended_at_all(kind: str, stable: int) -> None:
    rank = rank_of()
    end(rank)
    op = call(rank, Call(kind, "float32", (8,), root=0))
    rank.complete(op.number, RESULT, (ME, OTHER))
    rank.pass_barrier(op.number, kind)
    assert rank.ledger.stable == stable


def test_what_a_lone_rank_has_ended_is_stable() -> None:
    rank = rank_of()
    rank.follow(ALONE)
    end(rank)
    rank.pass_barrier(ZERO, "broadcast")
    assert rank.ledger.stable == 0
