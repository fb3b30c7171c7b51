"""What seeds of the simulated cluster have found in the core (`pmesh.testing`)."""

from dataclasses import replace

import msgspec

from pmesh.core.values import Verdict, View
from pmesh.core.views.agreement import hear, pass_time
from pmesh.core.views.leader import ring_order
from pmesh.core.views.outcomes import outcome_of
from pmesh.core.views.state import Facts, Fence, Install
from pmesh.core.wire.link import Commit
from pmesh.ids import Member, OpNumber
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    completed,
    ids_of,
    make_call,
    make_epoch,
    make_outcome,
    make_report,
    make_roster,
    make_state,
    make_trainer,
    make_verdict,
    make_view,
    make_view_request,
    running,
)
from tests.worlds.settling import settle_trio

LATE = make_trainer(2, CARA, enters=5)
PAIR = make_roster(ANNA, BERT)
WITH_A_NEWCOMER = msgspec.structs.replace(PAIR, trainers=(*PAIR.trainers, LATE))


class TestAnOpThatFailsAfterSomebodyHasEntered:
    """O5, O6: a broadcast's root may be some ops ahead, and others enter at the sync after it."""

    VIEW_REQUEST = make_view_request(WITH_A_NEWCOMER, make_verdict("OpMismatch"), op=4)

    def verdict_of_op_4(self, call: str) -> Verdict:
        reports = {
            ANNA: make_report(WITH_A_NEWCOMER, {0: [completed(4), running(5)]}),
            BERT: make_report(WITH_A_NEWCOMER, {1: [running(4, make_call(call))]}),
            CARA: make_report(WITH_A_NEWCOMER, {2: [running(5)]}, stable=4),
        }
        outcome = outcome_of(
            settle_trio(reports, self.VIEW_REQUEST, roster=WITH_A_NEWCOMER), OpNumber(4)
        )
        assert outcome is not None
        assert outcome.verdict is not None
        assert outcome.contributors == ids_of(0, 1)
        return outcome.verdict

    def test_is_followed_by_the_world_of_those_who_could_have_called_it(self) -> None:
        assert "mac-c" not in self.verdict_of_op_4("barrier").message

    def test_also_when_nobody_has_its_result(self) -> None:
        reports = {
            ANNA: make_report(WITH_A_NEWCOMER, {0: [running(4)]}),
            BERT: make_report(WITH_A_NEWCOMER, {1: [running(4)]}),
            CARA: make_report(WITH_A_NEWCOMER, {2: []}, stable=4),
        }
        after = settle_trio(reports, self.VIEW_REQUEST, roster=WITH_A_NEWCOMER)
        outcome = outcome_of(after, OpNumber(4))
        assert outcome is not None
        assert outcome.contributors == ids_of(0, 1)


class TestWhatANewcomerHadNoPartIn:
    """O6: its first op is a later sync, so all before is stable for it; that tells nothing."""

    def test_stays_failed_for_who_has_not_come_to_it_yet(self) -> None:
        """O3: else that rank calls it, and waits for others who have gone on (seed 604662)."""
        failed = make_outcome(4, 0, 1, verdict=make_verdict("OpTimedOut"))
        roster = msgspec.structs.replace(WITH_A_NEWCOMER, outcomes=(failed,))
        reports = {
            BERT: make_report(roster, {1: [running(3)]}, stable=2),
            CARA: make_report(roster, {2: [running(5)]}, stable=4),
        }
        assert failed in settle_trio(reports, roster=roster).outcomes

    def test_is_forgotten_once_it_is_stable_for_all_others(self) -> None:
        failed = make_outcome(4, 0, 1, verdict=make_verdict("OpTimedOut"))
        roster = msgspec.structs.replace(WITH_A_NEWCOMER, outcomes=(failed,))
        reports = {
            BERT: make_report(roster, {1: [running(5)]}, stable=4),
            CARA: make_report(roster, {2: [running(5)]}, stable=4),
        }
        assert settle_trio(reports, roster=roster).outcomes == ()

    def test_has_not_ended_for_it(self) -> None:
        """O4: Bert has not called the gather that has ended at Anna."""
        gather = make_call("gather")
        reports = {
            ANNA: make_report(WITH_A_NEWCOMER, {0: [completed(4, call=gather)]}, stable=3),
            BERT: make_report(WITH_A_NEWCOMER, {1: []}, stable=3),
            CARA: make_report(WITH_A_NEWCOMER, {2: [running(5)]}, stable=4),
        }
        view_request = make_view_request(WITH_A_NEWCOMER, None, op=5)
        outcome = outcome_of(
            settle_trio(reports, view_request, roster=WITH_A_NEWCOMER), OpNumber(4)
        )
        assert outcome is not None
        assert outcome.verdict is not None
        assert outcome.verdict.error == "RosterChanged"


def test_what_follows_from_a_view_waits_until_the_jobs_have_followed_it() -> None:
    """V3: the flush answer would tell of the jobs as they were before it (seed 201628)."""
    after = make_view(6, ANNA, BERT, leader=BERT, previous=make_epoch(5))
    state = replace(
        make_state(ANNA, make_view(5, ANNA, BERT)), promised=after.epoch, flushed_at=100.0
    )
    ring = ring_order((ANNA, BERT), ((0, 20), (20, 0)))
    commit = Commit(replace_seats(after, ring), ((0, 20), (20, 0)))
    step = hear(state, BERT, commit, Facts(), now=100.0)  # Bert is not heard any more
    assert step.actions == (Install(commit.view),)
    later = pass_time(step.state, Facts(), now=100.0)
    assert [type(action) for action in later.actions] == [Fence, Install]


def replace_seats(view: View, ring: tuple[Member, ...]) -> View:
    seats = tuple(seat for member in ring if (seat := view.seat_of(member)) is not None)
    return msgspec.structs.replace(view, seats=seats)
