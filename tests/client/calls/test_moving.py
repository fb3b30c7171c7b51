# ruff: noqa: ANN401 - arrays of libraries that have no common type
"""all_gather, gather, scatter and all_to_all: arrays that move as they are."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.core.wire.calls import Call
from tests.worlds.every_array import KINDS, make, seen
from tests.worlds.watched_agent import WatchedAgent, run_ranks

RANKS = 3


def rows_of(rank: int) -> Any:
    """Small integers: exact in every dtype. The ranks have 1, 2 and 3 rows."""
    return (np.arange((rank + 1) * 2) + 3 * rank).reshape(rank + 1, 2)


ALL_ROWS = np.concatenate([rows_of(rank) for rank in range(RANKS)])


@pytest.mark.parametrize(("library", "dtype"), KINDS)
def test_all_gather_lays_the_rows_of_all_behind_each_other(
    agent: WatchedAgent, library: str, dtype: str
) -> None:
    def program(mesh: pmesh.Mesh) -> Any:
        return seen(mesh.all_gather(make(library, dtype, rows_of(mesh.rank))))

    expected = seen(make(library, dtype, ALL_ROWS))
    assert run_ranks(agent.home, RANKS, program) == [expected] * RANKS


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 3), (1,) * 7])
def test_stacked_arrays_of_any_shape_get_a_new_first_dimension(
    agent: WatchedAgent, shape: tuple[int, ...]
) -> None:
    def program(mesh: pmesh.Mesh) -> Any:
        return mesh.all_gather(np.full(shape, mesh.rank, np.int16), stacked=True)

    expected = np.stack([np.full(shape, rank, np.int16) for rank in range(RANKS)])
    for result in run_ranks(agent.home, RANKS, program):
        assert result.dtype == np.int16
        assert result.shape == (RANKS, *shape)
        np.testing.assert_array_equal(result, expected)


def test_arrays_without_rows_take_no_room(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> Any:
        some = mesh.all_gather(np.full((2 * (mesh.rank == 1), 3), mesh.rank))
        return some.tolist(), mesh.all_gather(np.empty((0, 3))).shape

    assert run_ranks(agent.home, RANKS, program) == [([[1] * 3] * 2, (0, 3))] * RANKS


def test_numpy_scalars_can_be_stacked(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> Any:
        return mesh.all_gather(np.float32(mesh.rank), stacked=True)

    for result in run_ranks(agent.home, RANKS, program):
        assert (result.dtype, result.tolist()) == (np.float32, [0, 1, 2])


@pytest.mark.parametrize("root", range(RANKS))
def test_gather_gives_one_rank_the_rows_of_all(agent: WatchedAgent, root: int) -> None:
    def program(mesh: pmesh.Mesh) -> Any:
        plain = mesh.gather(rows_of(mesh.rank), root=root)
        stacked = mesh.gather(np.array(mesh.rank), root, stacked=True)
        assert (plain is None) == (stacked is None) == (mesh.rank != root)
        return None if plain is None or stacked is None else (plain.tolist(), stacked.tolist())

    expected: list[Any] = [None] * RANKS
    expected[root] = (ALL_ROWS.tolist(), [0, 1, 2])
    assert run_ranks(agent.home, RANKS, program) == expected


@pytest.mark.parametrize(("library", "dtype"), KINDS)
@pytest.mark.parametrize("root", [0, 2])
def test_scatter_gives_each_rank_its_array(
    agent: WatchedAgent, library: str, dtype: str, root: int
) -> None:
    def program(mesh: pmesh.Mesh) -> Any:
        xs = [make(library, dtype, rows_of(rank)) for rank in range(RANKS)]
        return seen(mesh.scatter(xs if mesh.rank == root else None, root=root))

    expected = [seen(make(library, dtype, rows_of(rank))) for rank in range(RANKS)]
    assert run_ranks(agent.home, RANKS, program) == expected


@pytest.mark.parametrize("shape", [(), (0,), (0, 2)])
def test_scatter_and_all_to_all_take_arrays_without_rows_or_dimensions(
    agent: WatchedAgent, shape: tuple[int, ...]
) -> None:
    def program(mesh: pmesh.Mesh) -> Any:
        mine = [np.full(shape, 10 * mesh.rank + to, np.float32) for to in range(2)]
        part = mesh.scatter(mine if mesh.rank == 1 else None, root=1)
        return [x.tolist() for x in (part, *mesh.all_to_all(mine)) if x.shape == shape]

    expected = [
        [np.full(shape, value).tolist() for value in (10 + rank, rank, 10 + rank)]
        for rank in range(2)
    ]
    assert run_ranks(agent.home, 2, program) == expected


@pytest.mark.parametrize(("library", "dtype"), KINDS)
def test_all_to_all_turns_rows_of_uneven_sizes_into_columns(
    agent: WatchedAgent, library: str, dtype: str
) -> None:
    def piece(giver: int, taker: int) -> Any:
        return make(library, dtype, np.full(((giver + 2 * taker) % 4, 2), 3 * giver + taker))

    def program(mesh: pmesh.Mesh) -> Any:
        got = mesh.all_to_all([piece(mesh.rank, to) for to in range(RANKS)])
        return [seen(x) for x in got]

    expected = [[seen(piece(giver, taker)) for giver in range(RANKS)] for taker in range(RANKS)]
    assert run_ranks(agent.home, RANKS, program) == expected


def test_all_that_arrives_may_be_written_and_the_arguments_stay(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        x = np.full(2, mesh.rank)
        for round_ in range(2):
            gathered, pieces = mesh.all_gather(x), mesh.all_to_all([x, x])
            part = mesh.scatter([x, x] if mesh.rank == 0 else None)
            assert gathered.tolist() == [0, 0, 1, 1], round_
            assert [p.tolist() for p in pieces] == [[0, 0], [1, 1]], round_
            for array in (gathered, *pieces, part):
                array[:] = -1
            assert (x == mesh.rank).all()

    run_ranks(agent.home, 2, program)


def test_each_rank_gets_arrays_of_its_own_library(agent: WatchedAgent) -> None:
    libraries = ["numpy", "mlx", "torch"]
    for library in libraries:
        make(library, "bfloat16", [])  # what is not there is missed here, not by one rank

    def program(mesh: pmesh.Mesh) -> Any:
        x = make(libraries[mesh.rank], "bfloat16", [mesh.rank, 7])
        got = [mesh.all_gather(x), *mesh.all_to_all([x, x, x])]
        assert {seen(g)[0] for g in got} == {libraries[mesh.rank]}
        return [seen(g)[1:] for g in got]

    bf = "bfloat16"
    expected = [(bf, (6,), [0, 7, 1, 7, 2, 7]), *[(bf, (2,), [r, 7]) for r in range(3)]]
    assert run_ranks(agent.home, RANKS, program) == [expected] * RANKS


def test_a_call_takes_two_ops_and_says_what_it_moved(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> Any:
        mesh.all_gather(np.ones(2, np.float16))
        return mesh.last_op

    for last in run_ranks(agent.home, 2, program):
        assert (last.op, last.contributors, last.names) == (1, (0, 1), ("simulated",) * 2)
        assert last.bytes == 4 + 8
    assert [call.kind for call in agent.calls] == ["exchange", "all_gather"]


ONE, TWO = np.ones(2), np.ones((2, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.all_gather(ONE if m.rank else TWO), r"\[2, 2\], rank 1 gives float64 \[2\]"),
        (lambda m: m.all_gather(np.ones((2, 2 + m.rank))), r"rank 1 gives float64 \[2, 3\]"),
        (lambda m: m.all_gather(ONE.astype("int8") if m.rank else ONE), "rank 1 gives int8"),
        (lambda m: m.all_gather(np.ones(1 + m.rank), stacked=True), r"rank 1 gives .*\[2\]"),
        (lambda m: m.all_gather(np.ones(1 + m.rank), stacked=m.rank == 0), "stacked"),
        (lambda m: m.gather(np.ones((2, 2 + m.rank))), r"gather: rank 0 gives float64 \[2, 2\]"),
        (lambda m: m.gather(ONE, root=m.rank), "gather"),
        (lambda m: m.scatter([ONE, ONE], root=m.rank), "scatter"),
        (lambda m: m.scatter(None, root=1 - m.rank), "scatter"),
        (lambda m: m.gather(ONE) if m.rank else m.all_gather(ONE), "all_gather"),
        (lambda m: m.all_to_all([ONE] * 2 if m.rank else [TWO] * 2), "all_to_all: rank 0"),
        (lambda m: m.all_to_all([ONE] * 2) if m.rank else m.all_gather_object(1), "op 0"),
        (lambda m: m.broadcast_object(1, root=m.rank), "broadcast_object"),
        (lambda m: m.broadcast_object(1, root=1 - m.rank), "broadcast_object"),
    ],
)
def test_ranks_that_do_not_fit_together_hear_of_it_alike_and_stay_in_step(
    agent: WatchedAgent, call: Callable[[pmesh.Mesh], object], message: str
) -> None:
    def program(mesh: pmesh.Mesh) -> tuple[str, float]:
        with pytest.raises(pmesh.OpMismatch, match=message) as caught:
            call(mesh)
        return str(caught.value), float(mesh.all_reduce(np.array(1.0)))

    results = run_ranks(agent.home, 2, program)
    assert results[0] == results[1]
    assert results[0][1] == 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.all_gather(np.array(1)), pmesh.UsageError, "pass stacked=True"),
        (lambda m: m.all_gather(1.5), pmesh.UnsupportedArray, "a float is not an array"),
        (lambda m: m.all_gather([ONE]), pmesh.UnsupportedArray, "a list is not an array"),
        (lambda m: m.all_gather(np.array(["a"])), pmesh.UnsupportedArray, "arrays of numbers"),
        (lambda m: m.all_gather(ONE.astype(">f8")), pmesh.UnsupportedArray, "byte order"),
        (lambda m: m.all_gather(np.ones((1,) * 9)), pmesh.UnsupportedArray, "8 dimensions.* 9"),
        (lambda m: m.gather(ONE, root=1), pmesh.UsageError, "ranks 0 to 0"),
        (lambda m: m.scatter([ONE], root=-1), pmesh.UsageError, "no rank -1"),
        (lambda m: m.scatter(None), pmesh.UsageError, "scatter takes one array for each rank"),
        (lambda m: m.scatter([ONE, ONE]), pmesh.UsageError, "each of 1 ranks, not 2"),
        (lambda m: m.all_to_all([]), pmesh.UsageError, "all_to_all .* each of 1 ranks, not 0"),
        (lambda m: m.all_to_all(["x"]), pmesh.UnsupportedArray, r"^\[0\]: a str"),
        (lambda m: m.all_gather(ONE, timeout_s=0), pmesh.UsageError, "timeout_s"),
        (lambda m: m.scatter([ONE], timeout_s=-1), pmesh.UsageError, "timeout_s"),
        (lambda m: m.all_to_all([ONE], timeout_s=-1), pmesh.UsageError, "timeout_s"),
    ],
)
def test_a_call_without_meaning_raises_before_an_op_starts(
    agent: WatchedAgent, call: Callable[[Any], object], error: type[Exception], message: str
) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        with pytest.raises(error, match=message):
            call(mesh)
        mesh.barrier()
    assert agent.calls == [Call("barrier", "float32", (0,))]


@pytest.mark.parametrize(
    "xs",
    [
        [np.ones((2, 2)), np.ones((2, 3))],
        [np.ones(2), np.ones(2, np.int8)],
        [np.array(1.0), np.ones(2)],
        [np.ones(2), np.array(1.0)],
        [np.ones(2), np.ones((2, 2))],
    ],
)
def test_arrays_of_one_rank_may_differ_in_their_first_dimension_only(
    agent: WatchedAgent, xs: list[Any]
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        for call in (mesh.all_to_all, lambda xs: mesh.scatter(xs, root=mesh.rank)):
            with pytest.raises(pmesh.UsageError, match=r"first dimension only: \[0\] is .*, \[1\]"):
                call(xs)
        mesh.barrier()

    run_ranks(agent.home, 2, program)
