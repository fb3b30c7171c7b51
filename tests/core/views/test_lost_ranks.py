"""A lost rank leaves the ring, and the others go on with the ops that were under way."""

from collections.abc import Mapping

import msgspec
import pytest

from pmesh.core.values import OpOutcome, Roster, Terms, Verdict, View
from pmesh.core.views.outcomes import outcome_of
from pmesh.core.views.rosters import Change, jobs_to_settle, next_rosters
from pmesh.core.wire.views import Flushed, JobReport, ViewRequest
from pmesh.ids import Member, OpNumber
from tests.core.views.settling import NEXT, TIMED_OUT, TRIO, running_everywhere, settle, settle_trio
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    completed,
    failed,
    ids_of,
    make_flushed,
    make_member,
    make_outcome,
    make_report,
    make_roster,
    make_trainer,
    make_verdict,
    make_view,
    make_view_request,
    make_waiting,
    running,
)

LOST = Verdict("RankLost", "rank 2 (mac-c) is lost: its agent is gone", ids_of(2))


def without_cara(
    anna: JobReport,
    bert: JobReport,
    *view_requests: ViewRequest,
    roster: Roster = TRIO,
    reasons: Mapping[Member, str] | None = None,
) -> Roster:
    """What Anna and Bert go on with, by what each of them reports."""
    base = make_view(5, ANNA, BERT, CARA, rosters=[roster])
    answers = {
        ANNA: make_flushed(ANNA, base, jobs=[anna]),
        BERT: make_flushed(BERT, base, jobs=[bert]),
    }
    (after,) = settle(base, answers, reasons=reasons, view_requests=view_requests)
    return after


NOTHING = make_report(TRIO, {})


class TestTheRingWithoutALostRank:
    def test_has_the_others_under_a_new_number_and_says_who_was_lost_and_why(self) -> None:
        after = without_cara(NOTHING, NOTHING, reasons={CARA: "silent for 2.1 s"})
        assert (after.job, after.born, after.number) == (TRIO.job, TRIO.born, NEXT.counter)
        assert after.trainers == TRIO.trainers[:2]
        (loss,) = after.losses
        assert loss == Verdict(
            "RankLost", "rank 2 (mac-c) is lost: silent for 2.1 s", LOST.trainers
        )

    def test_says_so_also_where_no_reason_is_known(self) -> None:
        assert without_cara(NOTHING, NOTHING).losses == (LOST,)

    def test_keeps_the_numbers_of_trainers_and_never_gives_one_again(self) -> None:
        roster = make_roster(CARA, ANNA, BERT, ids=[4, 6, 9])
        after = without_cara(NOTHING, NOTHING, roster=roster)
        assert (after.ids, after.next_id) == ((6, 9), 10)

    def test_forgets_whom_earlier_views_have_lost(self) -> None:
        """`losses` is what is told of this view, not a record of all."""
        hurt = make_roster(ANNA, BERT, losses=[LOST])
        after = without_cara(NOTHING, NOTHING, make_view_request(hurt, None, op=3), roster=hurt)
        assert (after.number, after.losses) == (NEXT.counter, ())

    def test_runs_on_if_the_lost_machine_had_no_rank_in_it(self) -> None:
        hurt = make_roster(ANNA, BERT, losses=[LOST])
        assert without_cara(NOTHING, NOTHING, roster=hurt) is hurt

    def test_keeps_a_machine_with_its_other_trainers_when_one_of_them_ends(self) -> None:
        roster = make_roster(ANNA, BERT, BERT)
        ended = make_verdict("RankLost", 1)
        reports: dict[Member, JobReport | None] = {
            ANNA: make_report(roster, {0: [running(4)]}),
            BERT: make_report(roster, {1: [running(4)], 2: [running(4)]}),
        }
        after = settle_trio(reports, make_view_request(roster, ended), roster=roster)
        assert after.trainers == (roster.trainers[0], roster.trainers[2])
        assert after.losses == (ended,)

    def test_tells_once_of_a_trainer_that_ended_and_whose_machine_is_gone_too(self) -> None:
        ended = make_verdict("RankLost", 2)
        after = without_cara(
            NOTHING, NOTHING, make_view_request(TRIO, ended), make_view_request(TRIO, ended)
        )
        assert after.losses == (LOST,)

    def test_tells_of_all_who_were_lost_together(self) -> None:
        base = make_view(5, ANNA, BERT, CARA, rosters=[TRIO])
        (after,) = settle(base, {BERT: make_flushed(BERT, base)})
        assert [(loss.trainers, loss.message) for loss in after.losses] == [
            ((0,), "rank 0 (mac-a) is lost: its agent is gone"),
            ((2,), "rank 2 (mac-c) is lost: its agent is gone"),
        ]

    def test_is_over_when_nobody_is_left(self) -> None:
        roster = make_roster(BERT)
        base = make_view(5, ANNA, BERT, rosters=[roster])
        assert settle(base, {ANNA: make_flushed(ANNA, base)}) == ()
        ended = make_view_request(roster, make_verdict("RankLost", 0))
        answers = {m: make_flushed(m, base) for m in (ANNA, BERT)}
        assert settle(base, answers, view_requests=[ended]) == ()

    def test_leaves_the_name_free_for_a_new_job_in_the_same_view_when_it_is_over(self) -> None:
        base = make_view(5, ANNA, BERT, rosters=[make_roster(BERT)])
        anna = make_flushed(ANNA, base, waiting=[make_waiting(1)])
        (after,) = settle(base, {ANNA: anna})
        assert (after.born, after.trainers) == (NEXT, (make_trainer(0, ANNA),))

    def test_is_settled_only_where_nothing_of_it_is_delivered_any_more(self) -> None:
        """V3: the next view settles it."""
        unfenced = make_report(TRIO, {0: [running(4)]}, fenced=False)
        assert without_cara(unfenced, NOTHING) is TRIO


class TestRanks:
    """... are places in the ring, which follows the view; rank 0 has been there the longest."""

    EMMA = make_member("e")

    @pytest.mark.parametrize(
        ("ring", "ids"),
        [
            ((ANNA, BERT, CARA, DORA), (0, 1, 2, 3)),
            ((CARA, BERT, DORA, ANNA), (0, 2, 1, 3)),
            ((DORA, CARA, BERT, ANNA), (0, 3, 2, 1)),
        ],
    )
    def test_follow_the_views_ring_begun_with_the_oldest(
        self, ring: tuple[Member, ...], ids: tuple[int, ...]
    ) -> None:
        assert self.settle_along(make_roster(ANNA, BERT, CARA, DORA, self.EMMA), ring) == ids

    def test_begin_with_the_next_oldest_when_the_oldest_is_lost(self) -> None:
        roster = make_roster(self.EMMA, CARA, ANNA, DORA, BERT)
        assert self.settle_along(roster, (ANNA, BERT, CARA, DORA)) == (1, 3, 2, 4)

    def test_of_one_machine_stay_side_by_side(self) -> None:
        roster = make_roster(ANNA, BERT, ANNA, CARA, BERT, self.EMMA)
        assert self.settle_along(roster, (CARA, BERT, ANNA)) == (0, 2, 3, 1, 4)

    def test_may_part_the_trainers_of_the_first_machine_at_the_rings_end(self) -> None:
        """It is still one ring: the last rank sends to rank 0."""
        roster = make_roster(ANNA, BERT, ANNA, self.EMMA, ids=[5, 2, 1, 0])
        assert self.settle_along(roster, (BERT, ANNA)) == (1, 5, 2)

    def settle_along(self, roster: Roster, ring: tuple[Member, ...]) -> tuple[int, ...]:
        """The numbers of the trainers by rank, when this is the ring of those who are left."""
        base = make_view(5, *ring, self.EMMA, rosters=[roster])
        answers = {member: make_flushed(member, base) for member in ring}
        change = Change(epoch=NEXT, ring=ring, answers=answers, view_requests=(), reasons={})
        (after,) = next_rosters(base, change, continuing=ring)
        return after.ids


class TestTheOpsUnderWay:
    """I4: what a survivor has completed stands; what nobody has runs again over the new ring."""

    def test_run_again_when_nobody_has_completed_them(self) -> None:
        """O1: from their untouched inputs."""
        ops = [running(4), running(5)]
        after = without_cara(make_report(TRIO, {0: ops}), make_report(TRIO, {1: ops[:1]}))
        assert after.outcomes == ()

    def test_complete_with_the_lost_ranks_share_where_a_survivor_had_completed_them(self) -> None:
        after = without_cara(
            make_report(TRIO, {0: [completed(4), running(5)]}),
            make_report(TRIO, {1: [running(4)]}),
        )
        assert after.outcomes == (make_outcome(4, 0, 1, 2, holders=[0]),)
        assert after.lost_holders == ()

    def test_still_fail_if_they_are_to_fail_with_those_who_are_left(self) -> None:
        """O5: the contributors of a failed op are the ranks that it fails at."""
        stuck = make_view_request(TRIO, TIMED_OUT, op=4)
        anna, bert = (make_report(TRIO, {i: [running(4)]}) for i in (0, 1))
        after = without_cara(anna, bert, stuck)
        assert after.outcomes == (make_outcome(4, 0, 1, verdict=TIMED_OUT),)

    def test_of_a_newcomer_count_for_nothing_although_its_machine_answers(self) -> None:
        """V2: what a newcomer says of past ops is ignored."""
        base = make_view(5, ANNA, BERT, CARA, rosters=[TRIO])
        answers = {
            ANNA: make_flushed(ANNA, base, jobs=[make_report(TRIO, {0: [running(4)]})]),
            BERT: make_flushed(BERT, base, jobs=[make_report(TRIO, {1: [running(4)]})]),
            CARA: make_flushed(
                CARA, make_view(8, CARA), jobs=[make_report(TRIO, {2: [completed(4)]})]
            ),
        }
        (after,) = settle(base, answers, continuing=[ANNA, BERT])
        assert (after.ids, after.outcomes, after.lost_holders) == ((0, 1), (), ())


class TestALossThatIsToRaise:
    """Who wants to know of it gets it from the ops under way, or else from the next one."""

    TERMS = Terms(on_loss="raise")
    WARY = make_roster(ANNA, BERT, CARA, terms=TERMS)

    def outcomes(
        self, anna: JobReport, bert: JobReport, *, roster: Roster = WARY
    ) -> tuple[OpOutcome, ...]:
        return without_cara(anna, bert, roster=roster).outcomes

    def test_fails_every_op_under_way_at_all_who_are_left(self) -> None:
        ops = [running(4), running(5)]
        assert self.outcomes(
            make_report(self.WARY, {0: ops}, stable=3), make_report(self.WARY, {1: ops[:1]})
        ) == (make_outcome(4, 0, 1, verdict=LOST), make_outcome(5, 0, 1, verdict=LOST))

    def test_leaves_what_a_survivor_completed_and_fails_the_next_one(self) -> None:
        assert self.outcomes(
            make_report(self.WARY, {0: [completed(4)]}), make_report(self.WARY, {1: [running(4)]})
        ) == (make_outcome(4, 0, 1, 2, holders=[0]), make_outcome(5, 0, 1, verdict=LOST))

    def test_fails_the_next_one_if_none_is_under_way(self) -> None:
        idle = [make_report(self.WARY, {i: []}, stable=6) for i in (0, 1)]
        assert self.outcomes(*idle) == (make_outcome(7, 0, 1, verdict=LOST),)

    def test_fails_the_first_one_if_nothing_was_called_yet(self) -> None:
        nothing = make_report(self.WARY, {})
        assert self.outcomes(nothing, nothing) == (make_outcome(0, 0, 1, verdict=LOST),)

    def test_fails_the_survivors_next_one_not_the_lost_ones(self) -> None:
        """Cara's trainer, which has died, was one op ahead of the others."""
        reports: dict[Member, JobReport | None] = {
            ANNA: make_report(self.WARY, {0: []}, stable=6),
            BERT: make_report(self.WARY, {1: []}, stable=6),
            CARA: make_report(self.WARY, {2: [running(7)]}, stable=6),
        }
        died = make_verdict("RankLost", 2)
        after = settle_trio(reports, make_view_request(self.WARY, died), roster=self.WARY)
        assert after.outcomes == (make_outcome(7, 0, 1, verdict=died),)

    def test_fails_the_one_after_what_the_lost_one_had_completed(self) -> None:
        """I4: a broadcast's root is through before anybody else has called it."""
        reports: dict[Member, JobReport | None] = {
            ANNA: make_report(self.WARY, {0: []}, stable=6),
            BERT: make_report(self.WARY, {1: []}, stable=6),
            CARA: make_report(self.WARY, {2: [completed(7)]}, stable=6),
        }
        died = make_verdict("RankLost", 2)
        after = settle_trio(reports, make_view_request(self.WARY, died), roster=self.WARY)
        assert after.outcomes == (
            make_outcome(7, 0, 1, 2, holders=[2]),
            make_outcome(8, 0, 1, verdict=died),
        )

    def test_does_not_change_the_verdict_that_an_op_has_already(self) -> None:
        told = make_report(self.WARY, {0: [failed(4, TIMED_OUT)]}, stable=3)
        assert self.outcomes(told, make_report(self.WARY, {1: [running(4)]})) == (
            make_outcome(4, 0, 1, 2, verdict=TIMED_OUT),
            make_outcome(5, 0, 1, verdict=LOST),
        )

    def test_is_raised_also_if_a_view_changes_again_before_the_next_op_is_called(self) -> None:
        failing = make_outcome(7, 0, 1, 2, verdict=make_verdict("RankLost", 3))
        roster = make_roster(ANNA, BERT, CARA, terms=self.TERMS, outcomes=[failing])
        idle: dict[Member, JobReport | None] = {
            m: make_report(roster, {i: []}, stable=6) for i, m in enumerate((ANNA, BERT, CARA))
        }
        again = settle_trio(idle, make_view_request(roster, None, op=6), roster=roster)
        assert again.outcomes == (failing,)

    def test_is_raised_once_for_two_losses_before_the_next_op_is_called(self) -> None:
        failing = make_outcome(7, 0, 1, 2, verdict=make_verdict("RankLost", 3))
        roster = make_roster(ANNA, BERT, CARA, terms=self.TERMS, outcomes=[failing])
        idle = [make_report(roster, {i: []}, stable=6) for i in (0, 1)]
        assert self.outcomes(*idle, roster=roster) == (failing,)

    def test_is_not_raised_again_by_a_later_view_that_loses_nobody(self) -> None:
        roster = make_roster(ANNA, BERT, CARA, terms=self.TERMS, losses=[LOST])
        running_on: dict[Member, JobReport | None] = {
            m: make_report(roster, {i: [running(8)]}, stable=7)
            for i, m in enumerate((ANNA, BERT, CARA))
        }
        after = settle_trio(running_on, make_view_request(roster, None, op=8), roster=roster)
        assert after.outcomes == ()

    def test_does_not_raise_where_nobody_asked_for_it(self) -> None:
        reports = [make_report(TRIO, {i: [running(4)]}) for i in (0, 1)]
        assert self.outcomes(*reports, roster=TRIO) == ()


def test_a_trainer_that_ended_while_its_agent_lives_is_lost_like_any_other() -> None:
    ended = make_verdict("RankLost", 1)
    after = settle_trio(running_everywhere(), make_view_request(TRIO, ended))
    assert (after.ids, after.losses) == ((0, 2), (ended,))
    assert outcome_of(after, OpNumber(4)) is None


CARAS = make_trainer(2, CARA)
ENDED = make_verdict("RankLost", 2)
HURT = make_roster(
    ANNA,
    BERT,
    lost_holders=[CARAS],
    outcomes=[make_outcome(4, 0, 1, 2, holders=[2])],
    losses=[ENDED],
)
"""Cara's trainer has ended; its agent holds the result of the op that the others lack."""

BASE = make_view(5, ANNA, BERT, CARA, rosters=[HURT])


def answers_of(*reports: JobReport) -> dict[Member, Flushed]:
    return {
        m: make_flushed(m, BASE, jobs=[report])
        for m, report in zip((ANNA, BERT, CARA), reports, strict=False)
    }


class TestAWitness:
    """O2: whoever has the result serves it, be its own trainer dead."""

    def settle(self, anna: JobReport, cara: JobReport) -> Roster:
        reports: dict[Member, JobReport | None] = {
            ANNA: anna,
            BERT: make_report(TRIO, {1: [running(4)]}),
            CARA: cara,
        }
        return settle_trio(reports, make_view_request(TRIO, ENDED))

    def test_is_a_lost_trainer_whose_agent_alone_has_a_result(self) -> None:
        after = self.settle(
            make_report(TRIO, {0: [running(4)]}), make_report(TRIO, {2: [completed(4)]})
        )
        assert (after.ids, after.lost_holders) == ((0, 1), (CARAS,))
        assert after.outcomes == (make_outcome(4, 0, 1, 2, holders=[2]),)

    def test_is_not_needed_where_a_rank_has_the_result_too(self) -> None:
        after = self.settle(
            make_report(TRIO, {0: [completed(4)]}), make_report(TRIO, {2: [completed(4)]})
        )
        assert after.lost_holders == ()
        assert after.outcomes == (make_outcome(4, 0, 1, 2, holders=[0]),)

    def test_is_nobody_who_has_no_result(self) -> None:
        after = self.settle(
            make_report(TRIO, {0: [running(4)]}), make_report(TRIO, {2: [running(4)]})
        )
        assert (after.lost_holders, after.outcomes) == ((), ())

    def test_has_a_say_in_the_view_changes_that_follow(self) -> None:
        idle = make_view_request(HURT, None, op=4)
        answers = answers_of(
            make_report(HURT, {0: [running(4)]}),
            make_report(HURT, {1: [running(4)]}),
            make_report(HURT, {2: [completed(4)]}),
        )
        (after,) = settle(BASE, answers, view_requests=[idle])
        assert (after.lost_holders, after.outcomes) == (HURT.lost_holders, HURT.outcomes)

    def test_is_forgotten_once_a_rank_has_fetched_what_it_held(self) -> None:
        answers = answers_of(
            make_report(HURT, {0: [completed(4)]}),
            make_report(HURT, {1: [running(4)]}),
            make_report(HURT, {2: [completed(4)]}),
        )
        (after,) = settle(BASE, answers, view_requests=[make_view_request(HURT, None, op=4)])
        assert after.lost_holders == ()
        assert after.outcomes == (make_outcome(4, 0, 1, 2, holders=[0]),)


class TestTheLastHolderOfAResult:
    """... takes it along when its agent goes."""

    def test_concerns_the_job_though_it_has_no_rank_in_it(self) -> None:
        assert jobs_to_settle(BASE, (ANNA, BERT), (), {}) == (DIGITS,)

    def test_leaves_the_job_in_peace_while_its_agent_stays(self) -> None:
        assert jobs_to_settle(BASE, BASE.members, (), {}) == ()

    def test_may_go_where_another_holder_is_known(self) -> None:
        both = msgspec.structs.replace(HURT, outcomes=(make_outcome(4, 0, 1, 2, holders=[0, 2]),))
        view = make_view(5, ANNA, BERT, CARA, rosters=[both])
        assert jobs_to_settle(view, (ANNA, BERT), (), {}) == ()

    def test_leaves_an_op_that_runs_again(self) -> None:
        running_still = [make_report(HURT, {i: [running(4)]}) for i in (0, 1)]
        (after,) = settle(BASE, answers_of(*running_still))
        assert (after.ids, after.outcomes, after.lost_holders) == ((0, 1), (), ())

    def test_leaves_an_op_that_runs_again_also_before_anybody_else_has_called_it(self) -> None:
        """Or it would be asked for, and the job settled, for ever."""
        not_called = [make_report(HURT, {i: []}, stable=3) for i in (0, 1)]
        (after,) = settle(BASE, answers_of(*not_called))
        assert after.outcomes == ()
        assert jobs_to_settle(make_view(9, ANNA, BERT, rosters=[after]), (ANNA, BERT), (), {}) == ()

    def test_may_go_once_another_has_fetched_it(self) -> None:
        answers = answers_of(
            make_report(HURT, {0: [completed(4)]}), make_report(HURT, {1: [running(4)]})
        )
        (after,) = settle(BASE, answers)
        assert after.outcomes == (make_outcome(4, 0, 1, 2, holders=[0]),)

    def test_is_missed_also_where_the_job_comes_along_without_it(self) -> None:
        """V9: newcomers that bring the job bring no result that they do not have."""
        base = make_view(7, DORA)
        newcomers: View = make_view(6, ANNA, BERT, CARA, rosters=[HURT])
        answers = {DORA: make_flushed(DORA, base)}
        answers |= {
            m: make_flushed(m, newcomers, jobs=[make_report(HURT, {i: [running(4)]})])
            for i, m in enumerate((ANNA, BERT))
        }
        (after,) = settle(base, answers, continuing=[DORA])
        assert (after.ids, after.outcomes) == ((0, 1), ())
