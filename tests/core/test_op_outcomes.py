"""Ops through a view change: rerun, fetched or failed, and the same for all (O3, I4, I5)."""

from collections.abc import Mapping

from pmesh.core.messages import JobReport
from pmesh.core.rosters import jobs_to_settle, outcome_of
from pmesh.core.views import OpOutcome, Roster, Trainer, Verdict
from pmesh.ids import Member, OpNumber, Rank, Slot
from tests.core.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
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
from tests.core.settling import NEXT, TIMED_OUT, TRIO, running_everywhere, settle, settle_trio


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
