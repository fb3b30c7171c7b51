"""Jobs through a view change: which begin, which run on, which it can help."""

from collections.abc import Iterable, Mapping

import pytest

from pmesh.core.values import Primary, Roster, Terms
from pmesh.core.views.rosters import jobs_to_settle, keep_local_rosters
from pmesh.core.wire.link import ViewRequest, Waiting
from pmesh.ids import JobName, Member, TrainerId
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    FACES,
    completed,
    make_epoch,
    make_flushed,
    make_outcome,
    make_report,
    make_roster,
    make_trainer,
    make_view,
    make_view_request,
    make_waiting,
    running,
)
from tests.worlds.settling import NEXT, TIMED_OUT, TRIO, running_everywhere, settle, settle_trio


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
            trainers=tuple(make_trainer(i, m) for i, m in enumerate((CARA, ANNA, BERT))),
            primary=Primary(NEXT, (CARA, ANNA, BERT)),
            next_id=TrainerId(3),
        )

    def test_with_the_trainers_of_one_machine_side_by_side_in_order_of_slot(self) -> None:
        (roster,) = self.begin(
            {ANNA: [make_waiting(3, slot=7), make_waiting(3, slot=2)], BERT: [make_waiting(3)]}
        )
        assert roster.trainers == (
            make_trainer(0, ANNA, slot=2),
            make_trainer(1, ANNA, slot=7),
            make_trainer(2, BERT),
        )
        assert roster.primary.voters == (ANNA, ANNA, BERT)

    def test_on_the_strictest_terms_that_any_of_them_asks_for(self) -> None:
        lax, wary = Terms(min_ranks=2), Terms(on_loss="raise", quorum="majority")
        (roster,) = self.begin(
            {ANNA: [make_waiting(2, terms=lax)], BERT: [make_waiting(2, terms=wary)]}
        )
        assert roster.terms == Terms(2, "raise", "majority")
        assert roster.quorate

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
        stale = make_view_request(make_roster(ANNA, BERT, CARA, number=4), TIMED_OUT, op=4)
        assert settle_trio(running_everywhere(), stale) is TRIO

    def test_when_the_concern_is_about_an_earlier_job_of_that_name(self) -> None:
        other = make_view_request(
            make_roster(ANNA, BERT, CARA, born=make_epoch(2)), TIMED_OUT, op=4
        )
        assert settle_trio(running_everywhere(), other) is TRIO

    def test_until_the_next_view_when_someone_was_not_fenced(self) -> None:
        """V3: what still reaches a trainer can't be resolved."""
        reports = running_everywhere() | {BERT: make_report(TRIO, {1: [running(4)]}, fenced=False)}
        assert settle_trio(reports, make_view_request(TRIO, TIMED_OUT, op=4)) is TRIO


@pytest.mark.parametrize("other", [0, 1, TRIO.next_id, 1000])
def test_what_a_member_reports_of_trainers_that_are_not_its_own_counts_for_nothing(
    other: int,
) -> None:
    lies = make_report(TRIO, {2: [running(4)], other: [completed(5)]})
    after = settle_trio(running_everywhere() | {CARA: lies}, make_view_request(TRIO, None, op=4))
    assert after.outcomes == ()


class TestJobsToSettle:
    """What a view change would help; the others run on (V7)."""

    def settle(
        self,
        *view_requests: ViewRequest,
        kept: Iterable[Member] = (ANNA, BERT, CARA),
        waiting: Mapping[Member, tuple[Waiting, ...]] | None = None,
    ) -> tuple[JobName, ...]:
        faces = make_roster(ANNA, job=FACES)
        view = make_view(5, ANNA, BERT, CARA, rosters=[TRIO, faces])
        return jobs_to_settle(view, tuple(kept), view_requests, waiting or {})

    def test_are_none_in_peace(self) -> None:
        assert self.settle() == ()

    def test_are_those_that_lost_a_rank(self) -> None:
        assert self.settle(kept=[ANNA, BERT]) == (DIGITS,)

    def test_are_not_those_whose_lost_rank_an_earlier_view_has_lost_already(self) -> None:
        hurt = make_roster(ANNA, BERT, ids=[0, 2])
        view = make_view(5, ANNA, BERT, CARA, rosters=[hurt])
        assert jobs_to_settle(view, (ANNA, BERT), (), {}) == ()

    def test_are_not_those_that_have_told_of_a_failed_op(self) -> None:
        told = make_roster(ANNA, BERT, outcomes=[make_outcome(3, 0, 1, verdict=TIMED_OUT)])
        view = make_view(5, ANNA, BERT, rosters=[told])
        assert jobs_to_settle(view, (ANNA, BERT), (), {}) == ()

    def test_are_those_of_a_concern_that_is_still_open(self) -> None:
        settled = make_view_request(make_roster(ANNA, number=2, job=FACES), None)
        assert self.settle(settled, make_view_request(TRIO, None)) == (DIGITS,)

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
        assert self.settle(make_view_request(TRIO, None), waiting=waiting) == (arias, DIGITS, poems)


def test_alone_an_agent_keeps_only_the_jobs_that_are_all_its_own() -> None:
    own, shared = make_roster(ANNA, ANNA), make_roster(ANNA, BERT, job=FACES)
    view = make_view(5, ANNA, BERT, rosters=[own, shared])
    assert keep_local_rosters(view, ANNA) == (own,)
    assert keep_local_rosters(view, BERT) == ()
