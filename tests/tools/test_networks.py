"""The lab of slow networks, by real packets, and what the bench makes of its ranks' lines."""

import subprocess

import pytest

from tests.tools.running import run_tool
from tools.networks.lab import Profile, SlowLab
from tools.networks.results import StepLine, StepsTaken, verdicts_of, verdicts_of_calls

pytestmark = pytest.mark.slow


def steps(*took_s: float, ranks: int = 2) -> list[StepLine]:
    """The lines of a rank whose steps follow each other from 10.0 on."""
    lines, at = [StepLine(what="joined", at=9.0)], 10.0
    for seconds in took_s:
        at += seconds
        lines.append(StepLine(what="step", at=at, took_s=seconds, ranks=ranks))
    return lines


def test_an_outcome_counts_the_slowest_rank_and_the_step_that_is_under_way() -> None:
    ranks = [steps(1.0, 1.0, 1.0), [*steps(1.0, 2.0), StepLine(what="error", at=13.0)]]
    outcome = StepsTaken.of(ranks, began=10.0, ended=18.0, views=0)
    assert (outcome.steps, outcome.median_s, outcome.worst_s) == (2, 1.0, 5.0)
    assert (outcome.errors, outcome.alone) == (1, 0)


def test_steps_without_all_ranks_and_views_miss_their_bars() -> None:
    good = StepsTaken.of([steps(1.0), steps(1.0)], began=10.0, ended=11.0, views=0)
    alone = StepsTaken.of([steps(1.0, ranks=1), steps(1.0)], began=10.0, ended=11.0, views=2)
    assert {v.outcome for v in verdicts_of(good, good, short=False)} == {"met"}
    missed = {v.what for v in verdicts_of(alone, good, short=False) if v.outcome == "MISSED"}
    assert missed == {"views", "steps without all ranks"}


def test_small_calls_are_held_against_the_round_trip() -> None:
    found = StepsTaken.of([steps(0.12, 0.12)] * 2, began=10.0, ended=10.24, views=0)
    for round_trip_s, outcome in ((0.11, "met"), (0.1, "MISSED")):
        assert verdicts_of_calls(found, found, round_trip_s, short=False)[-1].outcome == outcome
    assert {v.outcome for v in verdicts_of_calls(found, found, 0.1, short=True)} == {"met"}


@pytest.mark.netns
def test_the_switch_delays_and_a_cut_holds_what_is_sent() -> None:
    with SlowLab(2, Profile(delay_ms=20)) as lab:
        one, two = lab.hosts
        assert lab.round_trip_s(one, two) >= 0.04
        lab.cut(one, two)
        with pytest.raises(subprocess.CalledProcessError):
            lab.round_trip_s(one, two, timeout_s=0.5)


@pytest.mark.netns
@pytest.mark.e2e
@pytest.mark.timeout(200)  # longer than the tool has
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("slow-steps", "crowded, seed 1, pmesh: "),
        ("slow-calls", "homes, seed 1, pmesh: "),
        ("slow-faults", "healed after a partition of 1 s, longest: "),
    ],
)
def test_the_short_forms_find_nothing_wrong(command: str, shown: str) -> None:
    pytest.importorskip("torch")  # gloo has its turn too
    code, output = run_tool(command, "--short", within_s=180)
    assert code == 0, output
    assert shown in output
