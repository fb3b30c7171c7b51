# ruff: noqa: ANN401 - trees of MLX's
"""The functions of the drop-in within MLX's transformations, among threads."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx
import pytest

import pmesh
import pmesh.mlx
from pmesh.mlx import ops
from pmesh.testing import SimulatedMesh
from tests.worlds.faults import Faults, Real

T = TypeVar("T")
RANKS = 3


def among(call: Callable[[pmesh.mlx.Group], T], ranks: int = RANKS) -> list[T]:
    """What the call returns on each rank of a group; arrays don't leave their threads."""

    def run(mesh: pmesh.Mesh) -> T:
        group = pmesh.mlx.Group(mesh)
        result = call(group)
        group.close()  # once its messages have been received
        return result

    return SimulatedMesh(ranks).run(run)


def mine(group: pmesh.mlx.Group) -> mx.array:
    return mx.array([1.0, 2.0, 3.0]) * (group.rank() + 1)


def test_a_sum_has_the_gradient_that_mlx_gives_it() -> None:
    def gradient(group: pmesh.mlx.Group) -> object:
        def loss(x: mx.array) -> mx.array:
            return (pmesh.mlx.all_sum(x * x, group=group) * mx.array([1.0, 10.0, 100.0])).sum()

        return mx.grad(loss)(mine(group)).tolist()

    assert among(gradient) == [[2.0 * r, 40.0 * r, 600.0 * r] for r in (1, 2, 3)]


def test_tangents_are_reduced_as_the_values_are() -> None:
    def tangents(group: pmesh.mlx.Group) -> object:
        _, (found,) = mx.jvp(
            lambda x: pmesh.mlx.all_sum(x, group=group), [mine(group)], [mx.ones(3)]
        )
        return found.tolist()

    assert among(tangents) == [[3.0] * 3] * RANKS


@pytest.mark.parametrize("shape", [(2,), ()])
def test_the_gradient_of_a_gather_is_the_ranks_own_rows(shape: tuple[int, ...]) -> None:
    def gradient(group: pmesh.mlx.Group) -> object:
        def loss(x: mx.array) -> mx.array:
            gathered = pmesh.mlx.all_gather(x, group=group)
            return (gathered * mx.arange(gathered.size)).sum()

        return mx.grad(loss)(mx.ones(shape)).tolist()

    assert among(gradient) == ([0, 1, 2] if shape == () else [[0, 1], [2, 3], [4, 5]])


@pytest.mark.parametrize("tree", [{}, {"frozen": {}, "layers": []}])
def test_the_average_of_a_tree_without_arrays_is_the_tree(tree: object) -> None:
    assert among(lambda group: pmesh.mlx.average_gradients(tree, group)) == [tree] * RANKS


def test_a_gather_of_other_shapes_or_dtypes_is_an_error_on_all_ranks() -> None:
    def gather(group: pmesh.mlx.Group) -> None:
        first = group.rank() == 0
        with pytest.raises(pmesh.OpMismatch):
            pmesh.mlx.all_gather(mx.ones(1 if first else 2), group=group)
        with pytest.raises(pmesh.OpMismatch):
            pmesh.mlx.all_gather(mx.ones(2, mx.int32 if first else mx.float32), group=group)

    among(gather)


def test_the_gradient_of_a_scatter_is_gathered() -> None:
    def gradient(group: pmesh.mlx.Group) -> object:
        x = mx.ones((RANKS, 2))

        def loss(x: mx.array) -> mx.array:
            return (pmesh.mlx.sum_scatter(x, group=group) * (group.rank() + 1.0)).sum()

        return mx.grad(loss)(x).tolist()

    assert among(gradient) == [[[1.0] * 2, [2.0] * 2, [3.0] * 2]] * RANKS


def test_averages_have_gradients_too() -> None:
    def gradients(group: pmesh.mlx.Group) -> object:
        def loss(tree: Any) -> Any:
            mean = pmesh.mlx.average_gradients(tree, group)
            return (mean["w"] * 6).sum() + mean["b"]

        tree = {"w": mine(group), "b": mx.array(1.0)}
        found = mx.grad(loss)(tree)
        _, (tangent,) = mx.jvp(
            lambda w: loss({"w": w, "b": mx.array(0.0)}), [tree["w"]], [mine(group)]
        )
        return found["w"].tolist(), round(found["b"].item(), 6), tangent.item()

    assert among(gradients) == [([2.0] * 3, 0.333333, 72.0)] * RANKS


def test_a_rank_whose_gradients_are_nan_is_left_out_or_all_ranks_get_an_error() -> None:
    def average(group: pmesh.mlx.Group) -> object:
        own = {"w": mx.array([4.0 ** group.rank(), mx.nan if group.rank() == 1 else 1.0])}
        kept = pmesh.mlx.average_gradients(own, group)
        with pytest.raises(pmesh.NonFiniteGradients, match="the gradients of rank 1"):
            pmesh.mlx.average_gradients(own, group, on_nonfinite="raise")
        mean = pmesh.mlx.average_gradients(own, group, on_nonfinite="skip")
        with pytest.raises(pmesh.UsageError, match="of floating-point numbers only"):
            pmesh.mlx.average_gradients(mx.array([1]), group, on_nonfinite="skip")
        return kept["w"][0].item(), mean["w"].tolist()

    assert among(average) == [(7.0, [8.5, 1.0])] * RANKS


@pytest.mark.parametrize("mode", ["raise", "skip"])
def test_a_process_that_is_alone_has_nobody_to_replace_its_nan(mode: Any) -> None:
    group = pmesh.mlx.Group(None)
    tree = {"w": mx.ones(3)}
    assert pmesh.mlx.average_gradients(tree, group, on_nonfinite=mode) is tree
    with pytest.raises(pmesh.NonFiniteGradients, match=r"rank 0 \(this machine\)"):
        pmesh.mlx.average_gradients([mx.array(mx.nan)], group, on_nonfinite=mode)


def test_averages_are_computed_in_the_order_of_registration_reversed(faults: Faults) -> None:
    from pmesh.client.trees import mlx  # noqa: PLC0415

    computed: dict[int, list[int]] = {}

    def recorded(evaluate: Real, arrays: Any) -> None:
        sizes = computed.setdefault(threading.get_ident(), [])
        sizes.extend(array.shape[0] for array in arrays)
        evaluate(arrays)

    faults.around(mlx, "evaluate", recorded)

    def average(group: pmesh.mlx.Group) -> None:
        tree = {"model": [mx.ones(3), mx.ones(2)], "lm_head": mx.ones(1)}
        pmesh.mlx.average_gradients(tree, group, all_reduce_size=8)

    among(average, 2)
    assert list(computed.values()) == [[1, 2, 3]] * 2


def test_messages_do_not_wait_for_their_receiver_and_have_no_gradient() -> None:
    def exchange(group: pmesh.mlx.Group) -> object:
        after, before = (group.rank() + 1) % RANKS, (group.rank() - 1) % RANKS
        for _ in range(2):  # all send before any receives
            pmesh.mlx.send(mine(group), after, group=group)
        with pytest.raises(ValueError, match="send has no gradient"):
            mx.grad(lambda x: pmesh.mlx.send(x, after, group=group).sum())(mine(group))
        came = [pmesh.mlx.recv_like(mine(group), before, group=group) for _ in range(3)]
        assert came[0].tolist() == came[1].tolist() == came[2].tolist()
        return came[0][0].item()

    assert among(exchange) == [3.0, 1.0, 2.0]


def test_a_message_of_another_shape_is_an_error() -> None:
    def exchange(group: pmesh.mlx.Group) -> str:
        other = 1 - group.rank()
        pmesh.mlx.send(mx.ones((2, 3)), other, group=group)
        with pytest.raises(pmesh.UsageError) as caught:
            pmesh.mlx.recv((3, 2), mx.float32, other, group=group)
        return str(caught.value)

    assert "rank 1 has sent" in among(exchange, 2)[0]


@pytest.mark.parametrize("transformed", [mx.compile, mx.vmap])
def test_a_trace_is_refused_with_what_to_do(transformed: Callable[[Any], Any]) -> None:
    def call(group: pmesh.mlx.Group) -> None:
        with pytest.raises(pmesh.UsageError, match="compile what comes before and after it"):
            transformed(lambda x: pmesh.mlx.all_sum(x, group=group))(mine(group))

    among(call, 2)


def test_what_a_batched_function_has_computed_before_can_not_be_reduced_either() -> None:
    with pytest.raises(pmesh.UsageError, match=r"can't be vectorized by mx\.vmap"):
        ops._refuse_vmap("all_sum", mx.ones(2), 0)  # noqa: SLF001


def test_a_process_that_is_alone_gets_its_arguments_back() -> None:
    group = pmesh.mlx.Group(None)
    x = mx.ones(3)
    for call in (pmesh.mlx.all_sum, pmesh.mlx.all_max, pmesh.mlx.all_gather, pmesh.mlx.sum_scatter):
        assert call(x, group=group) is x
    tree = {"w": x}
    assert pmesh.mlx.average_gradients(tree, group) is tree
    with pytest.raises(ValueError, match="Cannot send to a singleton group"):
        pmesh.mlx.send(x, 0, group=group)
    with pytest.raises(ValueError, match="Cannot recv from a singleton group"):
        pmesh.mlx.recv_like(x, 0, group=group)
    with pytest.raises(pmesh.UsageError, match="alone"):
        group.run(lambda mesh: mesh.barrier())


def test_groups_of_mlxs_own_are_served_by_mlx() -> None:
    native = mx.distributed.init(backend="ring")
    x = mx.ones(3)
    for call in (pmesh.mlx.all_sum, pmesh.mlx.all_gather, pmesh.mlx.sum_scatter):
        assert call(x, group=native).tolist() == x.tolist()
    assert pmesh.mlx.average_gradients({"w": x}, native)["w"].tolist() == x.tolist()
    with pytest.raises(pmesh.UsageError, match="MLX made this one"):
        pmesh.mlx.average_gradients({"w": x}, native, on_nonfinite="skip")
    with pytest.raises(ValueError, match="singleton"):
        pmesh.mlx.send(x, 0, group=native)
    with pytest.raises(ValueError, match="singleton"):
        pmesh.mlx.recv_like(x, 0, group=native)
