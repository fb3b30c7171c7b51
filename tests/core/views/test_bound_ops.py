"""O4: ops whose result depends on who takes part end everywhere, or nowhere."""

import pytest

from pmesh.core.ops.kinds import BOUND_KINDS
from pmesh.core.values import OpOutcome, Terms
from pmesh.core.views.outcomes import outcome_of
from pmesh.core.wire.link import JobReport, ViewRequest
from pmesh.ids import Member, OpNumber
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    completed,
    ids_of,
    make_call,
    make_outcome,
    make_report,
    make_roster,
    make_view_request,
    running,
)
from tests.worlds.settling import NEXT, TIMED_OUT, TRIO, settle_trio

GATHER = make_call("all_gather")
HOSTS = {0: ANNA, 1: BERT, 2: CARA}
RERUN = make_view_request(TRIO, None, op=4)


def outcome(
    ended: set[int], left: set[int], *view_requests: ViewRequest, op: int = 4
) -> OpOutcome | None:
    """What becomes of an all-gather that has ended at some, of whom those `left` are there."""
    reports: dict[Member, JobReport | None] = {
        HOSTS[rank]: make_report(
            TRIO, {rank: [completed(4, call=GATHER) if rank in ended else running(4, GATHER)]}
        )
        for rank in left
    }
    after = settle_trio(reports, *view_requests)
    assert after.number == NEXT.counter
    return outcome_of(after, OpNumber(op))


@pytest.mark.parametrize("kind", sorted(BOUND_KINDS))
def test_it_fails_everywhere_when_a_rank_is_lost_in_it(kind: str) -> None:
    call = make_call(kind)
    after = settle_trio(
        {m: make_report(TRIO, {i: [running(4, call)]}) for i, m in ((0, ANNA), (1, BERT))}
    )
    found = outcome_of(after, OpNumber(4))
    assert found is not None
    assert found.verdict is not None
    assert (found.verdict.error, found.contributors) == ("RosterChanged", ids_of(0, 1))
    assert "rank 2 (mac-c) is lost" in found.verdict.message
    assert found.verdict.trainers == ids_of(2)


def test_it_fails_also_where_it_had_ended_when_it_can_t_end_everywhere() -> None:
    found = outcome({0}, {0, 1})
    assert found is not None
    assert found.verdict is not None
    assert (found.verdict.error, found.holders) == ("RosterChanged", ())


def test_it_has_ended_well_if_it_has_ended_at_all_who_are_left() -> None:
    assert outcome({0, 1}, {0, 1}) == make_outcome(4, 0, 1, 2, holders=[0, 1])


def test_it_runs_again_over_new_lanes_among_the_same_ranks() -> None:
    assert outcome(set(), {0, 1, 2}, RERUN) is None


def test_it_does_not_run_again_without_those_where_it_has_ended() -> None:
    found = outcome({1}, {0, 1, 2}, RERUN)
    assert found is not None
    assert found.verdict is not None
    assert found.verdict.error == "RosterChanged"
    assert "its ring was rebuilt" in found.verdict.message


def test_it_fails_with_the_verdict_that_was_asked_for_if_there_is_one() -> None:
    view_request = make_view_request(TRIO, TIMED_OUT, op=4)
    assert outcome(set(), {0, 1, 2}, view_request) == make_outcome(4, 0, 1, 2, verdict=TIMED_OUT)
    assert outcome({0}, {0, 1, 2}, view_request) == make_outcome(4, 0, 1, 2, verdict=TIMED_OUT)


def test_where_a_loss_is_to_raise_it_says_so() -> None:
    roster = make_roster(ANNA, BERT, CARA, terms=Terms(on_loss="raise"))
    after = settle_trio(
        {m: make_report(roster, {i: [running(4, GATHER)]}) for i, m in ((0, ANNA), (1, BERT))},
        roster=roster,
    )
    found = outcome_of(after, OpNumber(4))
    assert found is not None
    assert found.verdict is not None
    assert found.verdict.error == "RankLost"


def test_ranks_that_called_something_else_hear_of_that_first() -> None:
    calls = {ANNA: GATHER, BERT: make_call("all_to_all")}
    reports: dict[Member, JobReport | None] = {
        m: make_report(TRIO, {i: [running(4, call)]}) for i, (m, call) in enumerate(calls.items())
    }
    found = outcome_of(settle_trio(reports), OpNumber(4))
    assert found is not None
    assert found.verdict is not None
    assert found.verdict.error == "OpMismatch"


def test_the_ops_of_every_other_kind_run_again() -> None:
    after = settle_trio(
        {m: make_report(TRIO, {i: [running(4)]}) for i, m in ((0, ANNA), (1, BERT))}
    )
    assert outcome_of(after, OpNumber(4)) is None


def test_it_has_ended_also_where_it_is_stable_and_not_reported_any_more() -> None:
    """O2: Anna is in the next op; Bert has not heard that everybody has ended this one."""
    after = settle_trio(
        {
            ANNA: make_report(TRIO, {0: [running(5)]}, stable=4),
            BERT: make_report(TRIO, {1: [completed(4, call=GATHER)]}, stable=3),
        }
    )
    assert outcome_of(after, OpNumber(4)) == make_outcome(4, 0, 1, 2, holders=[1])
