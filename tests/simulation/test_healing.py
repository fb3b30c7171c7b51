"""The simulation holds its agents against the bound on how soon healed agents agree."""

import pytest

from pmesh.core.views.bound import LONGEST_ROUND_TRIP_S, agreement_bound_s
from simulation.healing import Healing
from simulation.invariants import Violation

LATE_S = agreement_bound_s(3, 0.0) + 0.1


def test_members_that_do_not_agree_in_time_are_a_violation() -> None:
    healing = Healing()
    healing.check(agreed=False, members=3, now=LATE_S - 0.2)
    with pytest.raises(Violation, match="no agreement"):
        healing.check(agreed=False, members=3, now=LATE_S)


def test_more_members_and_longer_round_trips_get_more_time() -> None:
    healing = Healing()
    healing.check(agreed=False, members=4, now=LATE_S)
    healing.measured(1.0)
    healing.check(agreed=False, members=3, now=LATE_S)


def test_a_loss_and_an_agreement_begin_the_time_anew() -> None:
    healing = Healing()
    healing.begin(50.0)
    healing.check(agreed=False, members=3, now=LATE_S)
    healing.check(agreed=True, members=3, now=100.0)
    healing.check(agreed=False, members=3, now=50.0 + LATE_S)


def test_of_a_network_beyond_all_patience_nothing_is_asked() -> None:
    healing = Healing()
    healing.measured(LONGEST_ROUND_TRIP_S + 0.1)
    healing.check(agreed=False, members=3, now=10_000.0)
