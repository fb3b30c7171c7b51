"""The short forms of the campaigns that kill ranks of trainings, and their judges."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.tools.running import run_tool
from tools.kills.calling import DONE, ENDED, GIVEN_UP, LOST, RAN
from tools.kills.calls import judge_calls
from tools.kills.campaign import KillTally, judge_losses, judge_steps
from tools.kills.maps import ITEMS, judge_results
from tools.kills.stages import Stages
from tools.kills.workloads import judge_errors
from tools.lab.measured import Results
from tools.lab.mesh import LabMesh
from tools.lab.results import read_results

_NEEDS = {
    "lora": "mlx_lm",
    "stages": "mlx",
    "stages-for-good": "mlx",
    "elastic-trainer": "accelerate",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "kills", "steps"),
    [
        # With fewer steps, rows that are lost in the first one change the loss at the end by 1 %.
        *((kind, 1, 300) for kind in ("elastic", "elastic-trainer")),
        *((kind, 1, 100) for kind in ("ddp", "fsdp")),
        ("lora", 1, 60),  # the rank that comes back loads mlx_lm while the others train
        ("stages", 2, 60),  # an agent and a machine
        ("stages-for-good", 2, 60),
    ],
)
def test_a_short_campaign_finds_nothing(tmp_path: Path, kind: str, kills: int, steps: int) -> None:
    pytest.importorskip(_NEEDS.get(kind, "torch"))
    results = tmp_path / "kills.json"
    options = [kind, "--episodes", str(kills), "--steps", str(steps), "--json", str(results)]
    if kind == "lora":  # of the weights, every bit is compared
        options += ["--", "--val-batches", "2"]

    code, output = run_tool(*options, within_s=590)

    assert code == 0, output
    (measured,) = read_results(results, Results).measured
    assert measured.violations == ()
    assert measured.facts["kills"] == kills
    assert measured.facts["trainings"] >= 1
    back = measured.facts.get("s until the killed rank took part again, median")
    assert back if kind in {"lora", "stages"} else measured.recovery_s


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_map_with_a_kill_uses_each_result_once(tmp_path: Path) -> None:
    results = tmp_path / "maps.json"

    # A busy machine misses the bar, which the exit code tells, or even the kill.
    _, output = run_tool("map-kills", "--short", "--json", str(results), within_s=290)

    (measured,) = read_results(results, Results).measured
    assert measured.violations == (), output
    assert measured.ops_checked == ITEMS


@pytest.mark.parametrize(
    ("results", "violation"),
    [
        ([[0, 1], [1, 2]], ""),
        ([[0, 1]], "1 results of 2 items, or in another order"),
        ([[1, 2], [0, 1]], "2 results of 2 items, or in another order"),
        ([[0, 3], [1, 2]], "item 0 has a result of 3, which did not run it"),
    ],
)
def test_a_result_of_another_item_or_process_is_a_violation(
    results: list[list[int]], violation: str
) -> None:
    tally = KillTally()

    judge_results(tally, 2, results, {1: [0], 2: [1], 3: [1]}, lost=[3])

    assert tally.violations == [violation] * bool(violation)


def test_an_item_that_two_living_processes_ran_is_a_violation() -> None:
    tally = KillTally()

    judge_results(tally, 1, [[0, 1]], {1: [0], 2: [0]}, lost=[])

    assert tally.violations == ["item 0 has run 2 times"]


@pytest.mark.parametrize(
    ("after_s", "errors"),
    [
        (0.1, ["RankLost: rank 1 (b)", "RankLost: rank 1 (b), again"]),
        (0.1, ["RankLost: rank 0 (a)"] * 2),
        (9.0, ["RankLost: rank 1 (b)"] * 2),
    ],
)
def test_another_error_or_a_late_one_is_a_violation(after_s: float, errors: list[str]) -> None:
    tally = KillTally(recovery_s=[after_s])

    judge_errors(tally, "kill 1", "rank 1 ", errors)

    assert len(tally.violations) == 1


@pytest.mark.parametrize(
    "error",
    [
        "RankLost: rank 1 (b) is lost",
        "RosterChanged: op 5 of job 'x' did not end at every rank it is bound to: rank 1 (b)",
    ],
)
def test_the_same_error_at_all_that_names_the_lost_rank_is_none(error: str) -> None:
    tally = KillTally(recovery_s=[0.1])

    judge_errors(tally, "kill 1", "rank 1 ", [error] * 2)

    assert tally.violations == []


def test_other_weights_after_a_step_are_a_violation() -> None:
    tally = KillTally()

    judge_steps(tally, "training 1", {1: {"a"}, 2: {"a", "b"}})

    assert tally.violations == ["training 1: step 2 is torn: weights ['a', 'b']"]


@pytest.mark.parametrize(
    ("ends", "violations"),
    [
        ([(0, ["a"]), (1, ["b", "c"]), (2, ["d"])], 0),
        ([(1, ["c", "d"]), (0, ["a", "b"])], 0),  # as the layers are dealt anew
        ([(0, ["a", "b"]), (1, ["x", "d"])], 1),
        ([(0, ["a", "b"]), (1, ["c"])], 1),
    ],
)
def test_another_weight_of_a_layer_is_a_violation_whatever_stage_has_it(
    ends: list[tuple[int, list[str]]], violations: int
) -> None:
    tally = KillTally()
    undisturbed: Any = _ended([(0, ["a", "b"]), (1, ["c", "d"])])
    trained: Any = _ended(ends)
    workload = Stages(steps=1, pause_s=0.0, loads_s=0.0, mesh=LabMesh(0))

    workload.judge(undisturbed, tally)
    workload.judge(trained, tally)

    assert len(tally.violations) == violations


def _ended(ends: list[tuple[int, list[str]]]) -> SimpleNamespace:
    """A training whose ranks have said that they end so."""
    ranks = [
        SimpleNamespace(
            reports=[{"step": 0, "loss": 2.0}],
            last={"stage": stage, "digests": digests}.get,
        )
        for stage, digests in ends
    ]
    return SimpleNamespace(name="a training", ranks=ranks, everyone=ranks)


@pytest.mark.parametrize("losses", [[2.0, 2.0, 2.001], [2.03] * 3, [float("nan")] * 3, []])
def test_another_loss_is_a_violation(losses: list[float]) -> None:
    tally = KillTally(losses=[2.0])

    judge_losses(tally, "training 1", losses)

    assert len(tally.violations) == 1


@pytest.mark.parametrize(
    ("ran", "ended", "violation"),
    [
        ({1: [7], 2: [8]}, [(7, DONE), (8, DONE), (9, GIVEN_UP)], ""),
        ({1: [7], 2: [7]}, [(7, DONE)], "call 7 has run twice"),
        ({1: [7], 2: []}, [(7, DONE), (8, DONE)], "call 8 has a result, and has not run"),
        ({1: [7], 2: [8]}, [(7, LOST), (8, LOST), (9, LOST)], "call 7 is lost, and 1 is not"),
    ],
)
def test_calls_that_run_twice_or_are_lost_without_a_loss_are_violations(
    ran: dict[int, list[int]], ended: list[tuple[int, int]], violation: str
) -> None:
    tally, lost = KillTally(), {0: {2}}
    records = {number: np.array([(call,) for call in calls], RAN) for number, calls in ran.items()}

    judge_calls(tally, records, np.array(ended, ENDED), lost)

    assert tally.violations == [violation] * bool(violation)
    assert tally.ops_checked == len(ended)
