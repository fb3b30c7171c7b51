"""Ops through a view change: rerun, fetched or failed, and the same for all (O3, I4, I5)."""

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.ops.kinds import BOUND_KINDS
from pmesh.core.values import OpOutcome, Roster, Terms, Verdict
from pmesh.core.views.op_log import Ledger, complete, fail, report, start
from pmesh.core.views.outcomes import gather, outcome_of
from pmesh.core.wire.calls import Call
from pmesh.core.wire.records import fingerprint
from pmesh.core.wire.views import JobReport, OpReport, RankReport, ViewRequest
from pmesh.ids import Member, OpNumber, TrainerId
from tests.core.views.settling import NEXT, TIMED_OUT, TRIO, running_everywhere, settle_trio
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
    make_trainer,
    make_verdict,
    make_view_request,
    running,
)


def verdict_of(outcome: OpOutcome | None) -> Verdict:
    """Return why the op failed."""
    assert outcome is not None
    assert outcome.verdict is not None
    return outcome.verdict


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
        verdict = verdict_of(after.outcomes[0])
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
        assert verdict_of(outcome).error == "OpMismatch"
        assert verdict_of(outcome).trainers == (0, 1, 2)


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
    (found,) = after.outcomes
    assert (verdict_of(found).error, found.contributors) == ("RosterChanged", ids_of(0, 1))
    assert "rank 2 (mac-c) is lost" in verdict_of(found).message
    assert verdict_of(found).trainers == ids_of(2)


def test_it_fails_also_where_it_had_ended_when_it_can_t_end_everywhere() -> None:
    found = outcome({0}, {0, 1})
    assert found is not None
    assert (verdict_of(found).error, found.holders) == ("RosterChanged", ())


def test_it_has_ended_well_if_it_has_ended_at_all_who_are_left() -> None:
    assert outcome({0, 1}, {0, 1}) == make_outcome(4, 0, 1, 2, holders=[0, 1])


def test_it_runs_again_over_new_lanes_among_the_same_ranks() -> None:
    assert outcome(set(), {0, 1, 2}, RERUN) is None


def test_it_does_not_run_again_without_those_where_it_has_ended() -> None:
    verdict = verdict_of(outcome({1}, {0, 1, 2}, RERUN))
    assert verdict.error == "RosterChanged"
    assert "its ring was rebuilt" in verdict.message


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
    assert verdict_of(outcome_of(after, OpNumber(4))).error == "RankLost"


def test_ranks_that_called_something_else_hear_of_that_first() -> None:
    calls = {ANNA: GATHER, BERT: make_call("all_to_all")}
    reports: dict[Member, JobReport | None] = {
        m: make_report(TRIO, {i: [running(4, call)]}) for i, (m, call) in enumerate(calls.items())
    }
    assert verdict_of(outcome_of(settle_trio(reports), OpNumber(4))).error == "OpMismatch"


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


def test_what_a_lost_trainer_had_begun_is_over_where_all_others_are_past_it() -> None:
    """O2: Anna's agent keeps its results yet. Cara has entered since, and Bert is lost."""
    cara = make_trainer(2, CARA, enters=6)
    roster = msgspec.structs.replace(
        TRIO, trainers=(*TRIO.trainers[:2], cara), next_id=TrainerId(10)
    )
    of_anna = make_report(roster, {0: [running(8)]}, stable=7)
    lost = RankReport(TrainerId(9), 3, (running(4),))
    after = settle_trio(
        {
            ANNA: msgspec.structs.replace(of_anna, ranks=(*of_anna.ranks, lost)),
            CARA: make_report(roster, {2: [running(8)]}, stable=7),
        },
        roster=roster,
    )
    assert after.ids == (0, 2)
    assert after.outcomes == ()


OP = OpNumber(4)

TO_BERT = Call("broadcast", "float32", (3,), root=0, receivers=(1,))
"""Anna's state goes to Bert, and Cara hears of it."""

SENDS = OpReport(OP, TO_BERT, is_root=True)
LACKS = running(4, TO_BERT)
SENT = msgspec.structs.replace(completed(4, call=TO_BERT), is_root=True)
HAS = completed(4, call=TO_BERT)
HEARD = msgspec.structs.replace(HAS, holds=False)

ALL = (ANNA, BERT, CARA)


def settle_broadcast(*reports: "OpReport | None", lost: "int | None" = None) -> Roster:
    """The next roster, of what Anna, Bert and Cara report of the op; None: no word from there."""
    answers: dict[Member, JobReport | None] = {
        member: make_report(TRIO, {rank: [told]})
        for rank, (member, told) in enumerate(zip(ALL, reports, strict=True))
        if told is not None
    }
    verdict = None if lost is None else make_verdict("RankLost", lost)
    return settle_trio(answers, make_view_request(TRIO, verdict, op=4 if verdict is None else -1))


class TestWhoHoldsTheResult:
    """Nobody else is ever asked for it."""

    def test_is_the_root_and_who_has_received_it(self) -> None:
        after = settle_broadcast(SENT, HAS, LACKS)
        assert after.outcomes == (make_outcome(4, 0, 1, 2, holders=[0, 1]),)

    def test_is_nobody_who_only_heard_of_it(self) -> None:
        after = settle_broadcast(SENT, LACKS, HEARD)
        assert after.outcomes == (make_outcome(4, 0, 1, 2, holders=[0]),)

    def test_is_a_receiver_when_the_root_is_gone_with_its_machine(self) -> None:
        after = settle_broadcast(None, HAS, LACKS)
        assert after.ids == (1, 2)
        assert after.outcomes == (make_outcome(4, 0, 1, 2, holders=[1]),)

    def test_is_the_root_as_a_witness_when_its_trainer_alone_is_lost(self) -> None:
        after = settle_broadcast(SENT, LACKS, HEARD, lost=0)
        assert (after.ids, after.lost_holders) == ((1, 2), (make_trainer(0, ANNA),))
        assert after.outcomes == (make_outcome(4, 0, 1, 2, holders=[0]),)

    def test_is_no_lost_holder_that_only_heard_of_it(self) -> None:
        after = settle_broadcast(SENT, LACKS, HEARD, lost=2)
        assert (after.ids, after.lost_holders) == ((0, 1), ())
        assert after.outcomes == (make_outcome(4, 0, 1, 2, holders=[0]),)

    def test_is_the_root_before_its_own_end_where_others_have_heard_of_theirs(self) -> None:
        """I4: Cara's call has returned, so it can't run again without her."""
        after = settle_broadcast(SENDS, LACKS, HEARD)
        assert after.outcomes == (make_outcome(4, 0, 1, 2, holders=[0]),)
        assert after.lost_holders == ()

    def test_is_not_a_root_of_which_only_the_agent_is_left(self) -> None:
        """Its trainer has ended before the op has: nobody will complete it there.

        Cara may be in a later op, and others may enter with that one: so it fails now (O6).
        """
        after = settle_broadcast(SENDS, LACKS, HEARD, lost=0)
        assert (after.ids, after.lost_holders) == ((1, 2), ())
        (outcome,) = after.outcomes
        assert (verdict_of(outcome).error, outcome.contributors) == ("RankLost", (1, 2))


class TestABroadcastThatNobodyHolds:
    """... runs again, or fails."""

    def test_runs_again_when_nobody_has_heard_of_its_end(self) -> None:
        assert settle_broadcast(SENDS, LACKS, LACKS).outcomes == ()

    def test_runs_again_when_only_one_who_is_gone_had_heard_of_its_end(self) -> None:
        assert settle_broadcast(SENDS, LACKS, None).outcomes == ()

    def test_fails_for_all_when_the_root_is_lost_also_for_who_has_returned(self) -> None:
        """Who lacks it says so; who has heard of a success is told at its next call."""
        told: dict[Member, JobReport | None] = {
            BERT: make_report(TRIO, {1: [LACKS]}),
            CARA: make_report(TRIO, {2: [HEARD]}),
        }
        root_lost = make_verdict("RankLost")
        after = settle_trio(told, make_view_request(TRIO, root_lost, op=4))
        assert after.ids == (1, 2)
        assert after.outcomes == (make_outcome(4, 1, 2, verdict=root_lost),)

    def test_stays_failed_though_others_had_heard_of_its_end(self) -> None:
        after = settle_broadcast(SENT, failed(4, TIMED_OUT), HEARD)
        assert after.outcomes == (make_outcome(4, 0, 1, 2, verdict=TIMED_OUT),)


@pytest.mark.parametrize("ended", [False, True])
def test_ranks_that_name_other_receivers_differ_and_hear_which(*, ended: bool) -> None:
    """I5: also where the one that differs only passes on that it has ended."""
    to_cara = msgspec.structs.replace(TO_BERT, receivers=(2,))
    theirs = msgspec.structs.replace(HEARD if ended else LACKS, call=to_cara)
    (outcome,) = settle_broadcast(SENT, LACKS, theirs).outcomes
    assert verdict_of(outcome).error == "OpMismatch"
    assert verdict_of(outcome).message.endswith(
        "rank 0 (mac-a): broadcast(float32, 3, root=0, to=(1,)); "
        "rank 1 (mac-b): broadcast(float32, 3, root=0, to=(1,)); "
        "rank 2 (mac-c): broadcast(float32, 3, root=0, to=(2,))"
    )


def test_receivers_are_part_of_what_a_call_is() -> None:
    """O8: the first record that meets another call tells."""
    calls = [msgspec.structs.replace(TO_BERT, receivers=r) for r in ((), (1,), (2,), (1, 2))]
    assert len({fingerprint(call) for call in calls}) == len(calls)
    assert str(calls[0]) == "broadcast(float32, 3, root=0)"


def test_what_a_rank_reports_tells_whether_it_sends_holds_or_has_heard() -> None:
    contributors = ids_of(0, 1, 2)
    root = start(Ledger(stable=3), OP, TO_BERT, is_root=True)
    other = start(Ledger(stable=3), OP, TO_BERT)
    assert report(root, TrainerId(0)).ops == (SENDS,)
    assert report(other, TrainerId(1)).ops == (LACKS,)
    assert report(complete(root, OP, contributors), TrainerId(0)).ops == (SENT,)
    assert report(complete(other, OP, contributors), TrainerId(1)).ops == (HAS,)
    heard = complete(other, OP, contributors, holds=False)
    assert report(heard, TrainerId(2)).ops == (HEARD,)
    assert heard.ended == OP  # like any other: it does not hold up what is stable
    late = fail(heard, make_outcome(4, 1, 2, verdict=TIMED_OUT))
    (told,) = report(late, TrainerId(2)).ops
    assert (told.completed, told.verdict, told.contributors) == (False, TIMED_OUT, (1, 2))


@given(
    st.sampled_from([SENDS, SENT, None]),
    st.sampled_from([LACKS, HAS, HEARD, None]),
    st.sampled_from([LACKS, HAS, HEARD]),
    st.sampled_from([None, 0, 1]),
)
def test_whatever_is_reported_only_a_root_or_a_holder_is_named(
    anna: "OpReport | None", bert: "OpReport | None", cara: OpReport, lost: "int | None"
) -> None:
    """I4: and what a survivor completed is completed by all, while anybody can serve it."""
    reports = (anna, bert, cara)
    after = settle_broadcast(*reports, lost=lost)
    outcome: OpOutcome | None = outcome_of(after, OP)
    told = {i: r for i, r in enumerate(reports) if r is not None}
    can_serve = {
        i for i, r in told.items() if (r.completed and r.holds) or (r.is_root and i in after.ids)
    }
    left = [told[i] for i in after.ids if i in told]
    if outcome is not None and outcome.verdict is not None:
        assert not can_serve
        assert {report.completed for report in left} == {True, False}
    elif outcome is not None:
        assert outcome.holders
        assert {*outcome.holders} <= can_serve
        assert outcome.contributors == (0, 1, 2)
    elif any(report.completed for report in told.values()):
        assert not can_serve
