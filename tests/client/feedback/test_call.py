# ruff: noqa: ANN401 - arrays of libraries that have no common type
"""What comes out of compressed calls, and what is kept: all that went in, whoever is lost."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.compression import top_k
from pmesh.compression.schemes import (
    INT8,
    OneBit,
    PowerSGD,
    RandomK,
    Scheme,
    TopK,
    spec,
)
from tests.client.feedback.compressed import EVERY, FEEDBACK, RANKS, flat, gradients, residual_of
from tests.worlds.faults import Faults, Real
from tests.worlds.watched_agent import WatchedAgent, run_ranks


def at_once(scheme: Scheme) -> Scheme:
    return replace(scheme, start_step=0) if isinstance(scheme, PowerSGD) else scheme


@EVERY
@pytest.mark.parametrize("bucket_bytes", [1000, 2**20])
def test_what_came_out_and_what_is_left_is_what_went_in_to_the_last_bit_alike(
    agent: WatchedAgent, scheme: Scheme, bucket_bytes: int
) -> None:
    weights = [1.0, 2.0, 5.0]

    def program(mesh: pmesh.Mesh) -> tuple[list[bytes], Any, Any]:
        bits, came_out = [], 0
        for step in range(5):
            out = mesh.average_gradients(
                gradients(mesh.rank, step),
                weights[mesh.rank],
                bucket_bytes,
                compression=scheme,
            )
            bits.append(flat(out).tobytes())
            came_out = came_out + flat(out)
        return bits, came_out, residual_of(mesh)

    results = run_ranks(agent.home, RANKS, program)
    assert results[0][0] == results[1][0] == results[2][0]  # I3
    went_in: Any = 0
    for step in range(5):
        mean = sum(w * flat(gradients(r, step)) for r, w in enumerate(weights)) / sum(weights)
        went_in = went_in + mean
    left = sum(residual for _, _, residual in results) / RANKS
    np.testing.assert_allclose(results[0][1] + left, went_in, atol=2e-5)
    assert np.abs(left).max() > 1e-5  # else nothing was compressed


LOSSES = [(scheme, op) for scheme in FEEDBACK for op in (0, 1)]


@pytest.mark.parametrize(("scheme", "lost_in"), [*LOSSES, (PowerSGD(2), 2)], ids=str)
def test_a_lost_rank_takes_along_its_own_part_and_its_weight(
    agent: WatchedAgent, scheme: Scheme, lost_in: int
) -> None:
    """In the exchange of weights, in the first op of values, or between the two of PowerSGD."""
    agent.losses = {lost_in: 1}
    weights = np.array([1.0, 2.0, 5.0])

    def program(mesh: pmesh.Mesh) -> tuple[Any, Any] | None:
        me = mesh.rank
        try:
            out = mesh.average_gradients(gradients(me, 0), weights[me], compression=at_once(scheme))
        except pmesh.AgentStopped:
            return None
        assert mesh.size == 2
        return flat(out), residual_of(mesh)

    first, lost, last = run_ranks(agent.home, RANKS, program)
    assert lost is None
    assert first is not None
    assert last is not None
    assert first[0].tobytes() == last[0].tobytes()  # I3
    told = [0, 2] if lost_in == 0 else [0, 1, 2]
    correction = sum(weights[told]) * 2 / (len(told) * sum(weights[[0, 2]]))
    left = correction * (first[1] + last[1]) / 2
    mean = (flat(gradients(0, 0)) + 5 * flat(gradients(2, 0))) / 6
    if lost_in == 2:  # what PowerSGD sends uncompressed was complete in the op before
        all_three = sum(w * flat(gradients(r, 0)) for r, w in enumerate(weights)) / 8
        is_matrix = slice(300, 1500)
        all_three[is_matrix] = mean[is_matrix]
        mean = all_three
    np.testing.assert_allclose(first[0] + left, mean, atol=1e-5)


@EVERY
def test_an_op_that_fails_leaves_the_residuals_as_they_were(
    agent: WatchedAgent, scheme: Scheme
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        for step in range(2):
            mesh.average_gradients(gradients(mesh.rank, step), compression=scheme)
        before = mesh.error_feedback_state()
        grads = gradients(mesh.rank, 2) if mesh.rank else np.ones(3)
        with pytest.raises(pmesh.OpMismatch):
            mesh.average_gradients(grads, compression=scheme)
        after = mesh.error_feedback_state()
        for key, value in before.items():
            np.testing.assert_array_equal(value, after[key])

    run_ranks(agent.home, 2, program)


@EVERY
def test_who_calls_again_after_a_failure_in_the_middle_sends_nothing_twice(
    agent: WatchedAgent, scheme: Scheme
) -> None:
    last_op_of_the_second_call = 4 if isinstance(scheme, PowerSGD) else 3
    agent.mismatched = last_op_of_the_second_call

    def program(mesh: pmesh.Mesh) -> Any:
        first = mesh.average_gradients(gradients(mesh.rank, 0), compression=scheme)
        before = mesh.error_feedback_state()
        with pytest.raises(pmesh.OpMismatch):
            mesh.average_gradients(gradients(mesh.rank, 1), compression=scheme)
        after = mesh.error_feedback_state()
        for key, value in before.items():
            np.testing.assert_array_equal(value, after[key])
        second = mesh.average_gradients(gradients(mesh.rank, 1), compression=scheme)
        return flat(first) + flat(second), residual_of(mesh)

    results = run_ranks(agent.home, 2, program)
    went_in = sum(flat(gradients(rank, step)) for rank in (0, 1) for step in (0, 1)) / 2
    left = (results[0][1] + results[1][1]) / 2
    np.testing.assert_allclose(results[0][0] + left, went_in, atol=1e-5)


@EVERY
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_all_reduce_keeps_nothing_unless_it_is_asked_to(
    agent: WatchedAgent, scheme: Scheme, op: str
) -> None:
    plain = replace(scheme, error_feedback=None)

    def program(mesh: pmesh.Mesh) -> Any:
        x = np.random.default_rng(mesh.rank).standard_normal((50, 40)).astype(np.float32)
        results = [mesh.all_reduce(x, op, compression=plain)]
        assert mesh.last_op is not None
        assert mesh.last_op.compression == spec(plain)  # at once, whatever start_step says
        results.append(mesh.all_reduce(x, op, compression=plain))
        state = mesh.error_feedback_state()
        assert [key for key in state if key.endswith("|residual")] == []
        kept = mesh.all_reduce(x, op, compression=replace(scheme, error_feedback=True))
        assert mesh.last_op.residual_norm is not None
        return [r.tobytes() for r in (*results, kept)], kept, residual_of(mesh)

    results = run_ranks(agent.home, RANKS, program)
    assert results[0][0] == results[1][0] == results[2][0]
    x = [np.random.default_rng(r).standard_normal((50, 40)) for r in range(RANKS)]
    left = sum(residual.reshape(50, 40) for _, _, residual in results)
    ranks = RANKS if op == "mean" else 1
    np.testing.assert_allclose(results[0][1] + left / ranks, sum(x) / ranks, atol=1e-5)


def test_random_k_is_scaled_only_where_nothing_is_fed_back(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> tuple[float, float]:
        ones = np.ones(1000, np.float32)
        scaled = mesh.all_reduce(ones, "mean", compression=RandomK(0.1))
        plain = mesh.average_gradients(ones, compression=RandomK(0.1))
        return float(scaled.max()), float(plain.max())

    assert run_ranks(agent.home, 2, program) == [(10.0, 1.0)] * 2


def test_random_k_takes_other_places_in_each_call_alike_on_all_ranks(
    agent: WatchedAgent,
) -> None:
    def program(mesh: pmesh.Mesh) -> list[list[int]]:
        ones = np.ones(100, np.float32)
        return [
            np.flatnonzero(mesh.all_reduce(ones, compression=RandomK(0.1))).tolist()
            for _ in range(3)
        ]

    first, second = run_ranks(agent.home, 2, program)
    assert first == second
    assert len({str(places) for places in first}) == 3


def test_residuals_go_along_with_another_scheme(agent: WatchedAgent) -> None:
    schemes = [TopK(0.05), INT8(), PowerSGD(1, start_step=0), OneBit(), TopK(0.05)]

    def program(mesh: pmesh.Mesh) -> Any:
        came_out: Any = 0
        for step, scheme in enumerate(schemes):
            out = mesh.average_gradients(
                gradients(mesh.rank, step), bucket_bytes=1000, compression=scheme
            )
            came_out = came_out + flat(out)
        return came_out, residual_of(mesh)

    results = run_ranks(agent.home, 2, program)
    went_in = sum(flat(gradients(rank, step)) for rank in (0, 1) for step in range(5)) / 2
    left = (results[0][1] + results[1][1]) / 2
    np.testing.assert_allclose(results[0][0] + left, went_in, atol=1e-4)


def test_other_shapes_get_a_fresh_residual_and_a_note(
    agent: WatchedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        for length in (100, 120):
            mesh.average_gradients([np.ones(length, np.float32)], compression=TopK(0.1))
            assert residual_of(mesh).size == length
            mesh.average_gradients([np.ones(length, np.float32)], compression=TopK(0.1))

    run_ranks(agent.home, 2, program)
    notes = [r.message for r in caplog.records if "other shapes" in r.message]
    assert len(notes) == 2  # one on each rank
    assert "name it" in notes[0]


def test_arrays_turned_over_are_other_arrays(
    agent: WatchedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        x = np.arange(12, dtype=np.float32).reshape(3, 4)
        mesh.average_gradients(x, compression=TopK(0.1))
        out = mesh.average_gradients(x.T * 0, compression=TopK(0.1))
        assert not out.any()

    run_ranks(agent.home, 2, program)
    assert ["other shapes" in r.message for r in caplog.records if "dropped" in r.message] == [
        True,
        True,
    ]


def test_arrays_that_lie_apart_are_put_together_for_the_kernels(
    agent: WatchedAgent, faults: Faults
) -> None:

    def checked(compress: Real, own: Any, wire: Any, **options: Any) -> None:
        assert own.flags.c_contiguous
        compress(own, wire, **options)

    faults.around(top_k, "compress", checked)

    def program(mesh: pmesh.Mesh) -> list[float]:
        x = np.arange(8, dtype=np.float32)[::2]
        return list(mesh.all_reduce(x, compression=TopK(1.0)))

    assert run_ranks(agent.home, 2, program) == [[0, 4, 8, 12]] * 2


def test_models_of_other_names_have_residuals_of_their_own(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> tuple[Any, Any]:
        actor, critic = TopK(0.5, model="actor"), TopK(0.5, model="critic")
        mesh.average_gradients(np.array([1, 8], np.float32), compression=actor)
        clean = mesh.average_gradients(np.array([2, 0], np.float32), compression=critic)
        return clean.tolist(), sorted(k.partition("|")[0] for k in mesh.error_feedback_state())

    assert (
        run_ranks(agent.home, 2, program) == [([2, 0], ["actor", "actor", "critic", "critic"])] * 2
    )
