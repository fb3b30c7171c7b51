"""Which ops of a rank are kept, and the counts of how long ops took."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.jobs.op_times import (
    DURATIONS_S,
    KEPT,
    MESSAGES,
    SIZES,
    DurationCounts,
    OpTime,
    RankTimes,
)
from pmesh.core.ops.kinds import KINDS
from pmesh.ids import JobName, TrainerId
from tests.worlds.kept import kept

OPS = st.builds(
    OpTime,
    op=st.integers(0, 2**62),
    began_us=st.integers(0, 2**40),
    nbytes=st.integers(0, 2**62),
    took_us=st.integers(0, 10**6),  # within 32 bits of a float, like 0.1 µs in a second
    receiving_us=st.integers(0, 10**6),
    kind=st.sampled_from(sorted({*KINDS, *MESSAGES})),
    completed=st.booleans(),
    peer=st.integers(-1, 2**32 - 1),
    tag=st.integers(-1, 2**31 - 1),
)


def make_times() -> RankTimes:
    return RankTimes(JobName("digits"), 3, TrainerId(7))


def note(times: RankTimes, op: OpTime) -> None:
    times.note(
        op.op,
        op.kind,
        op.nbytes,
        began_s=(op.began_us + 0.5) / 1e6,
        took_s=(op.took_us + 0.5) / 1e6,
        receiving_s=(op.receiving_us + 0.5) / 1e6,
        completed=op.completed,
        peer=op.peer,
        tag=op.tag,
    )


@given(st.lists(OPS, max_size=20))
def test_what_is_noted_comes_back(ops: list[OpTime]) -> None:
    times = make_times()
    for op in ops:
        note(times, op)

    assert [op for _, op in times.after(0, since_us=0)] == ops
    assert list(times.after(len(ops), since_us=0)) == []


def op_at(second: int) -> OpTime:
    return OpTime(second, second * 10**6, 4096, 1000, 0, "all_reduce", completed=True)


def test_the_last_ops_are_kept_and_found_by_their_ends() -> None:
    times = make_times()
    for second in range(KEPT):
        note(times, op_at(second))
    full = kept(times)
    for second in range(KEPT, KEPT + 100):
        note(times, op_at(second))

    found = list(times.after(0, since_us=0))
    assert (len(found), found[0], times.count) == (KEPT, (101, op_at(100)), KEPT + 100)
    last = list(times.after(0, since_us=(KEPT + 97) * 10**6 + 1001))
    assert [op.op for _, op in last] == [KEPT + 98, KEPT + 99]
    assert [count for count, _ in times.after(KEPT + 99, since_us=0)] == [KEPT + 100]
    assert kept(times) == full  # it grows no more


def test_a_rank_that_lost_lanes_meanwhile_has_received_for_no_time() -> None:
    times = make_times()
    times.note(0, "barrier", 0, began_s=1.0, took_s=1e6, receiving_s=-1.0, completed=False)

    ((_, op),) = times.after(0, since_us=0)
    assert (op.took_us, op.receiving_us) == (10**12, 0)


def test_ops_are_counted_by_kind_size_and_duration() -> None:
    counts = DurationCounts()
    for nbytes in (0, SIZES[0], SIZES[0] + 1, SIZES[-1] + 1):
        counts.note("all_reduce", nbytes, 1e-4)
    counts.note("all_reduce", 0, 60.0)
    counts.note("barrier", 0, 0.02)

    first, last = [1, *[0] * len(DURATIONS_S)], [0] * len(DURATIONS_S) + [1]
    both = [2, *last[1:]]
    found = {key: durations.counts for key, durations in counts.by_kind.items()}
    assert found["all_reduce", 0] == both
    assert found["all_reduce", 1] == first
    assert found["all_reduce", len(SIZES)] == first
    assert counts.by_kind["all_reduce", 0].total_s == pytest.approx(60.0002)
    assert found["barrier", 0][DURATIONS_S.index(3e-2)] == 1
