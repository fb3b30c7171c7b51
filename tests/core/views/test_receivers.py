"""A broadcast that names its receivers: who holds its result, and what a view makes of that."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.values import OpOutcome, Roster
from pmesh.core.views.op_log import Ledger, complete, fail, report, start
from pmesh.core.views.outcomes import outcome_of
from pmesh.core.wire.link import Call, JobReport, OpReport
from pmesh.core.wire.records import fingerprint
from pmesh.ids import Member, OpNumber, TrainerId
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    completed,
    failed,
    ids_of,
    make_outcome,
    make_report,
    make_trainer,
    make_verdict,
    make_view_request,
    running,
)
from tests.worlds.settling import TIMED_OUT, TRIO, settle_trio

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
        assert outcome.verdict is not None
        assert (outcome.verdict.error, outcome.contributors) == ("RankLost", (1, 2))


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
    assert outcome.verdict is not None
    assert outcome.verdict.error == "OpMismatch"
    assert outcome.verdict.message.endswith(
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
