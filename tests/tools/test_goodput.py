"""Goodput among ranks of unequal speed: the short form of a campaign, and its arithmetic."""

import pytest

from tools.chaos.goodput import GOODPUT, run_goodput, samples_per_s
from tools.lab.campaign import CampaignRun


def test_what_is_counted_begins_with_the_end_of_the_first_round() -> None:
    counted = [(4, 10.1, 50.0), (4, 10.0, 100.0), (5, 20.0, 60.0), (5, 20.2, 40.0)]

    assert samples_per_s(counted) == pytest.approx(100 / 10.1)


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(400)
def test_after_a_kill_the_others_go_on_and_the_killed_rank_takes_part_again() -> None:
    run = CampaignRun(episodes=1, op_bytes=1 << 16, seed=1)

    tally = run_goodput(run, period_s=2.0, away_s=0.5, round_s=1.0)

    assert tally.violations == []
    assert tally.ops_checked > 0
    assert tally.facts[GOODPUT] > 0
