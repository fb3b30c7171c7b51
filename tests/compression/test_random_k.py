import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.compression import random_k
from pmesh.compression.blocks import Float32s, Indices
from tests.compression.values import dyadic, float32s, gaussian

keys = st.integers(0, 2**64 - 1)


def compressed(
    own: Float32s,
    indices: Indices,
    *,
    residual: Float32s | None = None,
    residual_out: Float32s | None = None,
) -> Float32s:
    sent = np.full(len(indices), np.nan, np.float32)
    own.flags.writeable = False
    random_k.compress(own, indices, sent, residual=residual, residual_out=residual_out)
    return sent


def read(sent: Float32s, indices: Indices, count: int) -> Float32s:
    out = np.full(count, np.nan, np.float32)
    random_k.decompress(sent, indices, out)
    return out


@st.composite
def counts_and_k(draw: st.DrawFn) -> tuple[int, int]:
    count = draw(st.integers(0, 300))
    return count, draw(st.integers(0, count))


@given(counts_and_k(), keys)
def test_exactly_k_distinct_indices_are_drawn(sizes: tuple[int, int], key: int) -> None:
    count, k = sizes
    indices = random_k.draw_indices(count, k, key)
    assert indices.dtype == np.int64
    assert len(set(indices.tolist())) == k
    assert all(0 <= i < count for i in indices)


def test_indices_of_the_largest_arrays_are_drawn_without_overflow() -> None:
    count = 2**32 - 1
    indices = random_k.draw_indices(count, 1000, 1)
    assert len(np.unique(indices)) == 1000
    assert 0 <= indices.min() < count // 500
    assert count - count // 500 < indices.max() < count


def test_draws_are_the_same_on_every_machine() -> None:
    """Literals, of no machine in particular: they are integer arithmetic."""
    key = random_k.draw_key(seed=7, job="digits", op=3, bucket=1)
    assert key == 5419980515634945909
    assert random_k.draw_indices(1000, 5, key).tolist() == [159, 294, 573, 762, 953]


def test_seed_job_op_and_bucket_each_change_the_draw() -> None:
    arguments = [(0, "a", 0, 0), (1, "a", 0, 0), (0, "b", 0, 0), (0, "a", 1, 0), (0, "a", 0, 1)]
    drawn = [random_k.draw_indices(1000, 100, random_k.draw_key(*each)) for each in arguments]
    assert len({tuple(indices.tolist()) for indices in drawn}) == len(arguments)


@pytest.mark.parametrize(("count", "k"), [(10, 3), (10, 9), (7, 5), (16, 4), (5, 1)])
def test_each_value_is_drawn_equally_often(count: int, k: int) -> None:
    trials = 5000
    hits = np.zeros(count)
    for key in range(trials):
        hits[random_k.draw_indices(count, k, key)] += 1
    chance = k / count
    deviation = np.sqrt(trials * chance * (1 - chance))
    assert np.abs(hits - trials * chance).max() < 4 * deviation


@pytest.mark.parametrize(("count", "k"), [(3, 4), (3, -1), (2**32, 1)])
def test_what_can_not_be_drawn_is_refused(count: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"k must be from 0 to count, and count below 2\*\*32"):
        random_k.draw_indices(count, k, 0)


@given(float32s(st.integers(1, 60)), st.data())
def test_with_feedback_values_go_as_they_are_and_the_others_are_kept(
    values: Float32s, data: st.DataObject
) -> None:
    k = data.draw(st.integers(0, len(values)))
    indices = random_k.draw_indices(len(values), k, data.draw(keys))
    residual = np.full(len(values), np.nan, np.float32)
    sent = compressed(values, indices, residual_out=residual)
    np.testing.assert_array_equal(sent, values[indices])
    np.testing.assert_array_equal(read(sent, indices, len(values)) + residual, values)


def test_a_residual_is_added_first_and_may_be_replaced_in_place() -> None:
    own, before = dyadic(100_000, seed=3), dyadic(100_000, seed=4)
    indices = random_k.draw_indices(len(own), 10_000, 5)
    after, in_place = np.empty_like(before), before.copy()
    sent = compressed(own, indices, residual=before, residual_out=after)
    again = compressed(own, indices, residual=in_place, residual_out=in_place)
    np.testing.assert_array_equal(sent, again)
    np.testing.assert_array_equal(after, in_place)
    np.testing.assert_array_equal(read(sent, indices, len(own)) + after, own + before)


def test_without_feedback_the_mean_over_all_draws_is_the_value() -> None:
    own = gaussian(64, seed=6)
    trials = 4000
    total = np.zeros(64)
    for key in range(trials):
        indices = random_k.draw_indices(64, 16, key)
        total += read(compressed(own, indices), indices, 64)
    # Each is 4 times itself with chance 1/4: its deviation is sqrt(3) times itself.
    assert (np.abs(total / trials - own) < 4 * np.sqrt(3 / trials) * np.abs(own)).all()


def test_with_feedback_what_comes_out_never_overshoots_what_went_in() -> None:
    steps, count, k = 200, 1000, 100
    residual, out = np.zeros(count, np.float32), np.zeros(count)
    ones = np.ones(count, np.float32)
    most_kept = 0.0
    for step in range(steps):
        indices = random_k.draw_indices(count, k, random_k.draw_key(0, "job", step, 0))
        sent = compressed(ones, indices, residual=residual, residual_out=residual)
        out += read(sent, indices, count)
        most_kept = max(most_kept, float(residual.max()))
        assert out.max() <= step + 1  # scaled values would be ten times as much
    assert out.min() >= steps - most_kept
    # A value waits ten steps in the mean; that one of 200,000 waits 200 has a chance of 0.0001.
    assert most_kept < 200


@given(float32s(st.integers(1, 60), finite=False), st.data(), st.booleans())
def test_nothing_that_is_not_finite_is_lost_or_stays(
    values: Float32s,
    data: st.DataObject,
    feedback: bool,  # noqa: FBT001 - drawn
) -> None:
    indices = random_k.draw_indices(
        len(values), data.draw(st.integers(1, len(values))), data.draw(keys)
    )
    residual = np.full(len(values), np.nan, np.float32) if feedback else None
    sent = compressed(values, indices, residual_out=residual)
    drawn = values[indices]
    if not np.isfinite(values).all():
        assert not np.isfinite(sent).all()
        assert not np.isfinite(sent[~np.isfinite(drawn)]).any()
    elif feedback:
        np.testing.assert_array_equal(sent, drawn)
    assert residual is None or np.isfinite(residual).all()


def test_large_values_whose_sum_overflows_are_no_nan() -> None:
    own = np.full(8, np.finfo(np.float32).max)
    indices = random_k.draw_indices(8, 2, 0)
    np.testing.assert_array_equal(compressed(own, indices, residual_out=own.copy()), own[:2])
