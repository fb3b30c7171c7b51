"""What follows from the lines of trainers: how long nobody could go on, and what was wrong."""

import inspect

import pytest

from pmesh.client.elastic import place
from tools.lab.oplog import (
    TRAINS_ALONE,
    Life,
    SeenOp,
    TrainerReport,
    clean_ops_s,
    decode_report,
    encode_report,
    find_violations,
    longest_gap_s,
    next_step,
    recovery_s,
)


def op(
    step: int, *, done: float, names: str = "ab", digest: str = "", right: bool = True
) -> SeenOp:
    return SeenOp(step, done - 0.1, done, tuple(names), digest or f"{step} of {names}", right)


def life(*ops: SeenOp, name: str = "a") -> Life:
    return Life(name, {op.step: op for op in ops})


def test_a_line_comes_back_as_it_was_said_and_anything_else_is_no_report() -> None:
    report = TrainerReport(what="done", at=1.5, step=3, names=("mac-1",), digest="ab", right=False)

    assert decode_report(encode_report(report).decode()) == report
    assert decode_report("Traceback (most recent call last):") is None
    assert decode_report('{"what": 3}') is None


def test_who_was_told_so_is_alone_from_then_on() -> None:
    one = life(op(3, done=1.0, names="a"))
    told = TrainerReport(what="waiting", at=2.0, says=f"h1 has ended; until then {TRAINS_ALONE}")
    one.hear(told)

    assert TRAINS_ALONE in inspect.getsource(place)  # who rewords it, does so here too
    assert not one.knew_to_be_alone(op(3, done=1.0, names="a"))
    assert one.knew_to_be_alone(op(4, done=2.5, names="a"))
    assert not one.knew_to_be_alone(op(4, done=2.5, names="ab"))


def test_an_op_is_a_call_and_its_result_and_all_else_is_kept_apart() -> None:
    one = Life("mac-1")
    for report in (
        TrainerReport(what="called", at=1.0, step=7),
        TrainerReport(what="waiting", at=1.5, says="on mac-2"),
        TrainerReport(what="done", at=2.0, step=7, names=("mac-1",), digest="d"),
    ):
        one.hear(report)

    assert one.ops == {7: SeenOp(7, 1.0, 2.0, ("mac-1",), "d", right=True)}
    assert one.last is one.ops[7]
    assert [report.what for report in one.others] == ["waiting"]


def test_the_last_survivor_counts_and_only_an_op_that_nobody_had_completed() -> None:
    # At 10.0, one had completed step 4 and the other had not: step 5 counts for both.
    early = life(op(4, done=9.9), op(5, done=10.5))
    late = life(op(4, done=10.2), op(5, done=10.7))

    assert next_step([early, late], 10.0) == 5
    assert recovery_s([early, late], 10.0) == pytest.approx(0.7)


def test_an_op_may_come_while_one_looks_for_the_next() -> None:
    one = life()

    class WhileLooking(float):
        def __le__(self, other: float) -> bool:
            one.hear(TrainerReport(what="done", at=11.0, step=len(one.ops)))
            return super().__le__(other)

    one.ops |= life(op(0, done=WhileLooking(9.0)), op(1, done=WhileLooking(9.5))).ops
    assert next_step([one], 10.0) == 2


def test_a_survivor_that_has_not_completed_it_has_not_recovered() -> None:
    one, other = life(op(4, done=9.9), op(5, done=10.5)), life(op(4, done=9.9))

    assert recovery_s([one, other], 10.0) is None


def test_a_clean_op_lasts_from_the_last_call_to_the_last_return() -> None:
    one = life(SeenOp(1, 0.0, 5.0, (), "", right=True), SeenOp(2, 5.0, 6.0, (), "", right=True))
    other = life(SeenOp(1, 3.0, 4.0, (), "", right=True), SeenOp(2, 5.5, 6.5, (), "", right=True))

    assert clean_ops_s([one, other], since=0.0, until=10.0) == [2.0, 1.0]
    assert clean_ops_s([one, other], since=4.0, until=10.0) == [1.0]
    assert clean_ops_s([one, other], since=0.0, until=5.5) == [2.0]
    assert clean_ops_s([], since=0.0, until=1.0) == []


def test_equal_ops_in_the_right_order_are_no_violation() -> None:
    ops = [op(1, done=1.0), op(2, done=2.0, names="a")]

    assert find_violations({"a": ops, "b": ops[:1]}, survivors=["a", "b"]) == []


@pytest.mark.parametrize(
    "other",
    [op(1, done=1.0, digest="other bits"), op(1, done=1.0, names="ba", digest="1 of ab")],
    ids=["other bits", "other contributors"],
)
def test_an_op_that_two_saw_differently_is_torn(other: SeenOp) -> None:
    (found,) = find_violations({"a": [op(1, done=1.0)], "b": [other]})

    assert found.startswith("step 1 is torn: a: 1 of ab of a,b; b: ")


def test_a_wrong_sum_is_named_even_if_all_agree_on_it() -> None:
    wrong = op(3, done=1.0, right=False)

    assert find_violations({"a": [wrong], "b": [wrong]}) == [
        "step 3 at a: not the sum of what a, b gave",
        "step 3 at b: not the sum of what a, b gave",
    ]


def test_a_survivor_that_skipped_an_op_which_another_completed_is_named() -> None:
    whole = [op(step, done=float(step)) for step in (1, 2, 3)]
    lives = {"a": whole, "b": [whole[0], whole[2]], "c": []}

    assert find_violations(lives, survivors=["a", "b", "c"]) == [
        "b has not completed [2], but step 3",
        "c has completed nothing, others step 3",
    ]


def test_who_came_later_or_whose_last_lines_are_not_read_yet_has_skipped_nothing() -> None:
    whole = [op(step, done=float(step)) for step in (1, 2, 3, 4)]

    assert find_violations({"a": whole, "b": whole[1:2]}, survivors=["a", "b"]) == []


def test_forgotten_are_old_ops_but_never_the_last() -> None:
    one = Life("a")
    for step in (1, 2):
        one.hear(TrainerReport(what="called", at=float(step), step=step))
        one.hear(TrainerReport(what="done", at=step + 0.5, step=step))

    one.forget(before=2.2)
    assert (list(one.ops), list(one.calls)) == ([2], [])
    one.hear(TrainerReport(what="called", at=3.0, step=3))
    one.forget(before=9.0)
    assert (list(one.ops), list(one.calls)) == ([2], [3])  # the op of the last is under way


def test_errors_are_what_calls_raised_since_a_time() -> None:
    one = Life("a")
    for what, at in (("error", 1.0), ("superseded", 2.0), ("waiting", 3.0), ("error", 4.0)):
        one.hear(TrainerReport(what=what, at=at))

    assert [report.at for report in one.errors(1.5)] == [2.0, 4.0]


def test_a_gap_is_also_one_at_the_beginning_or_at_the_end() -> None:
    assert longest_gap_s([1.0, 2.0, 2.5], since=0.0, until=3.0) == 1.0
    assert longest_gap_s([1.0], since=0.0, until=3.0) == 2.0
    assert longest_gap_s([], since=0.0, until=3.0) == 3.0
    assert longest_gap_s([-5.0, 9.0], since=0.0, until=3.0) == 3.0
