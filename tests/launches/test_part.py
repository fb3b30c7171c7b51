"""When the ranks of one machine are started, ended and killed."""

import signal
from dataclasses import replace

from pmesh.launches.rules.part import (
    LocalRanks,
    PartStep,
    ReportEnd,
    Say,
    SignalRank,
    StartRank,
    Warn,
    begin,
    end,
    give_up,
    next_deadline,
    op_completed,
    pass_time,
    rank_ended,
)
from pmesh.launches.rules.restarts import AT_ONCE_S, STEADY_S


def begun(*ranks: int, restarts: int = 10) -> LocalRanks:
    step = begin(LocalRanks(restarts=restarts, grace_s=3.0), 0, ranks, now=100.0)
    assert step.actions == tuple(map(StartRank, ranks))
    return step.part


def test_a_rank_that_ends_well_is_reported_and_not_started_again() -> None:
    step = rank_ended(begun(0, 1), 1, 0, now=101.0)
    assert step.actions == (ReportEnd(1, 0),)
    assert not step.part.is_over
    assert rank_ended(step.part, 0, 0, now=102.0).part.is_over


def test_a_rank_that_fails_is_started_again_after_a_wait() -> None:
    step = rank_ended(begun(0), 0, 3, now=101.0)
    text = "ended with exit code 3; it is started again in 1 s, unless all ranks have failed"
    assert step.actions[0] == Say(0, text)
    assert next_deadline(step.part) == 102.0
    assert pass_time(step.part, now=101.9) == PartStep(step.part)
    again = pass_time(step.part, now=102.0)
    assert again.actions == (StartRank(0),)
    assert next_deadline(again.part) is None
    twice = rank_ended(again.part, 0, -9, now=102.5)
    assert twice.actions == (Say(0, "ended by SIGKILL; it is started again in 2 s"),)


def test_a_rank_that_fails_too_often_is_reported() -> None:
    part = rank_ended(begun(0, restarts=1), 0, 3, now=101.0).part
    step = rank_ended(pass_time(part, now=102.0).part, 0, 4, now=103.0)
    said, report = step.actions
    assert isinstance(said, Say)
    assert "failed 2 times in a row, each time in less than 60 s" in said.text
    assert report == ReportEnd(0, 4)


def test_without_restarts_the_first_failure_is_reported() -> None:
    assert rank_ended(begun(0, restarts=0), 0, 3, now=101.0).actions == (ReportEnd(0, 3),)


def test_a_signal_reaches_those_that_run_and_ends_those_that_wait() -> None:
    part = rank_ended(begun(0, 1, 2), 1, 3, now=101.0).part
    part = rank_ended(part, 2, 0, now=101.0).part
    step = end(part, signal.SIGINT, now=101.5)
    assert step.actions == (SignalRank(0, signal.SIGINT), ReportEnd(1, -signal.SIGINT))
    assert next_deadline(step.part) == 104.5
    killed = pass_time(step.part, now=104.5)
    assert killed.actions == (SignalRank(0, signal.SIGKILL),)
    assert next_deadline(killed.part) is None
    over = rank_ended(killed.part, 0, -9, now=104.6)
    assert over.actions == (ReportEnd(0, -9),)
    assert over.part.is_over


def test_ranks_that_have_lost_their_starter_get_a_short_grace() -> None:
    patient = replace(begun(0), grace_s=30.0)
    assert end(patient, signal.SIGTERM, now=101.0, is_lost=True).part.kill_at == 103.0
    ending = end(patient, signal.SIGINT, now=101.0).part
    assert ending.kill_at == 131.0
    assert end(ending, signal.SIGTERM, now=102.0, is_lost=True).part.kill_at == 104.0
    hasty = replace(begun(0), grace_s=0.5)
    assert end(hasty, signal.SIGTERM, now=101.0, is_lost=True).part.kill_at == 101.5


def test_a_second_signal_does_not_put_off_the_end() -> None:
    step = end(end(begun(0), signal.SIGINT, now=101.0).part, signal.SIGTERM, now=103.0)
    assert step.actions == (SignalRank(0, signal.SIGTERM),)
    assert next_deadline(step.part) == 104.0


def test_a_deadline_is_over_with_the_ranks() -> None:
    part = end(begun(0), signal.SIGTERM, now=101.0).part
    assert next_deadline(rank_ended(part, 0, 0, now=101.1).part) is None


def test_another_generation_begins_anew() -> None:
    over = rank_ended(begun(0, restarts=0), 0, 3, now=101.0).part
    step = begin(over, 1, [4], now=102.0)
    assert step.actions == (StartRank(4),)
    assert (step.part.generation, step.part.is_over) == (1, False)


def failed(part: LocalRanks, rank: int, *, at: float) -> PartStep:
    return rank_ended(part, rank, 3, now=at)


def warnings(step: PartStep) -> list[Warn]:
    return [action for action in step.actions if isinstance(action, Warn)]


def test_only_a_first_run_that_completes_no_op_fails_at_once() -> None:
    step = failed(begun(0), 0, at=101.0)
    assert warnings(step) == [Warn(0, "at once")]
    assert warnings(failed(pass_time(step.part, now=102.0).part, 0, at=102.5)) == []
    assert warnings(failed(begun(0), 0, at=100.0 + AT_ONCE_S)) == []
    assert warnings(rank_ended(begun(0), 0, -9, now=101.0)) == []  # somebody has killed it
    trained = op_completed(begun(0), 0, syncs=True)
    assert trained.actions == ()
    assert warnings(failed(trained.part, 0, at=101.0)) == []


def test_a_rank_that_has_waited_in_no_job_for_a_minute_says_so() -> None:
    step = failed(begun(0), 0, at=100.0 + STEADY_S)
    assert warnings(step) == [Warn(0, "in a fixed job")]
    assert failed(begun(0), 0, at=99.9 + STEADY_S).actions == (
        Say(0, "ended with exit code 3; it is started again in 1 s"),
    )


def test_a_rank_that_completes_an_op_again_fails_no_more() -> None:
    part = pass_time(failed(begun(0, 1), 0, at=101.0).part, now=102.0).part
    step = op_completed(part, 0, syncs=False)
    assert step.actions == (Warn(0, "no more"),)
    assert op_completed(step.part, 0, syncs=True).actions == ()
    assert op_completed(step.part, 2, syncs=True) == PartStep(step.part)


def test_a_rank_of_a_job_that_nobody_can_enter_says_so_whenever_it_fails() -> None:
    part = op_completed(begun(0), 0, syncs=False).part
    step = failed(part, 0, at=1000.0)
    assert warnings(step) == [Warn(0, "in a fixed job")]
    again = pass_time(step.part, now=1001.0).part
    assert warnings(failed(again, 0, at=1100.0)) == [Warn(0, "in a fixed job")]
    part = op_completed(again, 0, syncs=True).part
    assert warnings(failed(part, 0, at=1100.0)) == []


def test_a_rank_that_is_given_up_ends_with_the_code_it_failed_with() -> None:
    waits = failed(begun(0), 0, at=101.0).part
    step = give_up(waits, 0)
    assert step.actions == (ReportEnd(0, 3),)
    assert step.part.is_over
    killed = give_up(pass_time(waits, now=102.0).part, 0)
    assert killed.actions == (SignalRank(0, signal.SIGKILL),)
    step = rank_ended(killed.part, 0, -9, now=102.1)
    assert step.actions == (ReportEnd(0, 3),)
    assert step.part.is_over


def test_a_rank_that_works_or_has_ended_is_not_given_up() -> None:
    part = begun(0, 1)
    assert give_up(part, 0) == give_up(part, 7) == PartStep(part)
    over = rank_ended(part, 1, 0, now=101.0).part
    assert give_up(over, 1) == PartStep(over)
