"""Results that only a lost trainer's agent still holds, and what becomes of them when it goes."""

import msgspec

from pmesh.core.values import Roster, View
from pmesh.core.views.rosters import jobs_to_settle
from pmesh.core.wire.link import Flushed, JobReport
from pmesh.ids import Member
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    completed,
    make_flushed,
    make_outcome,
    make_report,
    make_roster,
    make_trainer,
    make_verdict,
    make_view,
    make_view_request,
    running,
)
from tests.worlds.settling import TRIO, settle, settle_trio

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
