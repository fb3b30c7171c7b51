"""Jobs through a view change: which begin, which run on, which trainers enter (O6)."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec
import pytest

from pmesh.core.values import Primary, Roster, Terms, Verdict, View
from pmesh.core.views.agreement import pass_time, receive
from pmesh.core.views.leader import ring_order
from pmesh.core.views.outcomes import gather, op_to_enter, outcome_of
from pmesh.core.views.rosters import in_ring_order, jobs_to_settle, keep_local_rosters
from pmesh.core.views.state import Facts, FenceJobs, Install
from pmesh.core.wire.views import Candidate, Commit, JobReport, OpReport, ViewRequest
from pmesh.ids import JobName, Member, OpNumber, TrainerId
from tests.core.views.settling import NEXT, TIMED_OUT, TRIO, running_everywhere, settle, settle_trio
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    FACES,
    completed,
    failed,
    ids_of,
    make_call,
    make_epoch,
    make_flushed,
    make_member,
    make_outcome,
    make_report,
    make_roster,
    make_state,
    make_trainer,
    make_verdict,
    make_view,
    make_view_request,
    make_waiting,
    running,
)


class TestAJobBegins:
    """... when as many trainers wait as any of them asked for."""

    def begin(self, waiting: Mapping[Member, Iterable[Candidate]]) -> tuple[Roster, ...]:
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

    def test_with_the_rank_0_that_asks_to_be_it_and_the_ring_as_it_is(self) -> None:
        asks = msgspec.structs.replace(make_waiting(3, slot=7), place=0)
        (roster,) = self.begin(
            {CARA: [make_waiting(3)], ANNA: [make_waiting(3), asks], BERT: [make_waiting(3)]}
        )
        assert [(t.member, t.slot) for t in roster.trainers] == [
            *((ANNA, 7), (ANNA, 0), (BERT, 0), (CARA, 0))
        ]
        assert in_ring_order(roster.trainers, (CARA, ANNA, BERT)) == roster.trainers
        other = msgspec.structs.replace(asks, job=FACES)
        (roster,) = self.begin({CARA: [make_waiting(2)], ANNA: [make_waiting(2), other]})
        assert roster.trainers[0].member == CARA

    def test_with_those_of_one_machine_in_the_order_in_which_they_were_started(self) -> None:
        slots = {3: 2, 4: 0, 5: 1}  # who has come when
        asks = [
            msgspec.structs.replace(make_waiting(4, slot=slot), place=place)
            for place, slot in slots.items()
        ]
        (roster,) = self.begin({ANNA: [make_waiting(4, slot=9), *asks]})
        assert [t.slot for t in roster.trainers] == [*slots.values(), 9]

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


class TestLanes:
    """V4: those that both ends hold outlive a loss, and nothing else."""

    def lanes_after(
        self,
        sends: Mapping[int, tuple[int, ...]],
        receives: Mapping[int, tuple[int, ...]],
        *,
        lost: Member | None = CARA,
        number: int = TRIO.number,
    ) -> tuple[tuple[int, int], ...]:
        """The lanes that Anna's (0), Bert's (1) and Cara's (2) trainers keep."""
        reports: dict[Member, JobReport] = {}
        for trainer in TRIO.trainers:
            report = make_report(TRIO, {trainer.id: [running(4)]})
            rank = msgspec.structs.replace(
                report.ranks[0],
                sends_to=ids_of(*sends.get(trainer.id, ())),
                receives_from=ids_of(*receives.get(trainer.id, ())),
            )
            reports[trainer.member] = msgspec.structs.replace(report, ranks=(rank,), number=number)
        base = make_view(5, ANNA, BERT, CARA, rosters=[TRIO])
        answers = {m: make_flushed(m, base, jobs=[reports[m]]) for m in reports if m != lost}
        requests = [make_view_request(TRIO, None, op=4)] if lost is None else []
        (after,) = settle(base, answers, view_requests=requests)
        return after.lanes

    def test_stay_where_both_ends_hold_them(self) -> None:
        assert self.lanes_after({0: (1,), 1: (2,)}, {1: (0,), 0: (2,)}) == ((0, 1),)

    def test_end_where_the_receiver_has_not_taken_its_end_yet(self) -> None:
        assert self.lanes_after({0: (1,)}, {}) == ()

    def test_end_where_the_sender_has_not_taken_its_end_yet(self) -> None:
        assert self.lanes_after({}, {1: (0,)}) == ()

    def test_end_where_nobody_is_lost(self) -> None:
        """One of them may have broken: that is why the op runs again."""
        assert self.lanes_after({0: (1,)}, {1: (0,)}, lost=None) == ()

    def test_end_where_they_are_of_another_number(self) -> None:
        assert self.lanes_after({0: (1,)}, {1: (0,)}, number=TRIO.number - 1) == ()


class TestJobsToSettle:
    """What a view change would help; the others run on (V7)."""

    def settle(
        self,
        *view_requests: ViewRequest,
        kept: Iterable[Member] = (ANNA, BERT, CARA),
        waiting: Mapping[Member, tuple[Candidate, ...]] | None = None,
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


PAIR = make_roster(ANNA, BERT)
BASE = make_view(5, ANNA, BERT, CARA, rosters=[PAIR])
SYNC = running(6, make_call("sync"))
SYNCING = {ANNA: [SYNC], BERT: [SYNC]}
Ops = Mapping[Member, Iterable[OpReport]]


def settle_with(
    waiting: Mapping[Member, Iterable[Candidate]],
    ops: Ops = SYNCING,
    *,
    roster: Roster = PAIR,
    members: tuple[Member, ...] = (ANNA, BERT, CARA),
    stable: int = 5,
) -> Roster:
    """The next roster of the job, which a `sync` asks for, where these wait."""
    base = make_view(5, *members, rosters=[roster])
    reports: dict[Member, list[JobReport]] = {
        trainer.member: [
            make_report(roster, {trainer.id: ops.get(trainer.member, [])}, stable=stable)
        ]
        for trainer in roster.trainers
    }
    answers = {
        m: make_flushed(m, base, jobs=reports.get(m, []), waiting=waiting.get(m, []))
        for m in base.members
    }
    (after,) = settle(base, answers, view_requests=[make_view_request(roster, None, op=6)])
    return after


class TestATrainerThatWaits:
    def test_enters_with_the_sync_that_is_under_way(self) -> None:
        after = settle_with({CARA: [make_waiting(1)]})
        assert after.trainers == (*PAIR.trainers, make_trainer(2, CARA, enters=6))
        assert (after.next_id, after.losses) == (3, ())

    def test_has_the_sync_run_again_with_it(self) -> None:
        assert settle_with({CARA: [make_waiting(1)]}).outcomes == ()

    def test_takes_its_machines_place_in_the_ring(self) -> None:
        waiting = {CARA: [make_waiting(1)], ANNA: [make_waiting(1, slot=7)]}
        after = settle_with(waiting, members=(CARA, ANNA, BERT))
        assert after.trainers == (
            make_trainer(0, ANNA),
            make_trainer(3, ANNA, slot=7, enters=6),
            make_trainer(1, BERT),
            make_trainer(2, CARA, enters=6),
        )

    def test_enters_together_with_others_also_of_one_machine(self) -> None:
        waiting = {
            CARA: [make_waiting(1, slot=3), make_waiting(1, slot=2)],
            DORA: [make_waiting(4)],
        }
        after = settle_with(waiting, members=(ANNA, BERT, CARA, DORA))
        assert after.trainers[2:] == (
            make_trainer(2, CARA, slot=2, enters=6),
            make_trainer(3, CARA, slot=3, enters=6),
            make_trainer(4, DORA, enters=6),
        )
        assert after.next_id == 5

    def test_gets_a_number_that_nobody_has_had(self) -> None:
        roster = make_roster(ANNA, BERT, ids=[3, 8])
        after = settle_with({CARA: [make_waiting(1)]}, roster=roster)
        assert after.ids == (3, 8, 9)

    def test_enters_its_own_job_only(self) -> None:
        after = settle_with({CARA: [make_waiting(2, job=FACES)]})
        assert after.trainers == PAIR.trainers

    def test_makes_its_terms_everybodys(self) -> None:
        strict = Terms(2, "raise", "majority")
        after = settle_with({CARA: [make_waiting(1, terms=strict)]})
        assert after.terms == strict
        elsewhere = make_waiting(2, slot=1, job=FACES, terms=strict)
        assert settle_with({CARA: [make_waiting(1), elsewhere]}).terms == Terms()

    def test_comes_in_also_with_a_newcomer_to_the_view(self) -> None:
        base = make_view(5, ANNA, BERT, rosters=[PAIR])
        answers = {
            m: make_flushed(m, base, jobs=[make_report(PAIR, {i: [SYNC]})])
            for i, m in enumerate((ANNA, BERT))
        }
        alone = make_view(1, DORA)
        answers[DORA] = make_flushed(DORA, alone, waiting=[make_waiting(1)])
        view_request = make_view_request(PAIR, None, op=6)
        (after,) = settle(base, answers, continuing=[ANNA, BERT], view_requests=[view_request])
        assert after.ids == (0, 1, 2)

    def test_comes_in_also_when_a_rank_is_lost(self) -> None:
        """Whatever a view settles, it need not be followed by another for the same sync."""
        roster = make_roster(ANNA, BERT, make_member("e"))
        after = settle_with({CARA: [make_waiting(1)]}, roster=roster)
        assert (after.ids, after.next_id) == ((0, 1, 3), 4)
        assert [loss.trainers for loss in after.losses] == [(2,)]

    def test_does_not_enter_twice_if_it_missed_the_view_that_took_it_in(self) -> None:
        """Its agent still says that it waits."""
        entered = settle_with({CARA: [make_waiting(1)]})
        view = make_view(6, ANNA, BERT, CARA, previous=BASE.epoch, rosters=[entered])
        answers = {
            m: make_flushed(m, view, jobs=[make_report(entered, {i: [SYNC]})])
            for i, m in enumerate((ANNA, BERT))
        }
        answers[CARA] = make_flushed(CARA, BASE, waiting=[make_waiting(1), make_waiting(1, slot=1)])
        (after,) = settle(view, answers, view_requests=[make_view_request(entered, None, op=6)])
        assert after.trainers == (
            *entered.trainers,
            make_trainer(3, CARA, slot=1, enters=6),
        )


class TestASyncLetsNobodyIn:
    """... unless all who have come to it wait in it, and nobody has its result."""

    def entering(self, ops: Ops) -> tuple[int, ...]:
        return settle_with({CARA: [make_waiting(1)]}, ops).ids[2:]

    def test_if_one_rank_is_still_on_its_way_to_it_all_the_same(self) -> None:
        """Whoever called it has ended all ops before."""
        assert self.entering({ANNA: [completed(5), SYNC], BERT: [running(5)]}) == (2,)

    @pytest.mark.parametrize(
        "ops",
        [
            pytest.param({ANNA: [running(6)], BERT: [running(6)]}, id="it is no sync"),
            pytest.param({}, id="nothing is under way"),
            pytest.param({ANNA: [SYNC, running(7)], BERT: [SYNC]}, id="it is not the last"),
            pytest.param({ANNA: [SYNC], BERT: [running(6)]}, id="another rank calls it otherwise"),
            pytest.param(
                {ANNA: [SYNC], BERT: [completed(6, call=make_call("sync"))]}, id="one has ended it"
            ),
            pytest.param({ANNA: [SYNC], BERT: [failed(6, TIMED_OUT)]}, id="it has failed"),
        ],
    )
    def test_if(self, ops: Ops) -> None:
        assert self.entering(ops) == ()

    def test_if_this_very_view_fails_it(self) -> None:
        """A loss that is to raise: who waits enters in the next sync."""
        roster = make_roster(ANNA, BERT, make_member("e"), terms=Terms(on_loss="raise"))
        after = settle_with({CARA: [make_waiting(1)]}, roster=roster)
        assert (after.ids, after.next_id) == ((0, 1), 3)
        assert [outcome.op for outcome in after.outcomes] == [6]

    def test_if_this_view_fails_an_op_before_it(self) -> None:
        """O10: all compare their calls next, but a newcomer, which knows no error, syncs."""
        scatter = make_call("scatter")
        ops = {ANNA: [completed(5, call=scatter), SYNC], BERT: [running(5, scatter)]}
        after = settle_with({CARA: [make_waiting(1)]}, ops)
        (outcome,) = after.outcomes
        assert outcome.verdict is not None
        assert (outcome.op, outcome.verdict.error, after.ids) == (5, "RosterChanged", (0, 1))

    def test_unless_all_know_of_the_op_that_has_failed_before_it(self) -> None:
        """It stays in the roster until each rank has said that it is behind all of them."""
        known = {m: [failed(5, TIMED_OUT), SYNC] for m in (ANNA, BERT)}
        roster = msgspec.structs.replace(PAIR, outcomes=(make_outcome(5, 0, 1, verdict=TIMED_OUT),))
        after = settle_with({CARA: [make_waiting(1)]}, known, roster=roster, stable=4)
        assert (after.ids, [outcome.op for outcome in after.outcomes]) == ((0, 1, 2), [5])

    def test_if_only_a_lost_rank_has_ended_it(self) -> None:
        roster = make_roster(ANNA, BERT, DORA)
        base = make_view(5, ANNA, BERT, CARA, DORA, rosters=[roster])
        done = completed(6, call=make_call("sync"))
        reports = {ANNA: {0: [SYNC]}, BERT: {1: [SYNC]}, DORA: {2: [done]}}
        answers = {
            m: make_flushed(m, base, jobs=[make_report(roster, reports[m])]) for m in reports
        }
        answers[CARA] = make_flushed(CARA, base, waiting=[make_waiting(1)])
        ended = make_view_request(roster, make_verdict("RankLost", 2))
        (after,) = settle(base, answers, view_requests=[ended])
        assert after.ids == (0, 1)
        assert after.outcomes == (make_outcome(6, 0, 1, 2, holders=[2]),)

    def test_if_no_view_change_settles_its_job(self) -> None:
        """V7."""
        answers = {
            m: make_flushed(m, BASE, jobs=[make_report(PAIR, {i: [SYNC]}, fenced=False)])
            for i, m in enumerate((ANNA, BERT))
        }
        answers[CARA] = make_flushed(CARA, BASE, waiting=[make_waiting(1)])
        assert settle(BASE, answers) == (PAIR,)


class TestAnOpBeforeTheSync:
    """... was ended by whoever called the sync; the others fetch it, since it can't run again."""

    PAIR = settle_with(
        {CARA: [make_waiting(1)]}, {ANNA: [completed(5, 0, 1), SYNC], BERT: [running(5)]}
    )
    VIEW = make_view(9, ANNA, BERT, CARA, rosters=[PAIR])

    def test_is_fetched_also_while_somebody_enters(self) -> None:
        assert self.PAIR.ids == (0, 1, 2)
        assert self.PAIR.outcomes == (make_outcome(5, 0, 1, holders=[0]),)

    def test_fails_if_its_result_is_lost(self) -> None:
        """With the newcomer in the ring, which has no part in it, it would wait for ever."""
        reports = {BERT: {1: [running(5)]}, CARA: {2: [SYNC]}}
        answers = {
            m: make_flushed(m, self.VIEW, jobs=[make_report(self.PAIR, ops, stable=3)])
            for m, ops in reports.items()
        }
        (after,) = settle(self.VIEW, answers)
        (outcome,) = after.outcomes
        assert (outcome.op, outcome.contributors) == (5, (1,))
        assert outcome.verdict is not None
        assert (outcome.verdict.error, outcome.verdict.trainers) == ("RankLost", (0,))


def test_the_op_to_enter_is_the_highest_that_anybody_has_called() -> None:
    reports = [make_report(PAIR, {0: [SYNC]}), make_report(PAIR, {1: [running(5)]})]
    assert op_to_enter(gather(reports), PAIR) == 6
    assert op_to_enter(gather([]), PAIR) is None


LATE = make_trainer(2, CARA, enters=5)
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
    step = receive(state, BERT, commit, Facts(), now=100.0)  # Bert is not heard any more
    assert step.actions == (Install(commit.view),)
    later = pass_time(step.state, Facts(), now=100.0)
    assert [type(action) for action in later.actions] == [FenceJobs, Install]


def replace_seats(view: View, ring: tuple[Member, ...]) -> View:
    seats = tuple(seat for member in ring if (seat := view.seat_of(member)) is not None)
    return msgspec.structs.replace(view, seats=seats)
