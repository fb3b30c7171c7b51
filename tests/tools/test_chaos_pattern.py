"""The values that trainers add up: a wrong, stale, torn or misplaced result is seen."""

from itertools import combinations

import numpy as np
import pytest

from tools.chaos.calls import MOST_TRAINERS, Pattern, Values, digest, own_value

NBYTES = 1 << 20
SEGMENT = 65536  # values: 256 KiB


def total(step: int, *numbers: int) -> Values:
    pattern = Pattern(NBYTES)
    result = np.zeros_like(pattern.input(step, 1))
    for number in numbers:
        result += pattern.input(step, number)
    return result


def test_a_sum_is_right_for_exactly_those_who_gave() -> None:
    pattern, result = Pattern(NBYTES), total(5, 1, 2, 4)

    assert pattern.is_right(result, 5, [4, 2, 1])
    for numbers in ([1, 2], [1, 2, 4, 8], [1, 2, 3], [7]):
        assert not pattern.is_right(result, 5, numbers)
    assert not pattern.is_right(result, 4, [1, 2, 4])


def test_no_two_sets_of_contributors_have_the_same_sum() -> None:
    everybody = range(1, MOST_TRAINERS + 1)
    groups = [group for n in everybody for group in combinations(everybody, n)]
    sums = {sum(own_value(996, number) for number in group) for group in groups}

    assert len(sums) == len(groups)


def test_the_largest_sums_are_exact_in_float32() -> None:
    everybody = range(1, MOST_TRAINERS + 1)

    assert total(996, *everybody).max() < 2**24
    assert Pattern(NBYTES).is_right(total(996, *everybody), 996, everybody)


@pytest.mark.parametrize("place", [0, 77, -1])
def test_one_wrong_value_is_seen_and_changes_the_hash(place: int) -> None:
    result = total(1, 1, 2)
    before = digest(result)
    result.flat[place] += 1

    assert not Pattern(NBYTES).is_right(result, 1, [1, 2])
    assert digest(result) != before


def test_a_segment_in_the_place_of_another_is_seen() -> None:
    result = total(1, 1, 2)
    flat = result.reshape(-1)
    flat[:SEGMENT] = flat[SEGMENT : 2 * SEGMENT].copy()

    assert not Pattern(NBYTES).is_right(result, 1, [1, 2])
