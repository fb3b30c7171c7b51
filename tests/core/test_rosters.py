"""Jobs through a view change: what begins, what runs on, what is rerun, fetched or failed."""

from collections.abc import Iterable, Mapping

import pytest

from pmesh.core.messages import Concern, Flushed, JobReport, Waiting
from pmesh.core.rosters import jobs_to_settle, keep_local_rosters, next_rosters, outcome_of
from pmesh.core.views import OpOutcome, Roster, Trainer, Verdict, View
from pmesh.ids import JobName, Member, OpNumber, Rank, Slot
from tests.core.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    FACES,
    completed,
    failed,
    make_call,
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

NEXT = make_epoch(9)
TRIO = make_roster(ANNA, BERT, CARA)
TIMED_OUT = make_verdict("OpTimedOut", 1)


def settle(
    base: View,
    answers: Mapping[Member, Flushed],
    *,
    continuing: Iterable[Member] | None = None,
    concerns: Iterable[Concern] = (),
    reasons: Mapping[Member, str] | None = None,
) -> tuple[Roster, ...]:
    """The rosters of the next view; unless said otherwise, all who answered continue."""
    return next_rosters(
        base,
        NEXT,
        ring=tuple(answers),
        continuing=tuple(answers) if continuing is None else tuple(continuing),
        answers=answers,
        concerns=tuple(concerns),
        reasons=reasons or {},
    )


def settle_trio(
    reports: Mapping[Member, JobReport | None], *concerns: Concern, roster: Roster = TRIO
) -> Roster:
    """The next roster of one job, by what each survivor reports of it."""
    base = make_view(5, ANNA, BERT, CARA, rosters=[roster])
    answers = {
        member: make_flushed(member, base, jobs=[report] if report else [])
        for member, report in reports.items()
    }
    (after,) = settle(base, answers, concerns=concerns)
    return after


def running_everywhere(op: int = 4, *, fenced: bool = True) -> dict[Member, JobReport | None]:
    return {
        member: make_report(TRIO, {rank: [running(op)]}, fenced=fenced)
        for rank, member in enumerate((ANNA, BERT, CARA))
    }


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


class TestTheOpsOfAConcernedJob:
    """O3 and I4: one verdict for all."""

    CONCERN = make_concern(TRIO, TIMED_OUT, op=4)

    def outcome(self, reports: Mapping[Member, JobReport | None], op: int = 4) -> OpOutcome | None:
        after = settle_trio(reports, self.CONCERN)
        assert after.number == NEXT.counter
        return outcome_of(after, OpNumber(op))

    def test_fail_with_the_concern_when_nobody_has_the_result(self) -> None:
        assert self.outcome(running_everywhere()) == OpOutcome(OpNumber(4), verdict=TIMED_OUT)

    def test_complete_everywhere_when_one_rank_has_the_result(self) -> None:
        reports = running_everywhere() | {BERT: make_report(TRIO, {1: [completed(4)]})}
        assert self.outcome(reports) == OpOutcome(OpNumber(4), holders=(Rank(1),))

    def test_name_every_holder_in_order_of_rank(self) -> None:
        reports = running_everywhere() | {
            CARA: make_report(TRIO, {2: [completed(4)]}),
            ANNA: make_report(TRIO, {0: [completed(4)]}),
        }
        assert self.outcome(reports) == OpOutcome(OpNumber(4), holders=(Rank(0), Rank(2)))

    def test_keep_the_verdict_that_an_earlier_view_gave(self) -> None:
        earlier = make_verdict("OpMismatch", 0)
        reports = running_everywhere() | {CARA: make_report(TRIO, {2: [failed(4, earlier)]})}
        assert self.outcome(reports) == OpOutcome(OpNumber(4), verdict=earlier)

    def test_keep_a_verdict_even_against_a_rank_that_holds_a_result(self) -> None:
        """A broadcast's root returns early, and hears of the mismatch at its next call (I5)."""
        earlier = make_verdict("OpMismatch", 0)
        reports = running_everywhere() | {
            ANNA: make_report(TRIO, {0: [completed(4)]}),
            CARA: make_report(TRIO, {2: [failed(4, earlier)]}),
        }
        assert self.outcome(reports) == OpOutcome(OpNumber(4), verdict=earlier)

    def test_run_again_when_they_are_not_the_one_concerned(self) -> None:
        reports: dict[Member, JobReport | None] = {
            member: make_report(TRIO, {rank: [running(4), running(5)]})
            for rank, member in enumerate((ANNA, BERT, CARA))
        }
        assert self.outcome(reports, op=5) is None

    def test_are_resolved_each_by_itself_and_in_order(self) -> None:
        """V3: the set of completed ops, not the last one."""
        reports: dict[Member, JobReport | None] = {
            ANNA: make_report(TRIO, {0: [completed(3), running(4), completed(5)]}),
            BERT: make_report(TRIO, {1: [running(3), running(4), running(5)]}),
            CARA: make_report(TRIO, {2: [running(3)]}),
        }
        assert settle_trio(reports, self.CONCERN).outcomes == (
            OpOutcome(OpNumber(3), holders=(Rank(0),)),
            OpOutcome(OpNumber(4), verdict=TIMED_OUT),
            OpOutcome(OpNumber(5), holders=(Rank(0),)),
        )

    def test_fail_also_when_no_survivor_has_started_them(self) -> None:
        nothing: dict[Member, JobReport | None] = dict.fromkeys((ANNA, BERT, CARA))
        assert self.outcome(nothing) == OpOutcome(OpNumber(4), verdict=TIMED_OUT)

    def test_run_again_over_new_lanes_when_the_concern_blames_nobody(self) -> None:
        after = settle_trio(running_everywhere(), make_concern(TRIO, None, op=4))
        assert after.number == NEXT.counter
        assert (after.outcomes, after.lost) == ((), ())

    def test_are_what_the_ranks_of_one_machine_report_together(self) -> None:
        roster = make_roster(ANNA, ANNA, BERT)
        reports: dict[Member, JobReport | None] = {
            ANNA: make_report(roster, {0: [running(4)], 1: [completed(4)]}),
            BERT: make_report(roster, {2: [running(4)]}),
            CARA: None,
        }
        after = settle_trio(reports, make_concern(roster, TIMED_OUT, op=4), roster=roster)
        assert after.outcomes == (OpOutcome(OpNumber(4), holders=(Rank(1),)),)

    def test_are_not_what_is_said_of_another_job_or_an_earlier_one(self) -> None:
        foreign = make_roster(ANNA, BERT, CARA, job=FACES)
        older = make_roster(ANNA, BERT, CARA, born=make_epoch(2))
        reports: dict[Member, JobReport | None] = running_everywhere() | {
            ANNA: make_report(foreign, {0: [completed(4)]}),
            BERT: make_report(older, {1: [completed(4)]}),
        }
        assert self.outcome(reports) == OpOutcome(OpNumber(4), verdict=TIMED_OUT)


def test_ranks_that_called_different_things_all_learn_who_called_what() -> None:
    reports: dict[Member, JobReport | None] = {
        ANNA: make_report(TRIO, {0: [running(4)]}),
        BERT: make_report(TRIO, {1: [running(4, make_call("broadcast"))]}),
        CARA: make_report(TRIO, {2: [completed(4)]}),
    }
    after = settle_trio(reports, make_concern(TRIO, None, op=4))
    outcome = outcome_of(after, OpNumber(4))
    assert outcome is not None
    assert outcome.verdict == Verdict(
        "OpMismatch",
        "op 4 of job 'digits' differs: rank 0 (mac-a): all_reduce(float32, 3, sum); "
        "rank 1 (mac-b): broadcast(float32, 3, sum); rank 2 (mac-c): all_reduce(float32, 3, sum)",
        (Rank(0), Rank(1), Rank(2)),
    )


class TestALostRank:
    """A job without all its ranks ends with one verdict, and keeps what it has."""

    BASE = make_view(5, ANNA, BERT, CARA, rosters=[TRIO])
    LOST = Verdict("RankLost", "rank 2 (mac-c) is lost: its agent is gone", (Rank(2),))

    def without_cara(
        self, anna: JobReport, bert: JobReport, reasons: Mapping[Member, str] | None = None
    ) -> Roster:
        answers = {
            ANNA: make_flushed(ANNA, self.BASE, jobs=[anna]),
            BERT: make_flushed(BERT, self.BASE, jobs=[bert]),
        }
        (after,) = settle(self.BASE, answers, reasons=reasons)
        return after

    def test_fails_the_op_that_nobody_completed(self) -> None:
        after = self.without_cara(
            make_report(TRIO, {0: [running(4)]}), make_report(TRIO, {1: [running(4)]})
        )
        assert (after.number, after.lost) == (NEXT.counter, (self.LOST,))
        assert after.outcomes == (OpOutcome(OpNumber(4), verdict=self.LOST),)

    def test_leaves_standing_what_a_survivor_completed(self) -> None:
        after = self.without_cara(
            make_report(TRIO, {0: [completed(4), running(5)]}),
            make_report(TRIO, {1: [running(4)]}),
        )
        assert after.outcomes == (
            OpOutcome(OpNumber(4), holders=(Rank(0),)),
            OpOutcome(OpNumber(5), verdict=self.LOST),
        )

    def test_is_told_with_the_reason_where_one_is_known(self) -> None:
        nothing = make_report(TRIO, {})
        after = self.without_cara(nothing, nothing, reasons={CARA: "silent for 2.1 s"})
        assert after.lost[0].message == "rank 2 (mac-c) is lost: silent for 2.1 s"

    def test_that_was_lost_before_is_not_lost_again(self) -> None:
        hurt = make_roster(ANNA, BERT, CARA, lost=[self.LOST])
        base = make_view(5, ANNA, BERT, rosters=[hurt])
        answers = {m: make_flushed(m, base) for m in (ANNA, BERT)}
        assert settle(base, answers) == (hurt,)

    def test_may_be_one_whose_trainer_ended_while_its_agent_lives(self) -> None:
        ended = make_verdict("RankLost", 1)
        after = settle_trio(running_everywhere(), make_concern(TRIO, ended))
        assert after.lost == (ended,)
        assert after.outcomes == (OpOutcome(OpNumber(4), verdict=ended),)

    def test_ends_the_job_when_it_was_the_last_one(self) -> None:
        roster = make_roster(ANNA, BERT, lost=[make_verdict("RankLost", 1)])
        base = make_view(5, ANNA, BERT, rosters=[roster])
        answers = {m: make_flushed(m, base) for m in (ANNA, BERT)}
        concern = make_concern(roster, make_verdict("RankLost", 0))
        assert settle(base, answers, concerns=[concern]) == ()

    def test_leaves_the_name_free_for_a_new_job_in_the_same_view(self) -> None:
        roster = make_roster(BERT)
        base = make_view(5, ANNA, BERT, rosters=[roster])
        anna = make_flushed(ANNA, base, waiting=[make_waiting(1)])
        (after,) = settle(base, {ANNA: anna})
        assert (after.born, after.trainers) == (NEXT, (Trainer(ANNA, Slot(0)),))

    def test_of_a_newcomer_is_lost_although_its_machine_answers(self) -> None:
        """V2: what a newcomer says of past ops is ignored."""
        elsewhere = make_view(8, CARA)
        answers = {
            ANNA: make_flushed(ANNA, self.BASE, jobs=[make_report(TRIO, {0: [running(4)]})]),
            BERT: make_flushed(BERT, self.BASE, jobs=[make_report(TRIO, {1: [running(4)]})]),
            CARA: make_flushed(CARA, elsewhere, jobs=[make_report(TRIO, {2: [completed(4)]})]),
        }
        (after,) = settle(self.BASE, answers, continuing=[ANNA, BERT])
        assert after.outcomes == (OpOutcome(OpNumber(4), verdict=self.LOST),)


class TestTheLastHolderOfAResult:
    """A rank whose trainer has left is lost, yet its agent may hold what others lack."""

    HELD = OpOutcome(OpNumber(4), holders=(Rank(2),))
    LOST = make_verdict("RankLost", 2)
    ROSTER = make_roster(ANNA, BERT, CARA, lost=[LOST], outcomes=[HELD])
    BASE = make_view(5, ANNA, BERT, CARA, rosters=[ROSTER])

    def test_takes_the_op_with_it_when_its_agent_goes(self) -> None:
        reports = {
            ANNA: make_report(self.ROSTER, {0: [running(4)]}),
            BERT: make_report(self.ROSTER, {1: [running(4)]}),
        }
        answers = {m: make_flushed(m, self.BASE, jobs=[r]) for m, r in reports.items()}
        assert jobs_to_settle(self.BASE, tuple(answers), (), {}) == (DIGITS,)
        (after,) = settle(self.BASE, answers)
        assert after.outcomes == (OpOutcome(OpNumber(4), verdict=self.LOST),)
        assert after.lost == (self.LOST,)

    def test_may_go_when_another_has_fetched_it(self) -> None:
        answers = {
            ANNA: make_flushed(
                ANNA, self.BASE, jobs=[make_report(self.ROSTER, {0: [completed(4)]})]
            ),
            BERT: make_flushed(BERT, self.BASE, jobs=[make_report(self.ROSTER, {1: [running(4)]})]),
        }
        (after,) = settle(self.BASE, answers)
        assert after.outcomes == (OpOutcome(OpNumber(4), holders=(Rank(0),)),)

    def test_leaves_the_job_in_peace_while_its_agent_stays(self) -> None:
        assert jobs_to_settle(self.BASE, self.BASE.members, (), {}) == ()


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
