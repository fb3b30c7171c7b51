import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pmesh.core.values import Verdict
from pmesh.core.views.op_log import (
    NONE_YET,
    Ledger,
    apply_failures,
    complete,
    fail,
    pass_barriers,
    report,
    stabilize,
    start,
)
from pmesh.core.wire.views import OpReport, RankReport
from pmesh.ids import OpNumber, TrainerId
from tests.worlds.builders import (
    completed,
    failed,
    ids_of,
    make_call,
    make_outcome,
    make_verdict,
    running,
)
from tests.worlds.examples import examples

TIMED_OUT = make_verdict("OpTimedOut")


def ledger_of(*ops: OpReport, stable: int = NONE_YET) -> Ledger:
    return Ledger(stable=stable, ops={op.op: op for op in ops})


def op(number: int) -> OpNumber:
    return OpNumber(number)


def test_before_op_0_nothing_is_started_ended_or_stable() -> None:
    ledger = Ledger()
    assert (ledger.started, ledger.ended, ledger.stable) == (-1, -1, -1)
    assert report(ledger, TrainerId(2)) == RankReport(TrainerId(2), -1, ())


def test_an_op_that_was_called_is_started_but_has_not_ended() -> None:
    ledger = start(Ledger(), op(0), make_call())
    assert (ledger.started, ledger.ended) == (0, -1)
    assert ledger == ledger_of(running(0))


def test_an_op_ends_well_or_badly() -> None:
    both = ledger_of(running(0), running(1))
    ended = complete(both, op(0), ids_of(0, 1, 2))
    ended = fail(ended, make_outcome(1, 0, 1, 2, verdict=TIMED_OUT))
    assert ended.ended == 1
    assert ended == ledger_of(completed(0), failed(1, TIMED_OUT))


def test_an_op_that_ended_before_an_earlier_one_does_not_raise_the_mark() -> None:
    ledger = ledger_of(completed(0), running(1), completed(2))
    assert (ledger.ended, ledger.started) == (0, 2)


def test_stable_ops_are_forgotten_and_still_count() -> None:
    ledger = stabilize(ledger_of(completed(0), completed(1), running(2)), 1)
    assert ledger == ledger_of(running(2), stable=1)
    assert (ledger.started, ledger.ended) == (2, 1)


def test_with_all_ops_stable_the_marks_stand_where_they_stood() -> None:
    ledger = stabilize(ledger_of(completed(0), completed(1)), 1)
    assert (ledger.started, ledger.ended, ledger.stable) == (1, 1, 1)


def test_of_several_barriers_that_have_ended_all_but_the_last_are_stable() -> None:
    ledger = pass_barriers(
        ledger_of(completed(3), completed(4), stable=2), op(7), make_call(), ids_of(0, 1, 2)
    )
    assert ledger == ledger_of(completed(7), stable=6)
    assert (ledger.started, ledger.ended) == (7, 7)


@pytest.mark.parametrize("number", [3, 4])
def test_no_barrier_ends_twice(number: int) -> None:
    with pytest.raises(ValueError, match=f"op {number} after op 4"):
        pass_barriers(ledger_of(completed(4), stable=3), op(number), make_call(), ids_of(0, 1, 2))


def test_a_mark_from_others_never_passes_what_has_ended_here() -> None:
    ledger = ledger_of(completed(0), running(1), completed(2))
    assert stabilize(ledger, 2) == ledger_of(running(1), completed(2), stable=0)


@pytest.mark.parametrize("mark", [-1, 3, 4])
def test_a_mark_that_is_old_news_changes_nothing(mark: int) -> None:
    ledger = ledger_of(completed(5), stable=4)
    assert stabilize(ledger, mark) is ledger


def test_a_report_lists_every_op_that_is_not_stable_in_order_of_number() -> None:
    ledger = ledger_of(completed(7), running(5), failed(6, TIMED_OUT), stable=4)
    assert report(ledger, TrainerId(1)) == RankReport(
        TrainerId(1), 4, (running(5), failed(6, TIMED_OUT), completed(7))
    )


def test_what_a_view_change_failed_fails_here_even_if_it_had_ended() -> None:
    mismatch = make_verdict("OpMismatch", 0, 1)
    ledger = ledger_of(completed(0), running(1), completed(2))
    outcomes = [
        make_outcome(0, 0, 2, verdict=mismatch),
        make_outcome(1, 0, 2, verdict=TIMED_OUT),
    ]
    assert apply_failures(ledger, outcomes) == ledger_of(
        failed(0, mismatch, 0, 2), failed(1, TIMED_OUT, 0, 2), completed(2)
    )


def test_outcomes_of_completed_ops_and_of_ops_unknown_here_change_nothing() -> None:
    ledger = ledger_of(running(3), stable=2)
    outcomes = [
        make_outcome(1, 0, 1, 2, verdict=TIMED_OUT),
        make_outcome(3, 0, 1, 2, holders=[1]),
        make_outcome(4, 0, 1, 2, verdict=TIMED_OUT),
    ]
    assert apply_failures(ledger, outcomes) is ledger


def test_a_ledger_is_a_value() -> None:
    before = ledger_of(running(0))
    complete(before, op(0), ids_of(0))
    assert before == ledger_of(running(0))
    with pytest.raises(AttributeError, match="immutable"):
        before.stable = 3  # type: ignore[misc]


class LedgerOfOneRank(RuleBasedStateMachine):
    """Ops in call order, ended in any order, against a list of how each has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.ends: list[bool | Verdict] = []
        """For each op: False while it runs, True when completed, else why it failed."""
        self.stable = NONE_YET

    def pick(self, data: st.DataObject) -> OpNumber:
        return op(data.draw(st.integers(self.stable + 1, len(self.ends) - 1)))

    @rule()
    def call_an_op(self) -> None:
        self.ledger = start(self.ledger, op(len(self.ends)), make_call())
        self.ends.append(False)

    @precondition(lambda self: self.stable + 1 < len(self.ends))
    @rule(data=st.data())
    def complete_an_op(self, data: st.DataObject) -> None:
        number = self.pick(data)
        if self.ends[number] is False:
            self.ledger = complete(self.ledger, number, ids_of(0))
            self.ends[number] = True

    @precondition(lambda self: self.stable + 1 < len(self.ends))
    @rule(data=st.data())
    def fail_an_op_by_a_view_change(self, data: st.DataObject) -> None:
        number = self.pick(data)
        self.ledger = apply_failures(self.ledger, [make_outcome(number, 0, verdict=TIMED_OUT)])
        self.ends[number] = TIMED_OUT

    @rule(mark=st.integers(-1, 12))
    def hear_a_stable_mark(self, mark: int) -> None:
        self.ledger = stabilize(self.ledger, mark)
        self.stable = max(self.stable, min(mark, self.ended()))

    def ended(self) -> int:
        return next((i for i, end in enumerate(self.ends) if end is False), len(self.ends)) - 1

    @invariant()
    def the_marks_are_in_order(self) -> None:
        assert self.ledger.stable <= self.ledger.ended <= self.ledger.started

    @invariant()
    def the_marks_are_those_of_the_list(self) -> None:
        assert self.ledger.stable == self.stable
        assert self.ledger.ended == self.ended()
        assert self.ledger.started == len(self.ends) - 1

    @invariant()
    def the_report_says_of_each_unstable_op_how_it_ended(self) -> None:
        told = {op.op: op.verdict or op.completed for op in report(self.ledger, TrainerId(0)).ops}
        assert list(told) == list(range(self.stable + 1, len(self.ends)))
        assert list(told.values()) == self.ends[self.stable + 1 :]


TestLedgerOfOneRank = LedgerOfOneRank.TestCase
TestLedgerOfOneRank.settings = examples(50, stateful_step_count=30)
