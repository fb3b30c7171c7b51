"""Jobs through a view change: which begin, which run on, which are brought along."""

from collections.abc import Iterable, Mapping

import pytest

from pmesh.core.messages import Concern, Waiting
from pmesh.core.rosters import jobs_to_settle, keep_local_rosters, outcome_of
from pmesh.core.views import OpOutcome, Roster, Trainer, View
from pmesh.ids import JobName, Member, OpNumber, Slot
from tests.core.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    FACES,
    make_concern,
    make_epoch,
    make_flushed,
    make_report,
    make_roster,
    make_verdict,
    make_view,
    make_waiting,
    running,
)
from tests.core.settling import NEXT, TIMED_OUT, TRIO, running_everywhere, settle, settle_trio


class TestAJobBegins:
    """... when as many trainers wait as any of them asked for."""

    def begin(self, waiting: Mapping[Member, Iterable[Waiting]]) -> tuple[Roster, ...]:
        base = make_view(5, *waiting)
        return settle(
            base,
            {
                member: make_flushed(member, base, waiting=theirs)
                for member, theirs in waiting.items()
            },
        )

    def test_with_ranks_in_ring_order(self) -> None:
        (roster,) = self.begin({m: [make_waiting(3)] for m in (CARA, ANNA, BERT)})
        assert roster == Roster(
            job=DIGITS,
            born=NEXT,
            number=NEXT.counter,
            trainers=tuple(Trainer(m, Slot(0)) for m in (CARA, ANNA, BERT)),
            names=("mac-c", "mac-a", "mac-b"),
        )

    def test_with_the_trainers_of_one_machine_side_by_side_in_order_of_slot(self) -> None:
        (roster,) = self.begin(
            {ANNA: [make_waiting(3, slot=7), make_waiting(3, slot=2)], BERT: [make_waiting(3)]}
        )
        assert roster.trainers == (
            Trainer(ANNA, Slot(2)),
            Trainer(ANNA, Slot(7)),
            Trainer(BERT, Slot(0)),
        )
        assert roster.names == ("mac-a", "mac-a", "mac-b")

    def test_not_while_one_of_them_waits_for_more(self) -> None:
        assert self.begin({ANNA: [make_waiting(2)], BERT: [make_waiting(3)]}) == ()

    def test_with_everyone_who_waits_even_if_fewer_would_do(self) -> None:
        (roster,) = self.begin({m: [make_waiting(2)] for m in (ANNA, BERT, CARA)})
        assert len(roster.trainers) == 3

    def test_apart_from_other_jobs_and_rosters_are_sorted_by_name(self) -> None:
        rosters = self.begin(
            {
                ANNA: [make_waiting(1, slot=0, job=FACES), make_waiting(2, slot=1)],
                BERT: [make_waiting(2)],
            }
        )
        assert [(r.job, len(r.trainers)) for r in rosters] == [(DIGITS, 2), (FACES, 1)]

    def test_not_under_a_name_that_runs_already(self) -> None:
        base = make_view(5, ANNA, BERT, rosters=[make_roster(ANNA)])
        late = make_flushed(BERT, base, waiting=[make_waiting(1)])
        assert settle(base, {ANNA: make_flushed(ANNA, base), BERT: late}) == base.rosters


class TestAJobRunsOn:
    """V7: only who is concerned stops."""

    def test_when_its_ranks_stay_and_nobody_is_concerned(self) -> None:
        assert settle_trio(running_everywhere()) is TRIO

    def test_when_a_machine_without_its_trainers_is_lost(self) -> None:
        base = make_view(5, ANNA, BERT, CARA, DORA, rosters=[TRIO])
        answers = {m: make_flushed(m, base) for m in (ANNA, BERT, CARA)}
        assert settle(base, answers) == (TRIO,)

    def test_when_the_concern_was_settled_by_an_earlier_view(self) -> None:
        stale = make_concern(make_roster(ANNA, BERT, CARA, number=4), TIMED_OUT, op=4)
        assert settle_trio(running_everywhere(), stale) is TRIO

    def test_when_the_concern_is_about_an_earlier_job_of_that_name(self) -> None:
        other = make_concern(make_roster(ANNA, BERT, CARA, born=make_epoch(2)), TIMED_OUT, op=4)
        assert settle_trio(running_everywhere(), other) is TRIO

    def test_until_the_next_view_when_someone_was_not_fenced(self) -> None:
        """V3: what still reaches a trainer can't be resolved."""
        reports = running_everywhere() | {BERT: make_report(TRIO, {1: [running(4)]}, fenced=False)}
        assert settle_trio(reports, make_concern(TRIO, TIMED_OUT, op=4)) is TRIO


class TestNewcomers:
    """V9: idle or whole, they lose nothing."""

    BASE = make_view(5, ANNA, BERT)

    def merge(self, base: View, theirs: View, *newcomers: Member) -> tuple[Roster, ...]:
        answers = {m: make_flushed(m, base) for m in base.members}
        answers |= {m: make_flushed(m, theirs) for m in newcomers}
        return settle(base, answers, continuing=base.members)

    def test_bring_along_a_job_whose_ranks_all_come(self) -> None:
        job = make_roster(CARA, DORA)
        theirs = make_view(6, CARA, DORA, rosters=[job])
        assert self.merge(self.BASE, theirs, CARA, DORA) == (job,)

    def test_leave_behind_a_job_of_which_a_rank_stays_away(self) -> None:
        theirs = make_view(6, CARA, DORA, rosters=[make_roster(CARA, DORA)])
        assert self.merge(self.BASE, theirs, CARA) == ()

    def test_bring_along_a_job_whose_missing_rank_was_lost_before(self) -> None:
        job = make_roster(CARA, DORA, lost=[make_verdict("RankLost", 1)])
        theirs = make_view(6, CARA, rosters=[job])
        assert self.merge(self.BASE, theirs, CARA) == (job,)

    def test_give_way_to_the_job_of_that_name_that_runs_here(self) -> None:
        ours, theirs = make_roster(ANNA), make_roster(CARA, DORA)
        base = make_view(5, ANNA, BERT, rosters=[ours])
        view = make_view(6, CARA, DORA, rosters=[theirs])
        assert self.merge(base, view, CARA, DORA) == (ours,)

    @pytest.mark.parametrize("first", [CARA, DORA])
    def test_of_two_histories_the_one_with_more_ranks_goes_on_then_the_older(
        self, first: Member
    ) -> None:
        def bring(cara: Roster, dora: Roster) -> Roster:
            views = {
                CARA: make_view(6, CARA, rosters=[cara]),
                DORA: make_view(7, DORA, rosters=[dora]),
            }
            second = DORA if first == CARA else CARA
            answers = {ANNA: make_flushed(ANNA, self.BASE)}
            answers |= {m: make_flushed(m, views[m]) for m in (first, second)}
            (after,) = settle(self.BASE, answers, continuing=[ANNA])
            return after

        young, old = make_roster(CARA, born=make_epoch(4)), make_roster(DORA, born=make_epoch(3))
        twins = make_roster(CARA, CARA, born=make_epoch(4))
        assert bring(young, old) == old
        assert bring(twins, old) == twins

    def test_of_different_views_do_not_make_a_job_whole_together(self) -> None:
        split = make_roster(CARA, DORA)
        answers = {
            ANNA: make_flushed(ANNA, self.BASE),
            CARA: make_flushed(CARA, make_view(6, CARA, rosters=[split])),
            DORA: make_flushed(DORA, make_view(7, DORA, rosters=[split])),
        }
        assert settle(self.BASE, answers, continuing=[ANNA]) == ()


class TestJobsToSettle:
    """What a view change would help; the others run on (V7)."""

    def settle(
        self,
        *concerns: Concern,
        kept: Iterable[Member] = (ANNA, BERT, CARA),
        waiting: Mapping[Member, tuple[Waiting, ...]] | None = None,
    ) -> tuple[JobName, ...]:
        faces = make_roster(ANNA, job=FACES)
        view = make_view(5, ANNA, BERT, CARA, rosters=[TRIO, faces])
        return jobs_to_settle(view, tuple(kept), concerns, waiting or {})

    def test_are_none_in_peace(self) -> None:
        assert self.settle() == ()

    def test_are_those_that_lost_a_rank(self) -> None:
        assert self.settle(kept=[ANNA, BERT]) == (DIGITS,)

    def test_are_those_of_a_concern_that_is_still_open(self) -> None:
        settled = make_concern(make_roster(ANNA, number=2, job=FACES), None)
        assert self.settle(settled, make_concern(TRIO, None)) == (DIGITS,)

    def test_are_those_that_can_begin(self) -> None:
        poems = JobName("poems")
        waiting = {ANNA: (make_waiting(2, job=poems),), BERT: (make_waiting(2, job=poems),)}
        assert self.settle(waiting=waiting) == (poems,)

    def test_are_not_those_that_still_lack_a_trainer(self) -> None:
        assert self.settle(waiting={ANNA: (make_waiting(2, job=JobName("poems")),)}) == ()

    def test_are_not_those_whose_name_is_taken(self) -> None:
        assert self.settle(waiting={ANNA: (make_waiting(1, job=FACES),)}) == ()

    def test_are_named_in_order(self) -> None:
        poems, arias = JobName("poems"), JobName("arias")
        waiting = {ANNA: (make_waiting(1, job=poems), make_waiting(1, job=arias))}
        assert self.settle(make_concern(TRIO, None), waiting=waiting) == (arias, DIGITS, poems)


def test_an_op_without_an_outcome_runs_on_or_again() -> None:
    roster = make_roster(ANNA, outcomes=[OpOutcome(OpNumber(3), verdict=TIMED_OUT)])
    assert outcome_of(roster, OpNumber(3)) == OpOutcome(OpNumber(3), verdict=TIMED_OUT)
    assert outcome_of(roster, OpNumber(4)) is None


def test_alone_an_agent_keeps_only_the_jobs_that_are_all_its_own() -> None:
    own, shared = make_roster(ANNA, ANNA), make_roster(ANNA, BERT, job=FACES)
    view = make_view(5, ANNA, BERT, rosters=[own, shared])
    assert keep_local_rosters(view, ANNA) == (own,)
    assert keep_local_rosters(view, BERT) == ()
