"""The kernels in C of what trainers compute, against numpy."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.compression import compiled, one_bit, power_sgd, random_k
from pmesh.compression.blocks import Float32s
from pmesh.compression.compiled import Kernels, in_numpy, kernels
from tests.compression.every_codec import needs_the_library
from tests.compression.values import float32s, gaussian
from tests.worlds.examples import examples
from tests.worlds.system import without_library

pytestmark = needs_the_library
Results = list[Float32s]


def assert_same_bits(kernel: Callable[[], Results]) -> None:
    with in_numpy():
        expected = kernel()
    in_c = kernel()
    for mine, others in zip(in_c, expected, strict=True):
        np.testing.assert_array_equal(mine, others)  # a NaN is like any other
        numbers = ~np.isnan(others)
        np.testing.assert_array_equal(
            mine[numbers].view(np.uint32), others[numbers].view(np.uint32)
        )


def by_random_k(own: Float32s, before: Float32s | None, k: int, key: int) -> Results:
    indices = random_k.draw_indices(len(own), k, key)
    sent, after = np.empty(k, np.float32), np.empty_like(own)
    random_k.compress(own, indices, sent, residual=before, residual_out=after)
    unscaled = np.empty(k, np.float32)
    random_k.compress(own, indices, unscaled)
    return [indices.astype(np.float32), sent, after, unscaled]


def by_one_bit(own: Float32s, before: Float32s | None) -> Results:
    wires = [np.full(one_bit.wire_bytes(len(own)), 0xEE, np.uint8) for _ in range(2)]
    after, into = np.empty_like(own), gaussian(len(own), seed=1)
    one_bit.compress(own, wires[0], residual=before, residual_out=after)
    one_bit.compress(own, wires[1])
    for wire in wires:
        one_bit.accumulate(wire, into)
    signs_from = 4 * -(-len(own) // one_bit.BLOCK)
    signs = [wire[signs_from:].astype(np.float32) for wire in wires]
    return [wires[0][:signs_from].view(np.float32), *signs, after, into]


def by_power_sgd(shape: tuple[int, int], rank: int, factors: Float32s, kept: Float32s) -> Results:
    plan = power_sgd.plan_matrices([shape], rank=rank, min_rate=0.01)
    p, q = np.resize(factors, plan.p_count), np.resize(factors[::-1], plan.q_count)
    after, out, alone = np.resize(kept, plan.count), *np.zeros((2, plan.count), np.float32)
    power_sgd.decompress(plan, p, q, out, residual_out=after)
    power_sgd.decompress(plan, p, q, alone)
    return [out, after, alone]


@examples(30)
@given(data=st.data(), key=st.integers(0, 2**64 - 1))
def test_random_k_gives_the_same_bits(data: st.DataObject, key: int) -> None:
    own = data.draw(float32s(st.integers(0, 60), finite=False))
    before = data.draw(st.none() | float32s(st.just(len(own))))
    k = data.draw(st.integers(0, len(own)))
    assert_same_bits(lambda: by_random_k(own, before, k, key))


@pytest.mark.parametrize(("count", "k"), [(2**32 - 1, 1000), (2**31, 999), (70_000, 69_999)])
def test_random_k_draws_alike_from_many_values(count: int, k: int) -> None:
    for key in range(20):
        with in_numpy():
            expected = random_k.draw_indices(count, k, key)
        np.testing.assert_array_equal(random_k.draw_indices(count, k, key), expected)


@examples(30)
@given(data=st.data(), count=st.sampled_from([0, 1, 31, 32, 33, 1023, 1024, 1025, 40_000]))
def test_one_bit_gives_the_same_bits(data: st.DataObject, count: int) -> None:
    own = gaussian(count, seed=data.draw(st.integers(0, 2**32)))
    special = data.draw(float32s(st.integers(0, min(count, 40)), finite=False))
    own[: len(special)] = special
    before = data.draw(st.none() | st.just(gaussian(count, seed=2)))
    assert_same_bits(lambda: by_one_bit(own, before))


@examples(30)
@given(
    data=st.data(),
    rank=st.integers(1, 4),
    shape=st.sampled_from([(1, 1), (7, 5), (3, 2500), (2500, 3)]),
)
def test_power_sgd_gives_the_same_bits(
    data: st.DataObject, rank: int, shape: tuple[int, int]
) -> None:
    factors, kept = (data.draw(float32s(st.integers(1, 20), finite=False)) for _ in range(2))
    assert_same_bits(lambda: by_power_sgd(shape, rank, factors, kept))


def the_kernels() -> Kernels:
    found = kernels()
    assert found is not None
    return found


def test_without_the_library_numpy_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = gaussian(100, seed=6)
    expected = np.empty(one_bit.wire_bytes(100), np.uint8)
    one_bit.compress(own, expected)
    with without_library(monkeypatch):
        compiled.forget()
        assert kernels() is None
        wire = np.empty_like(expected)
        one_bit.compress(own, wire)
    compiled.forget()
    np.testing.assert_array_equal(wire, expected)


def test_arrays_that_do_not_fit_are_refused_before_the_library_reads_them() -> None:
    own, wire = gaussian(100, seed=7), np.empty(one_bit.wire_bytes(100), np.uint8)
    short, readonly = own[:99], own.copy()
    readonly.flags.writeable = False
    with pytest.raises(ValueError, match=r"need float32\[100\] in one piece, not float32\[99\]"):
        one_bit.compress(own, wire, residual=short, residual_out=own)
    with pytest.raises(ValueError, match="a result must be writable"):
        one_bit.compress(own, wire, residual_out=readonly)
    with pytest.raises(ValueError, match="not float64"):
        one_bit.compress(own.astype(np.float64), wire)
    with pytest.raises(ValueError, match="in one piece"):
        one_bit.compress(gaussian(200, seed=8)[::2], wire)


@pytest.mark.parametrize(
    "call",
    [
        lambda k, own, wire: k.compress_one_bit(own, wire[1:], None, None),
        lambda k, own, wire: k.accumulate_one_bit(wire[:-4], own),
        lambda k, own, wire: k.decode("fp16", wire, own),
        lambda k, own, wire: k.decode("int8", wire, own),
        lambda k, own, wire: k.hop(
            *("int8", None, own, wire),
            **dict.fromkeys(("own_scale", "divisor", "residual_factor"), 1.0),
            **dict.fromkeys(("residual", "residual_out")),
        ),
        lambda k, own, _: k.multiply(own, own, 3, own, None),
        lambda k, own, _: k.multiply(own, own, 0, own, None),
        lambda k, own, _: k.multiply(own, own, 1, own, None),
        lambda k, *_: k.draw_indices(1, 9, 0, np.empty(10, np.int64)),
        lambda k, *_: k.draw_indices(1, 2**32, 0, np.empty(10, np.int64)),
    ],
)
def test_the_library_refuses_lengths_that_do_not_fit_and_writes_nothing(
    call: Callable[[Kernels, Float32s, object], None],
) -> None:
    own, wire = gaussian(100, seed=9), np.full(one_bit.wire_bytes(100), 0xEE, np.uint8)
    before = own.copy()
    with pytest.raises(ValueError, match="the lengths of the arrays do not fit"):
        call(the_kernels(), own, wire)
    np.testing.assert_array_equal(own, before)
    assert (wire == 0xEE).all()
