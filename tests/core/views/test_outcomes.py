"""Ops through a view change: rerun, fetched or failed, and the same for all (O3, I4, I5)."""

from collections.abc import Mapping

from pmesh.core.values import OpOutcome, Verdict
from pmesh.core.views.outcomes import gather, outcome_of
from pmesh.core.wire.link import JobReport
from pmesh.ids import Member, OpNumber
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    FACES,
    completed,
    failed,
    ids_of,
    make_call,
    make_epoch,
    make_outcome,
    make_report,
    make_roster,
    make_verdict,
    make_view_request,
    running,
)
from tests.worlds.settling import NEXT, TIMED_OUT, TRIO, running_everywhere, settle_trio


class TestTheOpsOfAConcernedJob:
    """O3 and I4: one verdict for all."""

    VIEW_REQUEST = make_view_request(TRIO, TIMED_OUT, op=4)
    FAILED = make_outcome(4, 0, 1, 2, verdict=TIMED_OUT)

    def outcome(self, reports: Mapping[Member, JobReport | None], op: int = 4) -> OpOutcome | None:
        after = settle_trio(reports, self.VIEW_REQUEST)
        assert after.number == NEXT.counter
        return outcome_of(after, OpNumber(op))

    def test_fail_with_the_concern_when_nobody_has_the_result(self) -> None:
        assert self.outcome(running_everywhere()) == self.FAILED

    def test_complete_everywhere_when_one_rank_has_the_result(self) -> None:
        reports = running_everywhere() | {BERT: make_report(TRIO, {1: [completed(4)]})}
        assert self.outcome(reports) == make_outcome(4, 0, 1, 2, holders=[1])

    def test_name_every_holder_in_order(self) -> None:
        reports = running_everywhere() | {
            CARA: make_report(TRIO, {2: [completed(4)]}),
            ANNA: make_report(TRIO, {0: [completed(4)]}),
        }
        assert self.outcome(reports) == make_outcome(4, 0, 1, 2, holders=[0, 2])

    def test_keep_the_contributors_of_the_attempt_that_succeeded(self) -> None:
        """O5: whose values are in a result does not depend on who is left."""
        reports = running_everywhere() | {BERT: make_report(TRIO, {1: [completed(4, 5, 0, 1, 2)]})}
        assert self.outcome(reports) == make_outcome(4, 5, 0, 1, 2, holders=[1])

    def test_keep_the_verdict_that_an_earlier_view_gave_and_to_whom(self) -> None:
        earlier = make_verdict("OpMismatch", 0)
        reports = running_everywhere() | {
            CARA: make_report(TRIO, {2: [failed(4, earlier, 0, 1, 2, 7)]})
        }
        assert self.outcome(reports) == make_outcome(4, 0, 1, 2, 7, verdict=earlier)

    def test_keep_a_verdict_even_against_a_rank_that_holds_a_result(self) -> None:
        """A broadcast's root returns early, and hears of the mismatch at its next call (I5)."""
        earlier = make_verdict("OpMismatch", 0)
        reports = running_everywhere() | {
            ANNA: make_report(TRIO, {0: [completed(4)]}),
            CARA: make_report(TRIO, {2: [failed(4, earlier)]}),
        }
        assert self.outcome(reports) == make_outcome(4, 0, 1, 2, verdict=earlier)

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
        assert settle_trio(reports, self.VIEW_REQUEST).outcomes == (
            make_outcome(3, 0, 1, 2, holders=[0]),
            self.FAILED,
            make_outcome(5, 0, 1, 2, holders=[0]),
        )

    def test_fail_also_when_no_survivor_has_started_them(self) -> None:
        nothing: dict[Member, JobReport | None] = dict.fromkeys((ANNA, BERT, CARA))
        assert self.outcome(nothing) == self.FAILED

    def test_run_again_over_new_lanes_when_the_concern_blames_nobody(self) -> None:
        after = settle_trio(running_everywhere(), make_view_request(TRIO, None, op=4))
        assert after.number == NEXT.counter
        assert (after.outcomes, after.losses) == ((), ())

    def test_are_what_the_ranks_of_one_machine_report_together(self) -> None:
        roster = make_roster(ANNA, ANNA, BERT)
        reports: dict[Member, JobReport | None] = {
            ANNA: make_report(roster, {0: [running(4)], 1: [completed(4)]}),
            BERT: make_report(roster, {2: [running(4)]}),
            CARA: None,
        }
        after = settle_trio(reports, make_view_request(roster, TIMED_OUT, op=4), roster=roster)
        assert after.outcomes == (make_outcome(4, 0, 1, 2, holders=[1]),)

    def test_are_not_what_is_said_of_another_job_or_an_earlier_one(self) -> None:
        foreign = make_roster(ANNA, BERT, CARA, job=FACES)
        older = make_roster(ANNA, BERT, CARA, born=make_epoch(2))
        reports: dict[Member, JobReport | None] = running_everywhere() | {
            ANNA: make_report(foreign, {0: [completed(4)]}),
            BERT: make_report(older, {1: [completed(4)]}),
        }
        assert self.outcome(reports) == self.FAILED


class TestRanksThatCalledDifferentThings:
    """I5: all get an error that names the op and the ranks."""

    def test_all_learn_who_called_what(self) -> None:
        reports: dict[Member, JobReport | None] = {
            ANNA: make_report(TRIO, {0: [running(4)]}),
            BERT: make_report(TRIO, {1: [running(4, make_call("broadcast"))]}),
            CARA: make_report(TRIO, {2: [completed(4)]}),
        }
        after = settle_trio(reports, make_view_request(TRIO, None, op=4))
        call = "(float32, 3, sum)"
        assert outcome_of(after, OpNumber(4)) == make_outcome(
            4,
            0,
            1,
            2,
            verdict=Verdict(
                "OpMismatch",
                f"op 4 of job 'digits' differs: rank 0 (mac-a): all_reduce{call}; "
                f"rank 1 (mac-b): broadcast{call}; rank 2 (mac-c): all_reduce{call}",
                ids_of(0, 1, 2),
            ),
        )

    def test_learn_also_who_has_not_called_yet(self) -> None:
        reports: dict[Member, JobReport | None] = {
            ANNA: make_report(TRIO, {0: [running(4)]}),
            BERT: make_report(TRIO, {1: [running(4, make_call("broadcast"))]}),
            CARA: make_report(TRIO, {2: []}),
        }
        after = settle_trio(reports, make_view_request(TRIO, None, op=4))
        verdict = after.outcomes[0].verdict
        assert verdict is not None
        assert verdict.message.endswith("rank 2 (mac-c): not called yet")
        assert verdict.trainers == (0, 1)

    def test_are_none_when_who_differed_is_lost(self) -> None:
        """Its call is nobody's any more: the others run theirs again."""
        reports: dict[Member, JobReport | None] = {
            ANNA: make_report(TRIO, {0: [running(4)]}),
            BERT: make_report(TRIO, {1: [running(4)]}),
            CARA: make_report(TRIO, {2: [running(4, make_call("broadcast"))]}),
        }
        after = settle_trio(reports, make_view_request(TRIO, make_verdict("RankLost", 2)))
        assert (after.ids, after.outcomes) == ((0, 1), ())

    def test_are_told_so_when_one_of_them_has_the_result_though_it_is_lost(self) -> None:
        """Who fetches what it has not called would take one thing for another."""
        reports: dict[Member, JobReport | None] = {
            ANNA: make_report(TRIO, {0: [running(4)]}),
            BERT: make_report(TRIO, {1: [running(4)]}),
            CARA: make_report(TRIO, {2: [completed(4, call=make_call("broadcast"))]}),
        }
        after = settle_trio(reports, make_view_request(TRIO, make_verdict("RankLost", 2)))
        (outcome,) = after.outcomes
        assert (outcome.holders, outcome.contributors) == ((), (0, 1))
        assert outcome.verdict is not None
        assert outcome.verdict.error == "OpMismatch"
        assert outcome.verdict.trainers == (0, 1, 2)


class TestWhatHasFailed:
    """... stays so through the view changes that follow."""

    FAILED = make_outcome(4, 0, 1, 2, verdict=TIMED_OUT)
    ROSTER = make_roster(ANNA, BERT, CARA, outcomes=[FAILED])

    def after(self, reports: Mapping[Member, JobReport | None]) -> tuple[OpOutcome, ...]:
        view_request = make_view_request(self.ROSTER, None, op=3)
        return settle_trio(reports, view_request, roster=self.ROSTER).outcomes

    def test_before_anybody_has_come_to_it(self) -> None:
        ranks = {0: [running(3)]}
        assert self.after({ANNA: make_report(self.ROSTER, ranks)}) == (self.FAILED,)

    def test_for_one_who_missed_the_view_that_said_so(self) -> None:
        """Cara called the op when it had failed, and she still waits for it."""
        assert self.after(
            {
                ANNA: make_report(self.ROSTER, {0: [running(3)]}),
                CARA: make_report(self.ROSTER, {2: [running(4)]}),
            }
        ) == (self.FAILED,)

    def test_until_all_have_come_past_it(self) -> None:
        reports: dict[Member, JobReport | None] = {
            m: make_report(self.ROSTER, {i: [running(5)]}, stable=4)
            for i, m in enumerate((ANNA, BERT, CARA))
        }
        assert self.after(reports) == ()


def test_what_is_known_of_a_job_is_what_all_its_members_say() -> None:
    known = gather(
        [
            make_report(TRIO, {0: [completed(5), running(6)], 3: [running(5)]}, stable=4),
            make_report(TRIO, {1: [running(4), running(5)]}, stable=3),
        ]
    )
    assert (known.stable, known.highest) == (4, 6)
    assert known.ops == {
        4: {1: running(4)},
        5: {0: completed(5), 3: running(5), 1: running(5)},
        6: {0: running(6)},
    }
    nothing = gather([make_report(TRIO, {0: []}, stable=7)])
    assert (nothing.stable, nothing.highest, nothing.ops) == (7, 7, {})
    assert (gather([]).stable, gather([]).highest) == (-1, -1)


def test_an_op_without_an_outcome_runs_on_or_again() -> None:
    outcome = make_outcome(3, 0, verdict=TIMED_OUT)
    roster = make_roster(ANNA, outcomes=[outcome])
    assert outcome_of(roster, OpNumber(3)) == outcome
    assert outcome_of(roster, OpNumber(4)) is None
