"""The bound on how soon healed agents agree covers each wait that one of them can have begun."""

from dataclasses import replace

import pytest

from pmesh.core.views.bound import LONGEST_ROUND_TRIP_S, OLD_WAITS_S, agreement_bound_s
from pmesh.core.views.state import (
    LONGEST_BACK_OFF_S,
    MOST_FAILURES,
    PATIENCE_S,
    MemberFlaps,
    patience,
)
from tests.worlds.builders import ANNA, make_state, make_view


def longest_patience_s(timeout_s: float) -> float:
    state = make_state(ANNA, make_view(1, ANNA))
    return PATIENCE_S * patience(replace(state, failures=MOST_FAILURES, timeout_s=timeout_s))


@pytest.mark.parametrize("timeout_s", [0.0, 1.0, 60.0])
def test_the_longest_wait_for_a_commit_a_hold_off_and_a_back_off_fit_in_one_after_the_other(
    timeout_s: float,
) -> None:
    hold_off_s = MemberFlaps(losses=99, lost_at=0.0).held_off_until
    waits_s = longest_patience_s(timeout_s) + hold_off_s + LONGEST_BACK_OFF_S
    assert waits_s <= OLD_WAITS_S


def test_the_longest_patience_outlasts_a_flush_and_its_commit_on_the_slowest_network() -> None:
    assert longest_patience_s(LONGEST_ROUND_TRIP_S) >= 4 * LONGEST_ROUND_TRIP_S


def test_it_grows_with_members_and_round_trips() -> None:
    assert agreement_bound_s(3, 0.0) < agreement_bound_s(4, 0.0) < agreement_bound_s(4, 1.0)


def test_of_three_on_a_good_network_it_is_little_more_than_a_minute() -> None:
    assert agreement_bound_s(3, 0.01) < 80.0
