"""What the comparison makes of the lines of ranks, and its short form."""

from collections.abc import Mapping

import pytest

from tests.tools.running import run_tool
from tools.compare.judge import CallRecord, RankRecord, judge_call, judge_training, times_of

KILLED_AT, WATCHED_UNTIL = 10.0, 40.0
EVERY_S = 0.5


def trained(until: float, *, pause_s: float = 0.0, weights: str = "same") -> RankRecord:
    """A step each half second, the first that begins after the kill so much later."""
    times = list[float]()
    at = 0.0
    while at <= until:
        times.append(at)
        at += EVERY_S
        if times[-1] <= KILLED_AT < at:
            at += pause_s
    return RankRecord(
        steps=dict(enumerate(times)),
        weights={step: f"{weights} {step}" for step in range(len(times))},
    )


def ended(after_s: float, error: str = "") -> RankRecord:
    record = trained(KILLED_AT)
    return RankRecord(
        steps=record.steps, weights=record.weights, ended=KILLED_AT + after_s, error=error
    )


def judged(*records: RankRecord, resumed: float | None = None) -> str:
    return judge_training(
        {0: records[0], 2: records[1]}, at=KILLED_AT, until=WATCHED_UNTIL, resumed=resumed
    )


def test_ranks_that_take_steps_go_on_after_their_longest_pause() -> None:
    both = trained(WATCHED_UNTIL, pause_s=1.0)

    assert judged(both, both) == "go on after 1.50 s with equal weights"


def test_the_weights_of_the_last_step_that_both_have_begun_are_compared() -> None:
    ahead, behind = trained(WATCHED_UNTIL), trained(WATCHED_UNTIL - 2)
    other = trained(WATCHED_UNTIL - 2, weights="others")
    other = RankRecord(steps=other.steps, weights={**other.weights, 0: behind.weights[0]})

    assert judged(ahead, behind).endswith("with equal weights")
    assert judged(ahead, other).endswith("with unequal weights")


def test_ranks_that_wait_for_the_one_that_was_stopped_are_said_to_wait() -> None:
    waited = trained(WATCHED_UNTIL, pause_s=19.8)

    assert judged(waited, waited, resumed=30.0) == "wait 20.3 s, then go on with equal weights"
    assert judged(waited, waited) == "go on after 20.30 s with equal weights"


def test_ranks_that_end_show_an_error_if_any_has_shown_one() -> None:
    assert judged(ended(0.1), ended(2, "OSError: x")) == "all end after 2.0 s: OSError: x"
    assert judged(ended(0.1), ended(0.2)) == "all end after 0.2 s: no error shown"


def test_ranks_that_print_nothing_at_the_end_of_the_watch_hang() -> None:
    stuck = trained(KILLED_AT + 4)

    assert judged(stuck, stuck) == "hang: no step from 4.0 s on until 30 s"


def test_ranks_that_do_different_things_are_named() -> None:
    assert judged(ended(1, "OSError: x"), trained(WATCHED_UNTIL)) == (
        "rank 0 ends after 1.0 s: OSError: x; rank 2 goes on, longest pause 0.5 s"
    )
    assert judged(ended(1), trained(20.0)).startswith("rank 0 ends after 1.0 s: no error shown")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (CallRecord(size=1000, values=(3.0, 6.0)), "a result of 1,000 values, 3 and 6"),
        (CallRecord(error="OpMismatch: x", after_s=0.1), "OpMismatch: x (after 0.1 s)"),
        (CallRecord(ended=True, after_s=1.0), "ended without a word after 1.0 s"),
        (CallRecord(after_s=150.0), "waits, 150 s so far"),
    ],
)
def test_what_a_rank_got_from_a_call_is_said(record: CallRecord, said: str) -> None:
    assert judge_call({0: record, 1: record}) == f"all: {said}"
    other = CallRecord(error="other")
    assert judge_call({1: other, 0: record}) == f"rank 0: {said}; rank 1: other (after 0.0 s)"


def test_a_ratio_is_of_two_turns_of_one_round() -> None:
    rounds: list[Mapping[str, float]] = [
        {"pmesh": 1.0, "gloo": 2.0},
        {"pmesh": 10.0, "gloo": 20.0},  # something else ran
        {"pmesh": 3.0, "gloo": 3.0},
    ]

    assert times_of(rounds, "pmesh") == {"pmesh": (3.0, 1.0), "gloo": (3.0, 2.0)}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_short_form_tells_an_error_from_a_result() -> None:
    code, output = run_tool("other-shape", "--systems", "pmesh,macfleet", within_s=110)

    assert code == 0, output
    assert "MacFleet is left out: name a Python that has it" in output
    assert "OpMismatch: op 0 of job 'compare' differs" in output
