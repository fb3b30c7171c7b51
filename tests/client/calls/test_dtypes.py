# ruff: noqa: ANN401 - arrays of libraries that have no common type
"""Every dtype of every library: calls that only move it take it, and what has a sum is reduced."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.client.calls.reducing import Strategy
from pmesh.client.trees.raw import to_raw
from tests.worlds.watched_agent import WatchedAgent, run_ranks

RANKS = 2
NUMBERS = [
    *["float16", "bfloat16", "float32", "complex64"],
    *["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool"],
]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
MOVED = {
    "numpy": [*NUMBERS, *FLOAT8, "float8_e4m3b11fnuz", "float64", "complex128", "longdouble"],
    "mlx": [*NUMBERS, "float64"],
    "torch": [*NUMBERS, *FLOAT8, "float64", "complex128"],
}
REDUCED = {library: [d for d in dtypes if "8_" not in d] for library, dtypes in MOVED.items()}
REDUCED["numpy"].remove("longdouble")


def array_of(library: str, dtype: str, values: Any) -> Any:
    """These small numbers in that dtype."""
    if library == "mlx":
        mx = pytest.importorskip("mlx.core")
        return mx.array(
            np.asarray(values), dtype=getattr(mx, "bool_" if dtype == "bool" else dtype)
        )
    if library == "torch":
        torch = pytest.importorskip("torch")
        return torch.from_numpy(np.asarray(values)).to(getattr(torch, dtype))
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return np.asarray(values).astype(getattr(ml_dtypes, dtype, dtype))


def bits(x: Any) -> tuple[str, str, tuple[int, ...], bytes]:
    raw = to_raw(x, "")
    assert raw is not None
    data = raw.data.tobytes()
    if isinstance(x, np.ndarray) and x.dtype == np.longdouble:
        data = x.astype(np.float64).tobytes()  # six of its 16 bytes say nothing
    return raw.library, raw.dtype, raw.shape, data


@pytest.mark.parametrize("library", MOVED)
def test_calls_that_only_move_bytes_take_every_dtype(agent: WatchedAgent, library: str) -> None:
    def of_rank(rank: int, dtype: str) -> Any:
        return array_of(library, dtype, np.arange(4.0).reshape(2, 2) + 2 * rank)

    def calls(mesh: pmesh.Mesh, dtype: str) -> list[Any]:
        mine = of_rank(mesh.rank, dtype)
        sent = mesh.sendrecv(mine, 1 - mesh.rank, 1 - mesh.rank)
        return [
            bits(mesh.broadcast(mine, root=1)),
            bits(mesh.broadcast({"x": mine, "y": [mine[0, 0], mine[:, 1]]}, root=1)["y"][1]),
            bits(mesh.scatter([mine, mine] if mesh.rank == 1 else None, root=1)),
            bits(mesh.all_to_all([mine, mine])[1]),
            bits(mesh.all_gather(mine, stacked=True)[1]),
            bits(sent if mesh.rank == 0 else mine),
        ]

    expected: dict[str, list[Any]] = {}
    for dtype in MOVED[library]:
        of_one = of_rank(1, dtype)
        expected[dtype] = [bits(of_one), bits(of_one[:, 1]), *[bits(of_one)] * 4]
    found = run_ranks(agent.home, RANKS, lambda mesh: {d: calls(mesh, d) for d in MOVED[library]})
    assert found == [expected] * RANKS


@pytest.mark.parametrize("library", REDUCED)
def test_every_dtype_is_reduced_as_its_library_adds_it(agent: WatchedAgent, library: str) -> None:
    values = [np.array([[0, 1, 3], [1, 1, 2]]), np.array([[0, 0, 5], [1, 2, 100]])]

    def calls(mesh: pmesh.Mesh, dtype: str) -> list[Any]:
        mine = array_of(library, dtype, values[mesh.rank])
        done = mesh.all_reduce(mine), mesh.all_reduce([mine], "prod")[0], mesh.reduce_scatter(mine)
        return [bits(x) for x in done]

    def sums(rank: int, dtype: str) -> list[Any]:
        one, other = (array_of("numpy", dtype, x) for x in values)
        total, product = (
            array_of(library, dtype, np.real(x).astype(np.float64))
            for x in (one + other, one * other)
        )
        return [bits(total), bits(product), bits(total[rank : rank + 1])]

    found = run_ranks(agent.home, RANKS, lambda mesh: {d: calls(mesh, d) for d in REDUCED[library]})
    assert found == [{d: sums(rank, d) for d in REDUCED[library]} for rank in range(RANKS)]


@pytest.mark.parametrize(
    "strategy", ["ring", "tree", "centralized", "hierarchical", "chain", "direct"]
)
@pytest.mark.parametrize("dtype", ["complex128", "uint8"])
def test_every_strategy_reduces_the_widest_and_the_narrowest(
    agent: WatchedAgent, dtype: str, strategy: Strategy
) -> None:
    count = 100_001  # of the widest more than one segment

    def of_rank(rank: int) -> Any:
        return (np.arange(count) % 50 + rank * (1j if dtype == "complex128" else 1)).astype(dtype)

    def program(mesh: pmesh.Mesh) -> bytes:
        return bytes(mesh.all_reduce(of_rank(mesh.rank), strategy=strategy).data)

    expected = bytes(sum(of_rank(rank) for rank in range(3)).data)
    assert run_ranks(agent.home, 3, program) == [expected] * 3


def test_a_broadcast_sends_as_many_bytes_as_the_array_has(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> int:
        mesh.broadcast(np.ones(10, np.float16))
        assert mesh.last_op is not None
        return mesh.last_op.bytes

    assert run_ranks(agent.home, RANKS, program) == [20] * RANKS


def test_a_broadcast_keeps_the_bits_of_a_nan_and_each_ranks_byte_order(agent: WatchedAgent) -> None:
    nan = np.array([0x7E01, 0xFD00], np.uint16).view(np.float16)

    def program(mesh: pmesh.Mesh) -> Any:
        mine = nan if mesh.rank == 0 else np.zeros(2, ">f2")
        return mesh.broadcast(mine)

    one, other = run_ranks(agent.home, RANKS, program)
    assert one.tobytes() == nan.tobytes()
    assert (other.dtype, other.tobytes()) == (np.dtype(">f2"), nan.byteswap().tobytes())


def test_complex_gradients_are_averaged_part_by_part(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> Any:
        times = 1 + 2 * mesh.rank
        mine = np.array([times * (1 + 2j), complex(np.inf, times)], np.complex64)
        return mesh.average_gradients([mine], weight=1 + mesh.rank)[0].view(np.float32)

    for parts in run_ranks(agent.home, RANKS, program):
        np.testing.assert_allclose(parts, [7 / 3, 14 / 3, np.inf, 7 / 3], rtol=1e-6)


REFUSED: dict[str, tuple[Callable[[pmesh.Mesh], object], str]] = {
    "a mean of integers": (
        lambda mesh: mesh.all_reduce(np.ones(1, np.uint8), "mean"),
        "no 'mean' of uint8; these are allowed: sum, max, min, prod, band, bor, bxor",
    ),
    "a maximum of complex numbers": (
        lambda mesh: mesh.all_reduce({"w": np.ones(1, np.complex64)}, "max"),
        "w: no 'max' of complex64; these are allowed: sum, mean, prod",
    ),
    "text": (
        lambda mesh: mesh.broadcast({"w": np.array(["a"])}),
        "w: arrays of numbers can be moved, not of <U1",
    ),
    "a number": (
        lambda mesh: mesh.broadcast(1.0),
        r"a float is not an array; wrap it, as in numpy.array\(x\)",
    ),
}


@pytest.mark.parametrize(("call", "said"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_meaning_is_refused_by_name(
    agent: WatchedAgent, call: Callable[[pmesh.Mesh], object], said: str
) -> None:
    with (
        pmesh.connect("job", home=agent.home) as mesh,
        pytest.raises(pmesh.UnsupportedArray, match=f"^{said}$"),
    ):
        call(mesh)
