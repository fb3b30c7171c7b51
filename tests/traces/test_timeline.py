"""The ops of machines with clocks of their own, on one clock."""

from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.jobs.op_times import OpTime
from pmesh.ids import JobName
from pmesh.traces.rules.timeline import (
    PlacedOp,
    find_waits,
    only_latest_run,
    place_ops,
    share_out,
)
from pmesh.traces.wire import TracedOps
from tests.traces.histories import (
    BEGAN_US,
    JOB,
    TraceHistory,
    histories,
    machine,
    message,
    op,
    told,
)
from tests.worlds.strategies import values_of

ALONE = (machine(0, me=True),)
END_US = BEGAN_US + 60 * 10**6


def place(*traced: TracedOps, since_us: int = BEGAN_US) -> list[PlacedOp]:
    machines = tuple(machine(i, me=not i) for i in range(4))
    return place_ops(traced, machines, since_us=since_us, until_us=END_US)


@given(histories())
def test_the_ops_of_one_number_overlap_within_the_error_of_the_clocks(
    history: TraceHistory,
) -> None:
    placed = place_ops(history.traced, history.machines, since_us=0, until_us=history.until_us)
    assert len(placed) == sum(len(each.ops.times) for each in history.traced)

    calls: dict[int, list[PlacedOp]] = defaultdict(list)
    for each in placed:
        assert each.began_us <= each.ended_us
        calls[each.op.op].append(each)
    for same in calls.values():
        for one in same:
            for other in same:
                assert one.began_us <= other.ended_us + one.error_us + other.error_us + 1e-3


@given(histories())
def test_a_wait_lies_within_its_op_and_ends_as_the_last_rank_calls(history: TraceHistory) -> None:
    placed = place_ops(history.traced, history.machines, since_us=0, until_us=history.until_us)
    for number, wait in find_waits(placed).items():
        each = placed[number]
        assert each.began_us < wait.until_us <= each.ended_us
        assert wait.last.op.op == each.op.op
        assert wait.last is not each
        assert all(
            other.began_us <= wait.last.began_us for other in placed if other.op.op == each.op.op
        )


@given(histories())
def test_the_shares_of_a_process_are_all_of_its_time(history: TraceHistory) -> None:
    placed = place_ops(history.traced, history.machines, since_us=0, until_us=history.until_us)
    for process, share in share_out(placed, find_waits(placed)).items():
        own = [each for each in placed if each.process == process]
        whole_us = own[-1].ended_us - own[0].began_us
        parts = share.outside_us, share.waited_us, share.moved_us
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(whole_us, abs=1.0)
        assert share.calls == len(own)


def test_the_ranks_wait_for_the_last_one_and_then_move_values() -> None:
    quick = told(0, (op(0, BEGAN_US, BEGAN_US + 9_000),))
    slow = told(1, (op(0, BEGAN_US + 6_000, BEGAN_US + 9_000),))
    machines = (machine(0, me=True), machine(1, offset_us=77))

    placed = place_ops((quick, slow), machines, since_us=BEGAN_US, until_us=END_US)
    first = next(number for number, each in enumerate(placed) if each.process.machine == 0)
    waits = find_waits(placed)

    assert list(waits) == [first]
    assert waits[first].last.rank == 1
    assert waits[first].until_us == pytest.approx(BEGAN_US + 6_000 - 77)
    share = share_out(placed, waits)[placed[first].process]
    assert (share.waited_us, share.moved_us) == pytest.approx((5_923, 3_077))


def test_a_wait_shorter_than_the_error_of_the_clocks_is_none() -> None:
    quick = told(0, (op(0, BEGAN_US, BEGAN_US + 9_000),))
    slow = told(1, (op(0, BEGAN_US + 400, BEGAN_US + 9_000),))
    machines = (machine(0, me=True), machine(1, error_us=500))

    placed = place_ops((quick, slow), machines, since_us=BEGAN_US, until_us=END_US)

    assert find_waits(placed) == {}


def test_nobody_waits_in_ops_that_a_rank_may_end_before_others_begin() -> None:
    root = told(0, (op(0, BEGAN_US, BEGAN_US + 9_000, "broadcast"),))
    later = told(1, (op(0, BEGAN_US + 6_000, BEGAN_US + 9_000, "broadcast"),))
    new = told(2, (op(0, BEGAN_US, BEGAN_US + 10, "of_tomorrow"),))

    assert find_waits(place(root, later, new)) == {}


def test_who_sends_early_waits_for_the_receiver_and_who_receives_early_for_the_sender() -> None:
    late, early = BEGAN_US + 6_000, BEGAN_US
    sends = (message("send", early, late + 9, peer=1), message("send", late, late + 9, peer=2))
    one = told(1, (message("recv", late, late + 9, peer=0),))
    two = told(2, (message("recv", early, late + 9, peer=0),))

    placed = place(told(0, sends), one, two)

    waits = find_waits(placed)
    found = {
        (placed[number].rank, placed[number].op.kind): (wait.last.rank, wait.until_us)
        for number, wait in waits.items()
    }
    assert found == {(0, "send"): (1, late), (2, "recv"): (0, late)}
    shares = {process.machine: share for process, share in share_out(placed, waits).items()}
    assert (shares[2].calls, shares[2].waited_us, shares[2].moved_us) == (1, 6_000, 9)


def test_messages_with_one_end_or_of_other_numbers_wait_for_nobody() -> None:
    sent = told(0, (message("send", BEGAN_US, BEGAN_US + 9, peer=1),))
    later = message("recv", BEGAN_US + 5, BEGAN_US + 9, peer=0, number=1)
    failed = message("recv", BEGAN_US + 5, BEGAN_US + 9, peer=-1)

    assert find_waits(place(sent, told(1, (later, failed)))) == {}


def test_ops_of_one_number_in_two_runs_of_a_job_do_not_wait_for_each_other() -> None:
    first = told(0, (op(0, BEGAN_US, BEGAN_US + 9_000),))
    second = told(1, (op(0, BEGAN_US + 6_000, BEGAN_US + 9_000),), run=2)

    assert find_waits(place(first, second)) == {}


def test_of_several_runs_the_latest_is_kept_with_the_groups_that_it_has_made() -> None:
    times, group = (op(0, BEGAN_US, BEGAN_US + 9),), JobName("digits/abc.0")
    runs = [told(0, times, run=run, job=job) for run in (1, 5) for job in (JOB, group)]
    later = told(1, times, run=7, job=group)

    kept, left_out = only_latest_run(place(*runs, later), JOB)

    assert sorted({(each.job, each.run) for each in kept}) == [(JOB, 5), (group, 5), (group, 7)]
    assert left_out == 1
    assert only_latest_run(place(later), JOB) == (place(later), 0)


def test_ops_that_ended_before_or_will_end_later_are_left_out() -> None:
    times = (
        op(0, BEGAN_US - 9, BEGAN_US - 1),
        op(1, BEGAN_US - 9, BEGAN_US + 1),
        op(2, END_US, END_US + 1),
    )
    assert [each.op.op for each in place(told(0, times))] == [1]


def test_the_time_of_groups_counts_once() -> None:
    group = JobName("digits/abc.0")
    own = told(0, (op(0, BEGAN_US, BEGAN_US + 10), op(1, BEGAN_US + 90, BEGAN_US + 100)))
    within = told(0, (op(0, BEGAN_US + 5, BEGAN_US + 35),), job=group)

    ((process, share),) = share_out(place(own, within), {}).items()

    assert (share.calls, share.outside_us, share.moved_us) == (3, 55, 45)
    assert process.pid == 100


def test_a_machine_without_a_clock_has_no_place() -> None:
    unknown = msgspec.structs.replace(machine(0), clock=())
    ops = told(0, (op(0, BEGAN_US, BEGAN_US + 1),))
    assert place_ops((ops,), (unknown,), since_us=0, until_us=END_US) == []


@given(st.lists(values_of(OpTime), min_size=1, max_size=8), st.booleans())
def test_whatever_a_machine_tells_lies_within_the_time_that_was_asked_for(
    times: list[OpTime],
    mine: bool,  # noqa: FBT001 - an example
) -> None:
    found = place_ops(
        (told(0, tuple(times)),),
        (machine(0, me=mine),),
        since_us=BEGAN_US,
        until_us=END_US,
    )
    for each in found:
        assert BEGAN_US <= each.ended_us <= END_US + each.error_us
        assert each.began_us <= each.ended_us
        assert each.job == JOB
    find_waits(found)
