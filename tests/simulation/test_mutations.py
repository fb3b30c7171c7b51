"""Each rule of the design is needed: without it, random or aimed histories go wrong."""

from collections.abc import Callable

import pytest

from simulation.invariants import Violation
from simulation.seeds import judge_many
from tests.simulation import histories, link_histories, repeat_histories
from tests.simulation.mutations import MUTATIONS

# A rare one takes many histories.
pytestmark = pytest.mark.timeout(600)

SEEDS = 150
"""Twice what the rarest of RANDOM took, one after the other."""

RANDOM = {
    "no_refusal": 0,
    "same_counter": 0,
    "commit_any": 11,
    "same_incarnation": 0,
    "no_lineage": 20,
    "no_fence": 60,
    "highest_op_only": 1,
    "old_evidence": 0,
    "no_flush_deadline": 1,
    "no_quorum": 24,
    "no_retention": 20,
    "one_sided": 6,
    "prefer_verdict": 1,
    "always_rerun": 1,
    "see_at_install": 10,
    "name_survivors": 1,
    "enter_at_any_op": 1,
    "enter_without_sync": 1,
    "nobody_let_in": 5,
    "no_announcement": 27,
}
"""With a seed that noticed; any change of the code may ask for another, and then all are tried."""

AIMED = {
    "own_view_base": histories.a_half_sent_commit_is_what_the_next_leader_builds_on,
    "never_superseded": histories.who_slept_through_several_views_does_not_go_on_alone,
    "believe_anyone": histories.who_has_gone_on_alone_parts_nobody_else,
    "report_running": repeat_histories.what_ends_while_its_rank_is_recalled_is_in_the_report,
    "stays_in_meeting": (
        repeat_histories.who_is_recalled_before_the_last_one_has_come_has_not_begun
    ),
    "fence_running": repeat_histories.who_has_slept_ends_nothing_by_itself,
    "last_barrier_stable": repeat_histories.what_ends_while_its_rank_is_recalled_is_in_the_report,
    "drop_early": histories.what_comes_before_its_view_is_not_lost,
    "impatient": link_histories.agreements_end_where_messages_take_seconds,
    "forget_links": (link_histories.agreements_end_where_messages_outlast_a_silence),
    "unread_is_silent": link_histories.who_has_not_read_a_proposal_is_not_left_out,
    "no_voucher": link_histories.who_is_silent_to_one_and_not_to_another_is_not_lost,
    "no_clique": link_histories.two_whom_nobody_can_connect_are_not_in_one_view,
    "no_relay": link_histories.two_who_cannot_reach_each_other_stay_in_one_view_with_a_third,
    "no_forward": histories.a_lost_commit_is_made_up_for_by_the_next_heartbeat,
    "ring_follows_noise": link_histories.noise_does_not_change_the_ring,
    "no_ring_pause": link_histories.a_ring_changes_once_a_minute_at_most,
    "no_edge_watch": histories.a_lane_that_swallows_everything_is_replaced,
    "no_doubt": histories.who_slept_through_its_expulsion_ends_nothing_old,
    "trust_old_promises": (
        histories.who_promised_before_its_sleep_ends_nothing_in_the_view_that_it_wakes_up_to
    ),
    "lighter_history": histories.the_history_of_more_ranks_goes_on,
    "join_in_parts": histories.the_history_of_more_ranks_goes_on,
    "in_force_at_once": histories.what_too_few_have_installed_does_not_run,
    "last_voters_only": histories.what_too_few_have_installed_does_not_run,
    "never_overtaken": histories.who_knows_of_a_later_primary_does_not_help_an_earlier_one,
    "no_lost_holders": histories.what_a_dead_trainer_has_completed_is_fetched_from_its_agent,
    "torn_when_forgotten": histories.what_one_rank_has_forgotten_has_ended_at_all,
    "bind_root_late": histories.a_root_is_the_trainer_that_it_was_at_the_call,
    "enter_a_completed_sync": histories.nobody_enters_a_sync_that_somebody_has_completed,
    "no_min_ranks": histories.below_min_ranks_ops_wait_until_somebody_is_back,
    "no_raise": histories.a_loss_is_raised_where_the_job_asks_for_it,
    "unchecked_fetch": histories.a_late_and_different_call_is_noticed_when_it_fetches,
    "stage_anew": histories.who_fetches_a_sum_keeps_the_residual_of_its_own_part_in_it,
    "uncompared": histories.broadcasts_of_two_roots_fail_at_both,
    "lost_results": histories.a_result_that_went_away_with_its_last_holder_is_not_waited_for,
}

RARE = {
    "foreign_reports": "none of 120: who comes back has another number, and no ops to tell of",
    "false_lineage": "covered by the member's own check; without both: no_lineage",
    "follow_anyone": "covered by the leader's own check; without both: no_lineage",
    "unfenced_settled": "1 of 120: a job is settled unfenced only where a leader's list was short",
    "lanes_of_anyone": "1 of 3,200 (502522): two views at once must both let a trainer in",
    "stable_for_newcomers": "1 of 6,000 (604662)",
    "out_of_reach": "1 of 6,000 (606131)",
    "hears_is_enough": "none of 120: a connection that one side closes is closed for both",
    "no_veto": "none of 120: who is left out proposes itself, and the higher epoch wins",
    "no_needs": "none of 120; mostly a silent leader is gone before",
    "either_side": "1 of 120: two sides of a partition seldom have one number",
    "restarted_votes": "1 of 120",
    "later_marks": "1 of 13,000 (236502)",
    "all_holders": "2 of 51",
    "forget_verdicts": "none of 120: the roster and each who has seen it fail say so too",
}
"""Too rare for each run of the tests; what the single decision says is tested in tests/core."""

LONG = {
    link_histories.noise_does_not_change_the_ring,
    link_histories.a_ring_changes_once_a_minute_at_most,
}
"""They last for minutes of simulated time."""


def marks_of(history: Callable[[], None]) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if history in LONG else []


@pytest.mark.slow
@pytest.mark.parametrize("name", RANDOM)
def test_random_histories_notice_that_a_rule_is_missing(name: str) -> None:
    verdicts = judge_many([RANDOM[name], *range(SEEDS)], mutation=name)
    assert any(verdict.outcome is None for verdict in verdicts), MUTATIONS[name].rule


@pytest.mark.parametrize(
    "history",
    [
        pytest.param(history, marks=marks_of(history))
        for history in dict.fromkeys(
            [*AIMED.values(), link_histories.who_starts_behind_a_wall_joins_over_a_third]
        )
    ],
)
def test_an_aimed_history_goes_well(history: Callable[[], None]) -> None:
    history()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks_of(history)) for name, history in AIMED.items()]
)
def test_an_aimed_history_notices_that_a_rule_is_missing(name: str) -> None:
    with MUTATIONS[name](), pytest.raises((AssertionError, Violation)):
        AIMED[name]()


def test_each_mutation_is_accounted_for() -> None:
    assert {*RANDOM, *AIMED, *RARE} == set(MUTATIONS)
