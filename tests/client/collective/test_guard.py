"""Gradients that are NaN or infinite: all ranks do the same, and the rank has its name."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

import pmesh
from pmesh.client.collective.bucketed import OnNonfinite
from pmesh.client.collective.guard import Given, all_finite, culprits_of
from pmesh.compression.schemes import Scheme
from pmesh.core.ops.reductions import Values
from pmesh.ids import Rank, TrainerId
from tests.client.feedback.compressed import EVERY
from tests.worlds.every_array import make
from tests.worlds.watched_agent import WatchedAgent, run_ranks, watched_agent

BAD = Rank(1)
NAMES = ("a", "b", "c")
MODES = pytest.mark.parametrize("mode", ["raise", "skip"])


def gradients(rank: int, bad: float = math.nan) -> list[Values]:
    """Two buckets of 64 bytes; one value of rank 1 is bad."""
    one, two = (np.full(16, float(number + rank), np.float32) for number in (1, 10))
    if rank == BAD:
        one[7] = bad
    return [one, two]


def test_without_a_guard_every_rank_gets_what_is_not_finite(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> Sequence[Values]:
        return mesh.average_gradients(gradients(mesh.rank))

    for one, _ in run_ranks(agent.home, 2, program):
        assert np.isnan(one).sum() == 1


@MODES
def test_as_long_as_all_are_finite_a_guard_costs_no_op(
    agent: WatchedAgent, mode: OnNonfinite
) -> None:
    def program(mesh: pmesh.Mesh) -> Sequence[Values]:
        return mesh.average_gradients(gradients(2 * mesh.rank), on_nonfinite=mode)

    for one, two in run_ranks(agent.home, 2, program):
        assert (one[0], two[0]) == (2.0, 11.0)
    assert [call.kind for call in agent.calls] == ["all_reduce"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_all_ranks_raise_and_name_the_rank_and_go_on_with_the_next_call(
    agent: WatchedAgent, bad: float
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        own = gradients(mesh.rank, bad)
        with pytest.raises(pmesh.NonFiniteGradients) as raised:
            mesh.average_gradients(own, bucket_bytes=64, on_nonfinite="raise", out=own)
        assert raised.value.ranks == (BAD,)
        assert str(raised.value) == (
            "the gradients of rank 1 (simulated) are NaN or infinite; no rank gets a mean"
        )
        assert own[1][0] == 10 + mesh.rank, "out= is not written"
        assert mesh.all_reduce(np.ones(1))[0] == 3

    run_ranks(agent.home, 3, program)
    kinds = [call.kind for call in agent.calls]
    assert kinds[:3] == ["all_reduce", "all_reduce", "exchange"]


@pytest.mark.parametrize("call", ["plain", "out", "async", "zeros"])
def test_the_others_get_their_mean_without_that_rank_in_every_form_of_the_call(
    agent: WatchedAgent, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        own, weight = gradients(mesh.rank), 1.0 + mesh.rank
        average: Any = mesh.average_gradients
        options: dict[str, Any] = {"bucket_bytes": 64, "on_nonfinite": "skip"}
        match call:
            case "out":
                mean = average(own, weight, out=own, **options)
                assert mean[0] is own[0]
            case "async":
                mean = average(own, weight, async_op=True, **options).wait()
            case "zeros":
                mean = average(own, weight, missing="zeros", **options)
            case _:
                mean = average(own, weight, **options)
        for number, array in zip((1, 10), mean, strict=True):
            np.testing.assert_allclose(array, (number + 3 * (number + 2)) / 4)
        assert mesh.last_op is not None
        assert mesh.last_op.contributors == (0, 2)
        assert len(mesh.last_op.names) == 2

    with caplog.at_level(logging.WARNING, "pmesh"):
        run_ranks(agent.home, 3, program)
    text = "the gradients of rank 1 (simulated) are NaN or infinite; they are left out of the mean"
    assert caplog.messages == [text] * 3


@EVERY
def test_compression_hides_nothing_from_the_guard_and_remembers_nothing_of_it(
    agent: WatchedAgent, scheme: Scheme
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        own = np.full((20, 20), 1.0 + mesh.rank, np.float32)
        bad = np.where(mesh.rank == BAD, np.float32(np.nan), own)
        with pytest.raises(pmesh.NonFiniteGradients) as raised:
            mesh.average_gradients(bad, compression=scheme, on_nonfinite="raise")
        assert raised.value.ranks == (BAD,)
        mean = mesh.average_gradients(bad, compression=scheme, on_nonfinite="skip")
        assert np.isfinite(mean).all()
        assert mesh.last_op is not None
        assert mesh.last_op.contributors == (0, 2)
        mean = mesh.average_gradients(own, compression=scheme, on_nonfinite="raise")
        assert np.isfinite(mean).all()
        assert len(mesh.last_op.contributors) == 3

    run_ranks(agent.home, 3, program)


@pytest.mark.parametrize("compression", [None, "int8"])
@MODES
def test_where_no_rank_has_finite_gradients_all_raise(
    agent: WatchedAgent, mode: OnNonfinite, compression: str | None
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        own = [np.full(4, np.inf, np.float32)]
        with pytest.raises(pmesh.NonFiniteGradients) as raised:
            mesh.average_gradients(
                own, min(1, mesh.rank), compression=compression, on_nonfinite=mode
            )
        assert raised.value.ranks == (1, 2), "rank 0 has no weight, so nobody reads its gradients"

    run_ranks(agent.home, 3, program)


@MODES
def test_a_sum_that_is_too_large_is_no_ranks_fault(agent: WatchedAgent, mode: OnNonfinite) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        own = [np.full(4, 3e38, np.float32)]
        with pytest.raises(pmesh.NonFiniteGradients, match="sum is too large") as raised:
            mesh.average_gradients(own, on_nonfinite=mode)
        assert raised.value.ranks == ()

    run_ranks(agent.home, 2, program)


@MODES
def test_if_the_rank_is_lost_before_it_can_say_so_the_others_average_once_more(
    agent: WatchedAgent, mode: OnNonfinite
) -> None:
    agent.losses = {1: TrainerId(1)}  # the op in which the ranks ask each other

    def program(mesh: pmesh.Mesh) -> list[float]:
        try:
            mean = mesh.average_gradients(gradients(mesh.rank), on_nonfinite=mode)
        except pmesh.AgentStopped:
            return []
        assert mesh.last_op is not None
        assert mesh.last_op.contributors == (0, 1)
        return [float(array[7]) for array in mean]

    found = run_ranks(agent.home, 3, program)
    assert sorted(found) == [[], [2.0, 11.0], [2.0, 11.0]]


@MODES
def test_a_rank_that_is_alone_is_told_at_once(tmp_path: Path, mode: OnNonfinite) -> None:
    with watched_agent(tmp_path):
        mesh = pmesh.connect("job", home=tmp_path, on_superseded="sync")
        for compression in (None, "topk"):
            with pytest.raises(pmesh.NonFiniteGradients):
                mesh.average_gradients(gradients(BAD), compression=compression, on_nonfinite=mode)
    with mesh:
        for missing in ("error", "zeros"):
            with pytest.raises(pmesh.NonFiniteGradients):
                mesh.average_gradients(gradients(BAD), missing=missing, on_nonfinite=mode)
        assert mesh.average_gradients(gradients(0), on_nonfinite=mode)[0][0] == 1


@pytest.mark.parametrize("compression", [None, "int8"])
def test_ranks_with_another_guard_hear_of_it(agent: WatchedAgent, compression: str | None) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        mode: OnNonfinite = "skip" if mesh.rank else "raise"
        with pytest.raises(pmesh.OpMismatch):
            mesh.average_gradients(gradients(mesh.rank), compression=compression, on_nonfinite=mode)

    run_ranks(agent.home, 2, program)


@pytest.mark.parametrize(
    ("library", "dtype"),
    [("numpy", "float16"), ("torch", "bfloat16"), ("mlx", "bfloat16"), ("mlx", "float32")],
)
def test_the_rank_is_found_in_every_library_and_dtype(
    agent: WatchedAgent, library: str, dtype: str
) -> None:
    pytest.importorskip({"mlx": "mlx.core"}.get(library, library))

    def program(mesh: pmesh.Mesh) -> None:
        own = {"w": make(library, dtype, [1.0, math.inf if mesh.rank == BAD else 3.0])}
        mean = mesh.average_gradients(own, on_nonfinite="skip")
        assert [float(x) for x in mean["w"]] == [1.0, 3.0]

    run_ranks(agent.home, 2, program)


def test_another_word_is_an_error_before_an_op(agent: WatchedAgent) -> None:
    with (
        pmesh.connect("job", home=agent.home) as mesh,
        pytest.raises(pmesh.UsageError, match=r"on_nonfinite is one of .*, not 'ignore'"),
    ):
        mesh.average_gradients(np.ones(2), on_nonfinite="ignore")  # type: ignore[call-overload] # the mistake
    assert agent.calls == []


@given(
    arrays_of.arrays(
        st.sampled_from([np.float16, np.float32, np.float64, np.complex64]), st.integers(0, 9)
    )
)
def test_no_value_is_missed_and_large_ones_are_finite(values: Values) -> None:
    assert all_finite(values) == bool(np.isfinite(values).all())


def test_with_nothing_to_blame_no_rank_is_left_out() -> None:
    assert culprits_of([Given.FINITE, Given.NOTHING], NAMES, "raise") == ()
    with pytest.raises(pmesh.NonFiniteGradients, match=r"rank 0 \(a\) and rank 2 \(c\) are"):
        culprits_of([Given.NONFINITE, Given.FINITE, Given.NONFINITE], NAMES, "raise")
