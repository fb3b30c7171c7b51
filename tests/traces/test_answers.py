"""Which ops an agent tells who asks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.jobs.op_times import RankTimes
from pmesh.core.wire.channels import encode
from pmesh.ids import JobName, TrainerId
from pmesh.traces.rules.answers import is_of, next_ops
from pmesh.traces.wire import MOST_TIMES, AskOps, Cursor, RankOps, TellOps
from tests.traces.histories import JOB


def rank(trainer: int, count: int, *, job: str = JOB, run: int = 1) -> RankTimes:
    times = RankTimes(JobName(job), run, TrainerId(trainer))
    times.rank, times.pid = trainer, 100 + trainer
    for number in range(count):
        times.note(
            number, "barrier", 0, began_s=number, took_s=0.5, receiving_s=0.0, completed=True
        )
    return times


def all_of(ranks: list[RankTimes], since_us: int = 0) -> list[RankOps]:
    found: list[RankOps] = []
    after: Cursor | None = None
    while (ops := next_ops(ranks, AskOps(0, JOB, 60.0, after), since_us=since_us)) is not None:
        found.append(ops)
        after = ops.last
    return found


@given(st.lists(st.integers(0, 2 * MOST_TIMES + 1), max_size=4), st.randoms())
def test_who_asks_again_and_again_is_told_each_op_once(counts: list[int], random: object) -> None:
    ranks = [rank(trainer, count) for trainer, count in enumerate(counts)]
    random.shuffle(ranks)  # type: ignore[attr-defined] # it is a random.Random

    found = all_of(ranks)

    for trainer, count in enumerate(counts):
        own = [op.op for ops in found if ops.last.trainer == trainer for op in ops.times]
        assert own == list(range(count))
    assert all(ops.rank == ops.last.trainer and ops.pid == ops.rank + 100 for ops in found)


def test_ops_that_ended_too_long_ago_are_not_told() -> None:
    (ops,) = all_of([rank(0, 10), rank(1, 3)], since_us=8_000_000)
    assert [op.op for op in ops.times] == [8, 9]


def test_groups_of_the_job_are_told_and_other_jobs_are_not() -> None:
    ranks = [rank(0, 1), rank(1, 1, job="digits/abc.0"), rank(2, 1, job="digits-2")]
    assert [ops.last.job for ops in all_of(ranks)] == ["digits", "digits/abc.0"]
    assert not is_of("digits", "digits/abc.0")


def test_a_job_that_ran_twice_is_told_twice() -> None:
    assert [ops.last.run for ops in all_of([rank(0, 1, run=5), rank(0, 1, run=2)])] == [2, 5]


def test_who_names_a_rank_that_has_gone_is_told_of_the_next_one() -> None:
    after = Cursor(JOB, 1, TrainerId(3), 10)
    ops = next_ops([rank(1, 1), rank(7, 1)], AskOps(0, JOB, 60.0, after), since_us=0)
    assert ops is not None
    assert ops.last.trainer == 7


@pytest.mark.parametrize(
    ("kind", "about"), [("reduce_scatter", {}), ("recv", {"peer": 2**32 - 1, "tag": 2**31 - 1})]
)
def test_the_largest_answer_is_within_its_bound(kind: str, about: dict[str, int]) -> None:
    times = RankTimes(JobName("\U0001d541" * 64), 2**62, TrainerId(2**32 - 1))
    times.rank, times.pid = 2**31 - 1, 2**62
    for op in (2**63 - 1,) * MOST_TIMES:
        times.note(
            op,
            kind,
            2**62,
            began_s=4e12,
            took_s=1e9,
            receiving_s=1e9,
            completed=False,
            **about,
        )
    ops = next_ops([times], AskOps(0, times.job, 60.0), since_us=0)
    assert ops is not None
    assert len(ops.times) == MOST_TIMES

    assert len(encode(TellOps(2**62, ops))) <= TellOps.most_bytes / 2
