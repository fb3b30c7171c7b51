import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.compression import top_k
from pmesh.compression.blocks import Bytes, Float32s
from pmesh.compression.top_k import sampled_places
from tests.compression.values import dyadic, float32s, gaussian

both_forms = pytest.mark.parametrize("compact", [False, True])


def compressed(
    own: Float32s,
    k: int,
    *,
    compact: bool = False,
    residual: Float32s | None = None,
    residual_out: Float32s | None = None,
) -> Bytes:
    wire = np.full(top_k.wire_bytes(len(own), k, compact=compact), 0xEE, np.uint8)
    own.flags.writeable = False
    top_k.compress(own, wire, k=k, compact=compact, residual=residual, residual_out=residual_out)
    return wire


def read(wire: Bytes, count: int, k: int, *, compact: bool = False) -> Float32s:
    out = np.zeros(count, np.float32)
    top_k.accumulate(wire, out, k=k, compact=compact)
    return out


def places_of_largest(values: Float32s, k: int) -> list[int]:
    """By sorting all of them; of equal ones the first."""
    magnitudes = values.view(np.uint32) & 0x7FFFFFFF
    return sorted(sorted(range(len(values)), key=lambda i: (-int(magnitudes[i]), i))[:k])


def indices_in(wire: Bytes, k: int) -> list[int]:
    return [int(i) for i in wire[: 4 * k].view("<u4")]


@st.composite
def arrays_and_k(draw: st.DrawFn, *, finite: bool = True) -> tuple[Float32s, int]:
    values = draw(float32s(st.integers(0, 40), finite=finite))
    return values, draw(st.integers(0, len(values)))


@given(arrays_and_k(finite=False))
def test_exactly_the_k_largest_are_sent_as_they_are_and_of_equal_ones_the_first(
    case: tuple[Float32s, int],
) -> None:
    values, k = case
    wire = compressed(values, k)
    expected = places_of_largest(values, k)
    assert indices_in(wire, k) == expected
    assert wire[4 * k :].tobytes() == values[expected].astype("<f4").tobytes()


@both_forms
@given(case=arrays_and_k())
def test_what_is_read_and_what_is_kept_make_up_the_values(
    case: tuple[Float32s, int],
    compact: bool,  # noqa: FBT001 - a parameter
) -> None:
    values, k = case
    residual = np.full(len(values), np.nan, np.float32)
    wire = compressed(values, k, compact=compact, residual_out=residual)
    image = read(wire, len(values), k, compact=compact)
    finite = np.isfinite(image)  # the largest numbers are infinity as bfloat16
    np.testing.assert_array_equal((image + residual)[finite], values[finite])
    np.testing.assert_array_equal(residual[~finite], 0)
    assert finite.all() or compact


@both_forms
@given(case=arrays_and_k(finite=False))
def test_nothing_that_is_not_finite_is_lost_or_stays(
    case: tuple[Float32s, int],
    compact: bool,  # noqa: FBT001 - a parameter
) -> None:
    values, k = case
    residual = np.full(len(values), np.nan, np.float32)
    wire = compressed(values, k, compact=compact, residual_out=residual)
    image = read(wire, len(values), k, compact=compact)
    assert np.isfinite(residual).all()
    bad = int(np.count_nonzero(~np.isfinite(values)))
    assert int(np.count_nonzero(~np.isfinite(image))) >= min(k, bad)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gaussian", gaussian(200_000, seed=1)),
        ("of few values", np.round(gaussian(200_000, seed=2))),
        ("all equal", np.full(200_000, -1.5, np.float32)),
        ("zeros", np.zeros(200_000, np.float32)),
        ("few are not zero", np.where(np.arange(200_000) % 1000, 0, 1).astype(np.float32)),
        ("half NaN", np.where(np.arange(200_000) % 2, np.nan, 1).astype(np.float32)),
    ],
)
@pytest.mark.parametrize("k", [0, 1, 2000, 100_000, 199_999, 200_000])
def test_large_arrays_are_sampled_and_the_choice_is_still_exact(
    name: str, values: Float32s, k: int
) -> None:
    del name
    magnitudes = values.view(np.uint32) & 0x7FFFFFFF
    residual = np.empty_like(values)
    wire = compressed(values, k, residual_out=residual)
    expected = np.sort(np.argsort(-magnitudes.astype(np.int64), kind="stable")[:k])
    np.testing.assert_array_equal(wire[: 4 * k].view("<u4"), expected)
    kept = np.where(np.isfinite(values), values, 0)
    kept[expected] = 0
    np.testing.assert_array_equal(residual, kept)


def test_a_sample_that_misleads_costs_time_and_nothing_else() -> None:
    own = np.ones(200_000, np.float32)
    own[sampled_places(len(own))] = 100
    residual = (np.arange(len(own)) % 7).astype(np.float32)
    residual_out = np.empty_like(residual)
    k = 60_000  # more than hold what all of the sample hold
    wire = compressed(own, k, residual=residual, residual_out=residual_out)
    expected = np.sort(np.argsort(-(own + residual), kind="stable")[:k])
    np.testing.assert_array_equal(wire[: 4 * k].view("<u4"), expected)
    np.testing.assert_array_equal(wire[4 * k :].view("<f4"), (own + residual)[expected])


def test_an_infinity_does_not_stay_where_the_whole_sample_is_nan() -> None:
    own = np.zeros(200_000, np.float32)
    places = np.unique(sampled_places(len(own)))
    own[places] = np.nan
    missed = next(i for i in range(len(own)) if not np.isnan(own[i]))
    own[missed] = np.inf
    residual = np.empty_like(own)
    wire = compressed(own, len(places), residual_out=residual)
    np.testing.assert_array_equal(wire[: 4 * len(places)].view("<u4"), places)
    assert not residual.any()


@both_forms
def test_a_residual_is_added_first_and_may_be_replaced_in_place(
    compact: bool,  # noqa: FBT001 - a parameter
) -> None:
    own, before = dyadic(300_000, seed=3), dyadic(300_000, seed=4)
    after, in_place = np.empty_like(before), before.copy()
    wire = compressed(own, 3000, compact=compact, residual=before, residual_out=after)
    again = compressed(own, 3000, compact=compact, residual=in_place, residual_out=in_place)
    np.testing.assert_array_equal(wire, again)
    np.testing.assert_array_equal(after, in_place)
    image = read(wire, len(own), 3000, compact=compact)
    assert np.count_nonzero(image) == 3000
    np.testing.assert_array_equal(image + after, own + before)


def test_a_sum_that_overflows_is_infinity_and_does_not_stay() -> None:
    largest = np.full(3, np.finfo(np.float32).max)
    residual = largest.copy()
    wire = compressed(largest, 2, residual=residual, residual_out=residual)
    np.testing.assert_array_equal(read(wire, 3, 2), [np.inf, np.inf, 0])
    np.testing.assert_array_equal(residual, 0)


def test_compact_positions_tell_the_first_from_the_last_of_a_run() -> None:
    values = np.zeros(3 * 65_536 + 1, np.float32)
    places = [0, 65_535, 65_536, 131_071, 3 * 65_536 - 1, 3 * 65_536]
    values[places] = [1, -2, 3, -4, 5, -6]
    wire = compressed(values, 6, compact=True)
    assert len(wire) == 3 * 4 + 6 * 4
    np.testing.assert_array_equal(read(wire, len(values), 6, compact=True), values)
    # By the hand of a reader: sizes of all runs but the last, positions, upper halves of fp32.
    assert [int(size) for size in wire[:12].view("<u4")] == [2, 2, 1]
    positions = [0, 65_535, 0, 65_535, 65_535, 0]
    assert [int(position) for position in wire[12:24].view("<u2")] == positions
    halves = wire[24:].view("<u2").astype(np.uint32) << 16
    np.testing.assert_array_equal(halves.view(np.float32), [1, -2, 3, -4, 5, -6])


def test_payloads_add_up() -> None:
    into = np.ones(4, np.float32)
    wire = compressed(np.array([0, 5, -3, 1], np.float32), 2)
    top_k.accumulate(wire, into, k=2)
    top_k.accumulate(wire, into, k=2)
    np.testing.assert_array_equal(into, [1, 11, -5, 1])


@pytest.mark.parametrize("indices", [[1, 1], [2, 1], [0, 4], [0, 2**32 - 1]])
def test_indices_that_do_not_ascend_or_go_beyond_the_last_are_refused(indices: list[int]) -> None:
    wire = np.zeros(16, np.uint8)
    wire[:8].view("<u4")[:] = indices
    into = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="indices of 2 of 4 values do not ascend, or exceed"):
        top_k.accumulate(wire, into, k=2)
    assert not into.any()


@given(st.binary(min_size=16, max_size=16))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    count, k = 100_000, 3  # two runs, the size of one of which is told
    wire = np.frombuffer(payload, np.uint8)
    assert len(wire) == top_k.wire_bytes(count, k, compact=True)
    try:
        image = read(wire, count, k, compact=True)
    except ValueError as e:
        assert "do not ascend" in str(e)  # noqa: PT017 - either is right
        return
    assert np.count_nonzero(image) <= k


@pytest.mark.parametrize(("count", "k"), [(3, 4), (3, -1), (2**32, 1)])
def test_what_can_not_be_sent_is_refused(count: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"k must be from 0 to count, and count below 2\*\*32"):
        top_k.wire_bytes(count, k)


@pytest.mark.parametrize(
    ("count", "ratio", "k"), [(0, 0.5, 0), (1, 0.01, 1), (1000, 0.07, 70), (7, 1.0, 7)]
)
def test_a_ratio_keeps_at_least_one_of_any(count: int, ratio: float, k: int) -> None:
    assert top_k.kept(count, ratio) == k


@pytest.mark.parametrize(("compact", "factor"), [(False, 12), (True, 24)])
@pytest.mark.parametrize("count", [100_000, 8 * 2**20, 25_000_000])
def test_one_percent_of_eight_ranks_takes_so_many_times_fewer_bytes(
    compact: bool,  # noqa: FBT001 - a parameter
    factor: int,
    count: int,
) -> None:
    ranks = 8
    uncompressed = 2 * (ranks - 1) / ranks * 4 * count  # a ring's all-reduce, sent by each
    k = top_k.kept(count, 0.01)
    assert uncompressed / ((ranks - 1) * top_k.wire_bytes(count, k, compact=compact)) >= factor
