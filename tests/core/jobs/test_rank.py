"""One rank's ledger, late failures, world and results, while views steer it."""

from collections.abc import Callable

import msgspec
import pytest

from pmesh.core.jobs.rank import RankState
from pmesh.core.values import OpOutcome, Primary, Terms, Trainer, Verdict
from pmesh.core.wire.calls import Call
from pmesh.core.wire.records import fingerprint
from pmesh.core.wire.views import KnownPrimary
from pmesh.ids import Epoch, Incarnation, Member, NodeId, OpNumber, TrainerId
from tests.worlds.builders import make_member, unsigned
from tests.worlds.ranks import (
    BARRIER,
    FAILED,
    ME,
    ONE,
    OTHER,
    RESULT,
    THIRD,
    ZERO,
    A,
    RunsByItself,
    failed,
    rank_of,
    roster,
    trainer,
)


def on_its_own_machine(number: TrainerId) -> Trainer:
    home = Member(NodeId(bytes([1 + number]) * 32), Incarnation(1))
    return msgspec.structs.replace(trainer(number), member=home, said=unsigned(f"mac-{number}"))


def rank_in_its_second_op() -> RankState[str]:
    rank = rank_of()
    rank.start(ZERO, BARRIER)
    rank.complete(ZERO, RESULT, (ME, OTHER))
    rank.start(ONE, BARRIER)
    return rank


def test_a_failed_op_is_kept_until_its_trainer_has_been_told() -> None:
    rank = rank_of()
    rank.start(ZERO, BARRIER)
    rank.follow(roster(3, failed(ZERO)))
    rank.stabilize(0)  # the others have told theirs
    assert rank.failure_of(ZERO) == failed(ZERO)
    rank.fail(failed(ZERO))
    rank.stabilize(0)
    assert rank.ledger.stable == 0


def test_an_op_in_question_is_kept_until_the_leader_has_compared_the_calls() -> None:
    rank = rank_of()
    rank.start(ZERO, BARRIER)
    rank.complete(ZERO, RESULT, (ME, OTHER))
    rank.request_view(FAILED, 0)
    rank.stabilize(0)
    assert rank.report().ranks[0].ops
    rank.request_view(FAILED)
    rank.stabilize(0)
    assert not rank.report().ranks[0].ops


def test_the_late_failure_of_an_op_is_kept_for_the_trainer_also_when_the_op_is_stable() -> None:
    for stable in (False, True):
        rank = rank_of()
        rank.start(ZERO, BARRIER)
        rank.complete(ZERO, RESULT, (ME, OTHER))
        if stable:
            rank.stabilize(0)
        rank.follow(roster(3, failed(ZERO)))
        assert rank.late_failure == failed(ZERO)
        rank.late_failure = None
        rank.follow(roster(4, failed(ZERO)))
        assert rank.late_failure is None  # once


def test_a_failure_that_the_trainer_knows_is_not_late_when_a_later_view_repeats_it() -> None:
    rank = rank_of()
    rank.start(ZERO, BARRIER)
    rank.follow(roster(3, failed(ZERO)))
    rank.fail(failed(ZERO))
    rank.start(ONE, BARRIER)
    rank.stabilize(0)
    rank.follow(roster(4, failed(ZERO)))  # another rank has not made it stable yet
    assert rank.ledger.stable == 0
    assert rank.late_failure is None


def test_what_failed_before_a_trainer_entered_is_no_matter_of_its_own() -> None:
    rank = rank_of(failed(ZERO), enters=ONE)
    rank.start(ONE, BARRIER)
    both = [rank.trainer, trainer(OTHER)]
    rank.follow(roster(3, failed(ZERO), trainers=both))
    assert rank.late_failure is None


def test_a_call_that_is_taken_back_was_never_made() -> None:
    rank = rank_in_its_second_op()
    rank.take_back(ONE)
    assert rank.ledger.started == 0
    rank.stabilize(0)
    assert rank.ledger.stable == 0


def test_a_late_failure_takes_the_running_call_back_before_anybody_hears_of_it_again() -> None:
    """I5: the others may be in another call of the same number by then, which would differ."""
    rank = rank_in_its_second_op()
    rank.follow(roster(3, failed(ZERO)))
    assert rank.late_failure == failed(ZERO)
    assert [report.op for report in rank.report().ranks[0].ops] == [ZERO]
    mark = rank.progress()
    assert (mark.started, mark.fingerprint) == (0, 0)


def test_a_late_failure_leaves_alone_what_others_have_completed() -> None:
    """I4: the result is fetched, and the failure is told by the next call."""
    rank = rank_in_its_second_op()
    elsewhere = OpOutcome(ONE, (ME, OTHER), holders=(OTHER,))
    rank.follow(roster(3, failed(ZERO), elsewhere))
    assert rank.late_failure == failed(ZERO)
    assert rank.progress().started == 1


def test_each_view_resolves_the_ops_anew() -> None:
    rank = rank_of(OpOutcome(ZERO, (ME, OTHER), holders=(OTHER,)))
    outcome = rank.result_elsewhere(ZERO)  # it missed the view in which its job began
    assert outcome is not None
    assert outcome.holders == (OTHER,)
    rank.follow(roster(3))
    assert rank.result_elsewhere(ZERO) is None
    rank.follow(roster(4, failed(ZERO)))
    assert rank.failure_of(ZERO) == failed(ZERO)
    assert rank.failure_of(ONE) is None
    assert rank.result_elsewhere(ZERO) is None


def test_the_first_reason_for_the_end_of_a_job_stays() -> None:
    rank = rank_of()
    rank.end(FAILED)
    rank.end(Verdict("RankLost", "rank 1 is lost"))
    assert rank.over == FAILED
    failure = rank.failure_of(ZERO)
    assert failure is not None
    assert failure.verdict == FAILED


def test_a_rank_that_the_others_go_on_without_is_superseded_and_serves_what_it_holds() -> None:
    rank = rank_in_its_second_op()
    others = [trainer(OTHER), trainer(THIRD)]
    rank.follow(roster(3, trainers=others, lost_holders=[rank.trainer]))
    assert rank.rank is None
    failure = rank.failure_of(ONE)
    assert failure is not None
    assert failure.verdict is not None
    assert failure.verdict.error == "HistorySuperseded"
    assert rank.results.get(ZERO) is not None
    assert rank.is_needed
    rank.take_back(ONE)
    rank.stabilize(0)  # the others have ended it
    assert not rank.is_needed


def test_the_world_changes_when_a_call_returns_and_is_told_once() -> None:
    one, other, third = map(on_its_own_machine, (ME, OTHER, THIRD))
    rank = RankState[str](roster(2, trainers=[one, other]), one)
    rank.follow(roster(3, trainers=[one, third]))
    assert rank.world == (ME, OTHER)
    assert rank.describe_world().names == ("mac-0", "mac-1")
    assert rank.see((ME, OTHER)) is None
    seen = rank.see((ME, THIRD))
    assert seen is not None
    assert (seen.rank, seen.trainers, seen.names) == (0, (ME, THIRD), ("mac-0", "mac-2"))
    left = rank.see((THIRD,))
    assert left is not None
    assert left.rank == -1


def test_who_has_just_entered_sees_nobody_yet() -> None:
    rank = rank_of(enters=ONE)
    assert rank.ledger.started == 0
    assert rank.world == ()
    assert rank.describe_world().rank == -1


def test_a_rank_says_which_it_is() -> None:
    rank = RankState[str](roster(2), trainer(OTHER))
    assert repr(rank) == "<LocalRank 1 of 'digits', roster 2>"


def test_a_shortage_of_ranks_is_described() -> None:
    rank = rank_of()
    assert not rank.describe_shortage(0)
    rank.roster = msgspec.structs.replace(rank.roster, terms=Terms(min_ranks=4))
    assert rank.describe_shortage(1) == "2 of at least 4 ranks (min_ranks) are here"
    assert not rank.describe_shortage(2)  # those who wait for the next sync count
    rank.in_force = False
    assert "has not been seen to have agreed" in rank.describe_shortage(2)
    away, restarted = make_member("b"), make_member("r")
    primary = Primary(Epoch(2, *A), (away, restarted, A))  # two ranks are here, one is a newcomer
    rank.roster = msgspec.structs.replace(rank.roster, quorate=False, primary=primary)
    assert "1 of 3 ranks, which is no majority" in rank.describe_shortage(2)


def test_a_roster_that_is_in_force_stays_so_under_its_number() -> None:
    primary = Primary(Epoch(2, *A), (A,), ((A,),))
    first = msgspec.structs.replace(roster(2), primary=primary)
    rank = RankState[str](first, trainer(ME))
    assert not rank.may_run
    rank.learn([KnownPrimary(first.job, first.born, primary.epoch, in_force=True)])
    assert rank.may_run
    rank.learn(())
    assert rank.may_run
    assert rank.follow(msgspec.structs.replace(first, number=3))
    assert not rank.may_run


def test_nothing_is_delivered_behind_a_fence_until_each_has_been_lifted() -> None:
    rank = rank_of()
    rank.fence("own stall")
    rank.fence("view change")
    assert not rank.follow(roster(2))
    assert rank.fences == {"own stall"}
    rank.lift("own stall")
    assert not rank.fences


def test_that_a_job_syncs_is_noted_at_the_call() -> None:
    rank = rank_of()
    rank.start(ZERO, Call("sync", "int64", (8,)))
    assert rank.progress().synced == 0


def test_the_ring_has_neighbours_on_both_sides() -> None:
    rank = rank_of()
    rank.follow(roster(3, trainers=[trainer(ME), trainer(OTHER), trainer(THIRD)]))
    assert [neighbour.id for neighbour in rank.neighbours()] == [THIRD, OTHER]


# --- a rank that runs ops by itself


def running_by_itself(*outcomes: OpOutcome) -> RunsByItself:
    return RunsByItself(roster(2, *outcomes), trainer(ME))


def test_of_the_barriers_that_a_rank_has_run_by_itself_only_the_last_is_kept() -> None:
    rank = running_by_itself(OpOutcome(ZERO, (ME, OTHER), holders=(OTHER,)))
    rank.start(ZERO, BARRIER)
    rank.complete(ZERO, "an earlier result", (ME, OTHER))
    last, call = OpNumber(3), Call("all_reduce", "float32", (8,), "sum")
    assert rank.complete_barriers(last, call, RESULT) == ("an earlier result",)
    assert rank.results == {last: RESULT}
    assert rank.fingerprint == fingerprint(call)
    assert rank.result_elsewhere(ZERO) is None
    (report,) = rank.report().ranks
    assert report.stable == last - 1
    (op,) = report.ops
    assert (op.op, op.completed, op.contributors) == (last, True, (ME, OTHER))


def test_the_last_barrier_is_stable_once_the_others_have_ended_it_too() -> None:
    rank = running_by_itself()
    rank.complete_barriers(ONE, BARRIER, RESULT)
    assert rank.stabilize(ZERO) == ()
    assert rank.stabilize(ONE) == (RESULT,)


def test_how_far_a_rank_has_come_is_asked_while_it_runs_ops_by_itself() -> None:
    rank = running_by_itself()
    rank.end_ops(ONE)
    mark = rank.progress()
    assert (mark.started, mark.completed) == (ONE, ONE)
    assert rank.serves


@pytest.mark.parametrize(
    "decide",
    [
        RankState.report,
        lambda rank: rank.fence("view change"),
        lambda rank: rank.fence("own stall"),
        lambda rank: rank.follow(roster(3)),
        lambda rank: rank.follow(rank.roster),
        lambda rank: rank.request_view(FAILED, ONE),
        lambda rank: rank.end(FAILED),
    ],
    ids=["report", "fence", "doubt", "follow", "follow the same", "request", "end"],
)
def test_a_rank_runs_nothing_by_itself_once_something_is_decided(
    decide: Callable[[RankState[str]], object],
) -> None:
    rank = running_by_itself()
    rank.end_ops(ONE)
    decide(rank)
    assert rank.ledger.ended == ONE
    assert not rank.serves


def test_what_a_rank_has_run_by_itself_is_in_its_report() -> None:
    rank = running_by_itself()
    rank.end_ops(ONE)
    (report,) = rank.report().ranks
    assert [(op.op, op.completed) for op in report.ops] == [(ONE, True)]


def test_what_a_rank_has_run_by_itself_may_fail_late() -> None:
    """I5: the view names an op of which the agent did not know."""
    rank = running_by_itself()
    rank.end_ops(ONE)
    rank.follow(roster(3, failed(ONE)))
    assert rank.late_failure == failed(ONE)


def test_the_results_of_ops_that_a_rank_has_run_by_itself_are_released_at_its_end() -> None:
    rank = running_by_itself()
    rank.end_ops(ONE)
    assert rank.end(FAILED) == (RESULT,)
