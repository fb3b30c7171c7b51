# ruff: noqa: ANN401 - arrays of libraries that have no common type
"""What can be compressed, and what not; whatever the arrays, the ranks and the call are like."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.compression.schemes import (
    PowerSGD,
    RandomK,
    Scheme,
    TopK,
)
from pmesh.errors import UnsupportedCompression
from tests.client.feedback.compressed import EVERY, FEEDBACK, flat, gradients, residual_of
from tests.worlds.every_array import make
from tests.worlds.watched_agent import WatchedAgent, run_ranks


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("int8", "bf16"),
        ("int8", None),
        ("topk", "onebit"),
        (TopK(0.5), TopK(0.25)),
        (PowerSGD(1, start_step=0), PowerSGD(2, start_step=0)),
        (RandomK(0.5), RandomK(0.5, seed=1)),
        ("topk", TopK(error_feedback=False)),
    ],
    ids=str,
)
def test_ranks_that_compress_differently_hear_of_it(
    agent: WatchedAgent, one: Scheme | str, other: Scheme | str | None
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        x = np.ones((8, 8), np.float32)
        scheme = one if mesh.rank else other
        with pytest.raises(pmesh.OpMismatch):
            mesh.average_gradients(x, compression=scheme)
        if isinstance(one, str):
            with pytest.raises(pmesh.OpMismatch, match=one):
                mesh.all_reduce(x, compression=scheme)

    run_ranks(agent.home, 2, program)


@EVERY
def test_trees_with_other_names_for_the_same_shapes_are_a_mismatch(
    agent: WatchedAgent, scheme: Scheme
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        x = {"ab"[mesh.rank]: np.ones((20, 20), np.float32)}
        for call in (mesh.all_reduce, mesh.average_gradients):
            with pytest.raises(pmesh.OpMismatch):
                call(x, compression=scheme)

    run_ranks(agent.home, 2, program)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: m.all_reduce(x, "max", compression="int8"), "sum or mean, not 'max'"),
        (lambda m, x: m.all_reduce(x, compression="int9"), "no compression 'int9'; there are"),
        (lambda m, x: m.all_reduce(x, compression=8), "compression must be one of"),
        (lambda m, _: m.all_reduce(np.ones(2, int), compression="bf16"), "not int64"),
        (
            lambda m, x: m.all_reduce([x, np.ones(1, np.int32)], compression="bf16"),
            "1: float32, float16, bfloat16 and float64",
        ),
        (lambda m, x: m.all_reduce(x, compression="topk", strategy="tree"), "TopK goes round"),
        (lambda m, x: m.average_gradients(x, compression="fp8"), "no compression 'fp8'"),
        (
            lambda m, x: m.average_gradients(x, compression="int8", strategy="centralized"),
            "strategy is 'auto' or 'ring', not 'centralized'",
        ),
    ],
)
def test_what_can_not_be_compressed_is_a_value_error_before_an_op_starts(
    agent: WatchedAgent, call: Callable[[Any, Any], object], message: str
) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        with pytest.raises(ValueError, match=message) as raised:
            call(mesh, np.ones(2, np.float32))
        assert isinstance(raised.value, UnsupportedCompression)
    assert agent.calls == []


@pytest.mark.parametrize("strategy", ["tree", "centralized"])
def test_schemes_made_of_ordinary_ops_take_any_strategy(agent: WatchedAgent, strategy: Any) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        for scheme in (RandomK(0.5), PowerSGD(1)):
            mesh.all_reduce(np.ones((8, 8), np.float32), compression=scheme, strategy=strategy)

    run_ranks(agent.home, 2, program)
    assert {call.strategy for call in agent.calls if call.kind == "all_reduce"} == {strategy}


@pytest.mark.parametrize("scheme", [*FEEDBACK, pmesh.Auto()], ids=str)
def test_a_rank_that_is_alone_gets_its_own_values(agent: WatchedAgent, scheme: Scheme) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        x = gradients(0, 0)
        for result in (
            mesh.average_gradients(x, 2.0, compression=scheme),
            mesh.all_reduce(x, compression=scheme),
        ):
            np.testing.assert_array_equal(flat(result), flat(x))
        assert mesh.last_op is not None
        assert (mesh.last_op.compression, mesh.last_op.why) == ("none", "alone: nothing is sent")
        assert mesh.error_feedback_state() == {}


def test_no_arrays_are_no_op(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        assert mesh.average_gradients({}, compression="int8") == {}
        assert mesh.last_op is None

    run_ranks(agent.home, 2, program)
    assert agent.calls == []


@EVERY
def test_a_weight_of_zero_hides_gradients_that_are_not_finite(
    agent: WatchedAgent, scheme: Scheme
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        x = np.full(500, 3.0 if mesh.rank else np.nan, np.float32)
        out = mesh.average_gradients(x, mesh.rank, compression=scheme)
        assert np.isfinite(out).all()
        with pytest.raises(pmesh.UsageError, match="weights of all ranks add up to 0"):
            mesh.average_gradients(x, 0, compression=scheme)

    run_ranks(agent.home, 2, program)


@EVERY
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_comes_out_and_does_not_stay(
    agent: WatchedAgent, scheme: Scheme, bad: float
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        x = np.ones((40, 30), np.float32)
        mesh.average_gradients(x, compression=scheme)
        x[7, 7] = bad
        out = mesh.average_gradients(x, compression=scheme)
        assert not np.isfinite(out).all() or isinstance(scheme, RandomK)
        assert np.isfinite(residual_of(mesh)).all()
        x[7, 7] = 1
        for _ in range(2):
            out = mesh.average_gradients(x, compression=scheme)
        assert np.isfinite(out).all()

    with np.errstate(all="ignore"):
        run_ranks(agent.home, 2, program)


def test_fp16_warns_of_what_it_clips_and_again_when_that_has_doubled(
    agent: WatchedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    def program(mesh: pmesh.Mesh) -> list[int]:
        counts = []
        for large in (0, 3, 1, 1, 1):
            x = np.ones(20, np.float32)
            x[:large] = 1e6
            mesh.all_reduce(x, compression="fp16")
            assert mesh.last_op is not None
            counts.append(mesh.last_op.clipped)
        return counts

    counts = run_ranks(agent.home, 2, program)
    assert sum(first + second for first, second in zip(*counts, strict=True)) > 0
    notes = [r.message for r in caplog.records if "clipped" in r.message]
    assert 1 <= len(notes) < 8
    assert "were larger than 65504 and were clipped by fp16 in this call" in notes[0]


@pytest.mark.parametrize(
    ("library", "dtype"),
    [
        ("numpy", "float64"),
        ("numpy", "float16"),
        ("numpy", "bfloat16"),
        ("mlx", "bfloat16"),
        ("torch", "float64"),
        ("torch", "bfloat16"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_arrays_of_every_library_and_float_come_back_as_they_are(
    agent: WatchedAgent, library: str, dtype: str, *, late: bool
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        x = make(library, dtype, [1.0, 2.0])
        if late:
            out = mesh.all_reduce(x, "mean", compression="bf16", async_op=True).wait()
        else:
            out = mesh.average_gradients(x, compression="bf16")
        assert type(out) is type(x)
        assert out.dtype == x.dtype
        assert out.tolist() == [1, 2]

    run_ranks(agent.home, 2, program)


def test_a_float64_that_float32_can_not_hold_is_infinite(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> list[float]:
        return list(mesh.all_reduce(np.array([1e300, 1.0]), "mean", compression="bf16"))

    assert run_ranks(agent.home, 2, program) == [[np.inf, 1.0]] * 2


def test_results_go_into_out_and_through_handles_in_groups_too(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        group = mesh.group([1, 0])
        assert group is not None
        x = np.full(300, group.rank, np.float32)
        handle = group.all_reduce(x, out=x, compression="int8", async_op=True)
        again = group.average_gradients(np.ones(5, np.float32), compression="onebit")
        assert handle.wait() is x
        assert x.tolist() == [1.0] * 300
        assert again.tolist() == [1.0] * 5
        assert [k for k in group.error_feedback_state() if k.endswith("residual")]
        assert mesh.error_feedback_state() == {}

    run_ranks(agent.home, 2, program)
