from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.ops.moments import Moments, cut_in_two, merge

NEAR = st.floats(-1, 1)
BASES = st.sampled_from([0.0, 1.0, 1e6, -1e9])
PARTS = st.lists(st.lists(NEAR, max_size=6), min_size=1, max_size=6)


def exact(values: list[float]) -> tuple[Fraction, Fraction]:
    """Return the mean and the sum of squared distances, without rounding."""
    known = [Fraction(value) for value in values]
    mean = sum(known, Fraction(0)) / max(len(known), 1)
    return mean, sum(((value - mean) ** 2 for value in known), Fraction(0))


def moments_of(values: list[float]) -> Moments:
    mean, deviation = exact(values)
    return Moments(len(values), np.array([float(mean)]), np.array([float(deviation)]))


@given(BASES, PARTS)
def test_merged_moments_are_those_of_all_values(base: float, parts: list[list[float]]) -> None:
    shifted = [[base + value for value in part] for part in parts]
    whole = merge(moments_of(part) for part in shifted)
    mean, deviation = exact([value for part in shifted for value in part])
    assert whole.count == sum(map(len, parts))
    assert whole.mean[0] == pytest.approx(float(mean), abs=1e-12, rel=1e-15)
    # 1e9 ± 1 in float64 have seven digits after the point; their squares would have none.
    assert whole.deviation[0] == pytest.approx(float(deviation), abs=1e-6)
    assert whole.deviation[0] >= 0


@given(PARTS)
def test_parts_without_values_change_no_bit(parts: list[list[float]]) -> None:
    found = [moments_of(part) for part in parts]
    among = merge([Moments.of_none(1), *found, Moments.of_none(1)])
    others = merge([part for part in found if part.count] or found)
    assert (among.count, among.mean.tobytes()) == (others.count, (others.mean + 0.0).tobytes())
    assert among.deviation.tobytes() == others.deviation.tobytes()


def test_a_row_carries_all_of_them() -> None:
    moments = Moments(2**40 + 1, np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    again = Moments.of_row(moments.row)
    assert again.count == moments.count
    assert np.array_equal(again.mean, moments.mean)
    assert np.array_equal(again.deviation, moments.deviation)


def test_the_running_variance_is_the_unbiased_one() -> None:
    moments = moments_of([1.0, 2.0, 6.0])
    assert moments.variance[0] == pytest.approx(14 / 3)
    assert moments.sample_variance[0] == pytest.approx(7)


@given(st.floats(-1e7, 1e7))
def test_a_mean_in_two_parts_is_as_exact_as_in_double_precision(mean: float) -> None:
    high, low = cut_in_two(np.array([mean]), np.float32)
    assert float(high[0]) + float(low[0]) == pytest.approx(mean, rel=1e-13, abs=1e-30)
