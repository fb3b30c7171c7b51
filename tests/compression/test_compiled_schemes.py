"""The compiled kernels of what trainers compute, against numpy."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmesh.compression import fast, one_bit, power_sgd, random_k
from pmesh.compression.blocks import Float32s
from pmesh.compression.fast import computed_by, schemes
from tests.compression.values import float32s, gaussian

Results = list[Float32s]


@contextmanager
def computed_in_plain_python() -> Generator[None]:
    """What numba compiles, run by Python: else nothing could tell which of its lines are tested."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"), computed_by(schemes):
        for name, function in list(vars(schemes).items()):
            if hasattr(function, "py_func"):
                patch.setattr(schemes, name, function.py_func)
        yield


def assert_same_bits(kernel: Callable[[], Results]) -> None:
    with computed_by(None):
        expected = kernel()
    with computed_by(schemes):
        compiled = kernel()
    for mine, others in zip(compiled, expected, strict=True):
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


@settings(max_examples=30)
@given(data=st.data(), key=st.integers(0, 2**64 - 1))
def test_random_k_gives_the_same_bits(data: st.DataObject, key: int) -> None:
    own = data.draw(float32s(st.integers(0, 60), finite=False))
    before = data.draw(st.none() | float32s(st.just(len(own))))
    k = data.draw(st.integers(0, len(own)))
    assert_same_bits(lambda: by_random_k(own, before, k, key))


@pytest.mark.parametrize(("count", "k"), [(2**32 - 1, 1000), (2**31, 999), (70_000, 69_999)])
def test_random_k_draws_alike_from_many_values(count: int, k: int) -> None:
    for key in range(20):
        with computed_by(None):
            expected = random_k.draw_indices(count, k, key)
        with computed_by(schemes):
            np.testing.assert_array_equal(random_k.draw_indices(count, k, key), expected)


@settings(max_examples=30)
@given(data=st.data(), count=st.sampled_from([0, 1, 31, 32, 33, 1023, 1024, 1025, 40_000]))
def test_one_bit_gives_the_same_bits(data: st.DataObject, count: int) -> None:
    own = gaussian(count, seed=data.draw(st.integers(0, 2**32)))
    special = data.draw(float32s(st.integers(0, min(count, 40)), finite=False))
    own[: len(special)] = special
    before = data.draw(st.none() | st.just(gaussian(count, seed=2)))
    assert_same_bits(lambda: by_one_bit(own, before))


@settings(max_examples=30)
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


def test_the_kernels_mean_in_python_what_they_mean_compiled() -> None:
    own, before = gaussian(1100, seed=3), gaussian(1100, seed=4)
    own[[5, 6]] = np.nan, -np.inf
    factors = gaussian(40, seed=5)

    def everything() -> Results:
        return [
            *by_random_k(own, before, 100, 2**63 + 5),
            *by_random_k(own, None, 1100, 1),
            *by_one_bit(own, before),
            *by_one_bit(before, None),
            *by_power_sgd((3, 1030), 2, factors, own),
        ]

    with computed_by(None):
        expected = everything()
    with computed_in_plain_python():
        plain = everything()
    for mine, others in zip(plain, expected, strict=True):
        np.testing.assert_array_equal(mine, others)


def test_constants_that_stand_twice_are_alike() -> None:
    assert schemes.BLOCK == one_bit.BLOCK
    assert np.finfo(np.float32).max == schemes.LARGEST


def test_compiled_kernels_are_used_from_when_they_are_compiled_on() -> None:
    before = fast.compiled_schemes()
    with computed_by(None):
        assert fast.compiled_schemes() is None
        for _ in range(2):
            assert fast.prepare_schemes()
            assert fast.compiled_schemes() is schemes
    assert fast.compiled_schemes() is before


def test_without_numba_the_schemes_go_on_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pmesh.compression.fast.schemes", None)  # as if that failed
    monkeypatch.delattr(fast, "schemes")
    with computed_by(None):
        assert not fast.prepare_schemes()
        assert fast.compiled_schemes() is None
        own = gaussian(100, seed=6)
        residual = np.empty_like(own)
        wire = np.empty(one_bit.wire_bytes(100), np.uint8)
        one_bit.compress(own, wire, residual_out=residual)
