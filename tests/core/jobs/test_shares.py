import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.jobs.shares import (
    UNKNOWN_PPM,
    WHOLE,
    Pace,
    Standing,
    choose_weights,
    deal_rows,
)
from pmesh.errors import UsageError

WEIGHTS = st.lists(st.integers(1, WHOLE), min_size=1, max_size=8)


@given(st.data(), WEIGHTS, st.integers(0, 300))
def test_each_row_is_dealt_once_within_the_limits(
    data: st.DataObject, weights: list[int], rows: int
) -> None:
    limit = st.one_of(st.just(0), st.integers(-(-rows // len(weights)) or 1, 400))
    most = data.draw(st.lists(limit, min_size=len(weights), max_size=len(weights)))
    dealt = deal_rows(rows, weights, most)
    assert len(dealt) == len(weights)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(rows))
    for each, limit_of_rank in zip(dealt, most, strict=True):
        assert each.dtype == np.int64
        assert len(each) <= (limit_of_rank or rows)
        assert len(each) >= (rows >= len(weights))


@given(WEIGHTS)
def test_a_share_is_the_nearest_to_the_weight(weights: list[int]) -> None:
    rows = 1000 * len(weights)
    for weight, each in zip(weights, deal_rows(rows, weights), strict=True):
        assert abs(len(each) - rows * weight / sum(weights)) <= max(2, len(weights))


@given(st.integers(1, 9), st.integers(0, 100))
def test_equal_ranks_take_turns(size: int, rows: int) -> None:
    for rank, each in enumerate(deal_rows(rows, [77] * size)):
        assert each.tolist() == list(range(rank, rows, size))


def test_what_a_rank_says_of_its_limit_costs_no_time_and_no_row() -> None:
    lies = deal_rows(1_000_000, [1, 2, 2**62], [-(2**62), 3, 2**62])
    assert [len(each) for each in lies] == [1, 1, 999_998]
    full = deal_rows(1_000_000, [1, 2, 9], [0, 3, 5])
    assert [len(each) for each in full] == [999_992, 3, 5]


def test_with_fewer_rows_than_ranks_the_first_ranks_have_one_each() -> None:
    assert [each.tolist() for each in deal_rows(2, [1, 5, 9])] == [[0], [1], []]


def test_rows_of_unequal_ranks_are_spread_over_the_batch() -> None:
    # mlx-lm sorts rows by length: neighbours would be short for one rank, and long for another.
    slow, fast = deal_rows(12, [1, 2])
    assert (len(slow), len(fast)) == (4, 8)
    assert np.diff(slow).max() <= 4
    assert np.diff(fast).max() <= 2


def test_more_rows_than_fit_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"16 rows does not fit: .* 15 \(5, 10\).*max_rows"):
        deal_rows(16, [1, 1], [5, 10])
    assert [len(each) for each in deal_rows(15, [1, 1], [5, 10])] == [5, 10]


def measured(*seconds: float, ppm: int = 10_000, weights: Sequence[int] = ()) -> list[Standing]:
    chosen = weights or [WHOLE] * len(seconds)
    return [
        Standing(round(1e9 * each), ppm, weight)
        for each, weight in zip(seconds, chosen, strict=True)
    ]


def test_ranks_take_as_long_as_each_other() -> None:
    assert choose_weights(measured(4, 2, 1)) == (WHOLE // 4, WHOLE // 2, WHOLE)


def test_without_a_measurement_all_are_even() -> None:
    assert choose_weights([Standing(), Standing(weight=5)]) == (WHOLE, WHOLE)


def test_one_that_wants_even_shares_has_them_for_all() -> None:
    fast, slow = measured(1, 2)
    assert choose_weights([fast, slow._replace(even=1)]) == (WHOLE, WHOLE)


def test_a_newcomer_is_taken_for_a_typical_rank() -> None:
    ranks = [*measured(4, 1, 2, weights=(WHOLE // 4, WHOLE, WHOLE // 2)), Standing()]
    assert choose_weights(ranks) == (WHOLE // 4, WHOLE, WHOLE // 2, WHOLE // 2)


def test_a_gain_within_the_uncertainty_changes_nothing() -> None:
    now = [WHOLE, WHOLE]
    assert choose_weights(measured(1, 1.2, ppm=50_000, weights=now)) == (WHOLE, WHOLE)
    assert choose_weights(measured(1, 1.2, ppm=5_000, weights=now)) != (WHOLE, WHOLE)
    assert choose_weights(measured(1, 9.9, ppm=UNKNOWN_PPM, weights=now)) == (WHOLE, WHOLE)


def test_of_a_rank_without_a_figure_the_typical_one_is_taken() -> None:
    one, two, three = measured(1, 1, 9)
    assert choose_weights([one, two._replace(ns_per_row=0), three]) == (
        *(WHOLE, round(WHOLE / 5)),
        round(WHOLE / 9),
    )


def test_the_first_step_does_not_count() -> None:
    pace = Pace()
    pace.note(100.0, 1)
    assert (pace.ns_per_row, pace.uncertainty_ppm) == (0, UNKNOWN_PPM)
    pace.note(3.0, 2)
    pace.note(5.0, 0)  # without rows there is nothing to divide by
    assert pace.ns_per_row == 1_500_000_000
    assert 0 < pace.uncertainty_ppm < 100_000


def test_what_is_known_stays_until_it_is_measured_anew() -> None:
    pace = Pace()
    for seconds in (9.0, 2.0, 2.0):
        pace.note(seconds, 1)
    pace.forget()
    assert (pace.ns_per_row, pace.uncertainty_ppm) == (2_000_000_000, UNKNOWN_PPM)
    pace.note(9.0, 1)
    pace.note(4.0, 1)
    assert pace.ns_per_row == 4_000_000_000


@pytest.mark.parametrize("factor", [0.3, 4.0])
def test_a_sudden_change_of_speed_is_seen_within_five_steps(factor: float) -> None:
    pace, dice = Pace(), random.Random(1)  # noqa: S311 - no secret
    for _ in range(200):
        pace.note(dice.uniform(0.8, 1.2), 1)
    for _ in range(5):
        pace.note(factor * dice.uniform(0.8, 1.2), 1)
    assert abs(pace.ns_per_row / 1e9 / factor - 1) < 0.3


def test_more_steps_are_more_certain() -> None:
    pace, dice, known = Pace(), random.Random(2), list[int]()  # noqa: S311 - no secret
    for _ in range(300):
        pace.note(dice.gauss(1.0, 0.1), 1)
        known.append(pace.uncertainty_ppm)
    assert known[-1] < known[20] < known[3]
    assert 4_000 < known[-1] < 16_000  # 1.25 * 10 % / sqrt(256) is 0.8 %


def test_times_that_depend_on_the_shares_do_not_change_them_again_and_again() -> None:
    """Beyond 12 rows, rank 0 takes longer for each: of 13 or 11, each seems better."""
    paces, changed_at = [Pace(), Pace()], list[int]()
    weights: tuple[int, ...] = (WHOLE, WHOLE)
    for step in range(1000):
        few, many = (len(dealt) for dealt in deal_rows(20, weights))
        paces[0].note(few * (1.0 if few <= 12 else 1.6), few)
        paces[1].note(many * 2.0, many)
        told = [
            Standing(pace.ns_per_row, pace.uncertainty_ppm, weight)
            for pace, weight in zip(paces, weights, strict=True)
        ]
        if (chosen := choose_weights(told)) != weights:
            weights = chosen
            changed_at.append(step)
            for pace in paces:
                pace.forget()
    assert 2 < len(changed_at) < 25


def test_after_a_calm_time_a_change_may_follow_at_once() -> None:
    pace = Pace()

    def steps_until_certain() -> int:
        pace.forget()
        pace.note(1.0, 1)  # does not count
        for step in range(1000):
            if pace.uncertainty_ppm < UNKNOWN_PPM:
                return step
            pace.note(1.0, 1)
        raise AssertionError

    assert [steps_until_certain() for _ in range(5)] == [2, 4, 8, 16, 32]
    for _ in range(300):
        pace.note(1.0, 1)
    assert steps_until_certain() == 1
