# ruff: noqa: ANN401 - arrays of libraries that have no common type
"""Auto: each way is tried and timed, and all ranks stay with one."""

from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.client.feedback.call import _comparison
from pmesh.client.feedback.memory import ROUNDS, Trials
from pmesh.compression.schemes import BF16, INT8, Auto, PowerSGD, TopK
from pmesh.ids import TrainerId
from pmesh.testing import SimulatedMesh
from tests.client.feedback.compressed import gradient
from tests.worlds.faults import Faults

A, B, C = (TrainerId(i) for i in range(3))


def tried(trials: Trials, times_ns: list[tuple[int, int]]) -> None:
    """Two ranks go through trials that take them so long."""
    for mine, theirs in times_ns:
        trials.note(mine)
        trials.compare({A: (trials.begun, mine), B: (trials.begun, theirs)})


def test_the_winner_is_who_is_fastest_on_the_slowest_rank_without_the_first_round() -> None:
    trials = Trials((A, B), 3)
    tried(trials, [(9, 9), (1, 1), (90, 90)])  # does not count
    tried(trials, [(50, 60), (20, 40), (30, 30)])
    tried(trials, [(60, 50), (10, 45), (30, 35)])
    assert trials.are_over
    assert trials.best_ns() == [60, 40, 30]
    assert trials.winner(1.2) == 2
    assert trials.winner(2.0) == 2
    assert trials.winner(2.1) == 0


@pytest.mark.parametrize(
    ("trainers", "their_begun"), [((A, C), 2), ((A,), 2), ((A, B, C), 2), ((A, B), 0)]
)
def test_trials_begin_anew_with_other_ranks_or_one_that_has_not_seen_them(
    trainers: tuple[TrainerId, ...], their_begun: int
) -> None:
    trials = Trials((A, B), 2)
    tried(trials, [(5, 5)])
    trials.note(5)
    trials.compare(dict.fromkeys(trainers, (their_begun, 5)) | {A: (2, 5)})
    assert (trials.trainers, trials.begun, trials.agreed_ns) == (trainers, 0, [])


def test_a_trial_that_failed_is_made_again() -> None:
    trials = Trials((A, B), 2)
    trials.compare({A: (0, 0), B: (0, 0)})
    assert (trials.next_way, trials.progress()) == (0, "1 of 6")
    trials.compare({A: (0, 0), B: (0, 0)})
    assert trials.next_way == 0


def test_auto_tries_all_ways_and_then_stays_with_one_on_all_ranks() -> None:
    auto = Auto(allow=("bf16", TopK(0.1)))

    def program(mesh: pmesh.Mesh) -> list[tuple[str, str]]:
        seen: list[tuple[str, str]] = []
        for step in range(ROUNDS * 3 + 2):
            mesh.average_gradients(gradient(mesh.rank, step), compression=auto)
            assert mesh.last_op is not None
            seen.append((mesh.last_op.compression, mesh.last_op.why))
        return seen

    results = SimulatedMesh(2).run(program)
    assert results[0] == results[1]
    names = [name for name, _ in results[0]]
    assert names[:9] == ["none", "bf16", "topk(0.1)"] * 3
    assert names[9] == names[10]
    assert results[0][0][1] == "trial 1 of 9"
    assert results[0][9][1].startswith("tried on these ranks: none ")


@pytest.mark.parametrize("picked", ["none", "bf16", "topk(0.1)"])
def test_auto_takes_what_was_fastest(picked: str, faults: Faults) -> None:
    ways = ["none", "bf16", "topk(0.1)"]
    best_ns = [100 if way == picked else 1000 for way in ways]
    faults.instead(Trials, "best_ns", lambda _: best_ns)

    def program(mesh: pmesh.Mesh) -> Any:
        for step in range(10):
            mesh.all_reduce(gradient(mesh.rank, step), compression=Auto(allow=[*ways[1:2], "topk"]))
        assert mesh.last_op is not None
        return mesh.last_op.compression

    expected = "topk(0.01)" if picked.startswith("topk") else picked
    assert SimulatedMesh(2).run(program) == [expected] * 2


def test_auto_waits_until_all_that_is_allowed_may_begin() -> None:
    auto = Auto(allow=["int8", PowerSGD(1, start_step=2)])

    def program(mesh: pmesh.Mesh) -> list[str]:
        seen: list[str] = []
        for step in range(5):
            mesh.average_gradients(gradient(mesh.rank, step), compression=auto)
            assert mesh.last_op is not None
            seen.append(mesh.last_op.compression)
        return seen

    expected = ["none", "none", "none", "int8", "powersgd(1, min_rate 2.0)"]
    assert SimulatedMesh(2).run(program) == [expected] * 2


def test_what_was_left_out_goes_along_uncompressed_where_none_is_tried() -> None:
    def program(mesh: pmesh.Mesh) -> list[float | None]:
        norms: list[float | None] = []
        for step in range(4):
            mesh.average_gradients(gradient(mesh.rank, step), compression=Auto(allow=["topk"]))
            assert mesh.last_op is not None
            norms.append(mesh.last_op.residual_norm)
        return norms

    for before, first, flushed, again in SimulatedMesh(2).run(program):
        assert (before, flushed) == (None, 0)
        assert first is not None
        assert again is not None
        assert min(first, again) > 1


def test_what_one_trial_left_out_goes_along_with_the_next() -> None:
    auto = Auto(allow=[TopK(0.1), "bf16", INT8()])

    def program(mesh: pmesh.Mesh) -> tuple[Any, Any]:
        came_out: Any = 0
        for step in range(7):
            came_out = came_out + mesh.average_gradients(
                gradient(mesh.rank, step), compression=auto
            ).astype(np.float64)
        (left,) = [v for k, v in mesh.error_feedback_state().items() if k.endswith("|residual")]
        return came_out, left.reshape(60, 50)

    (came_out, left), (_, theirs) = SimulatedMesh(2).run(program)
    went_in = sum(gradient(r, s).astype(np.float64) for r in range(2) for s in range(7)) / 2
    np.testing.assert_allclose(came_out + (left + theirs) / 2, went_in, atol=1e-5)


def test_the_comparison_is_for_people() -> None:
    text = _comparison((None, BF16()), (60_000_000, 21_200_000))
    assert text == "tried on these ranks: none 60 ms, bf16 21.2 ms"
