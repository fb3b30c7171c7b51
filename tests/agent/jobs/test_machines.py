"""Ranks of several agents, of which some have several: towards the network each agent is one."""

import math
from functools import partial
from random import Random

import numpy as np
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from pmesh.agent.jobs.together import Meetings, _Relay, _Work
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.errors import LaneBroken
from pmesh.net.lanes import executor, native
from pmesh.net.lanes.folding import SourceFold
from tests.agent.jobs.machines import KILLED, hold_at_network, job_of
from tests.agent.jobs.parts import ATTEMPT, part_of, result_of
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import TrainerClient, together, until
from tests.worlds.village import village
from tests.worlds.village_ops import (
    machine_of,
    ones,
    swallow,
)


async def sums_of(trainers: list[TrainerClient], count: int, op: str = "sum") -> list[Values]:
    calls = [
        partial(t.reduce, np.arange(count, dtype=np.float32) / 7 + i, op)
        for i, t in enumerate(trainers)
    ]
    return await together(*calls)


@pytest.mark.parametrize("counts", [(2, 2), (2, 1), (3, 2, 1)])
async def test_all_ranks_get_the_same_bits(clock: MockClock, counts: tuple[int, ...]) -> None:
    async with village(clock, len(counts)) as here:
        trainers = await job_of(here, *counts)
        size = len(trainers)
        for count in (3, 200_000):
            results = await sums_of(trainers, count, "mean")
            assert len({result.tobytes() for result in results}) == 1
            mean = np.arange(count, dtype=np.float32) / 7 + (size - 1) / 2
            np.testing.assert_allclose(results[0], mean, rtol=1e-5)
            (largest, *others) = await sums_of(trainers, count, "max")
            highest = np.arange(count, dtype=np.float32) / 7 + (size - 1)
            assert largest.tobytes() == highest.astype(np.float32).tobytes()
            assert {other.tobytes() for other in others} == {largest.tobytes()}
        await together(*[trainer.barrier for trainer in trainers])


async def test_values_that_are_folded_as_they_are_sent_have_the_same_bits(
    clock: MockClock, faults: Faults
) -> None:
    folds, count = list[int](), 99_999

    def noted(by_parts: Real, work: _Work) -> int:
        folds.append(by_parts(work))
        return folds[-1]

    faults.around(_Work, "by_parts", noted)
    async with village(clock, 3) as here:
        trainers = await job_of(here, 2, 3, 1)
        for strategy in ("ring", "tree", "centralized", "hierarchical", "chain", "direct"):
            call = Call("all_reduce", "float32", (count,), "mean", strategy=strategy)
            results = set[bytes]()
            for least in (math.inf, 0):
                faults.limit(executor, "FOLDS_BY_PARTS_FROM_BYTES", least)
                calls = [
                    partial(t.run, call, np.arange(count, dtype=np.float32) / 7 + t.rank)
                    for t in trainers
                ]
                results |= {np.array(result).tobytes() for result in await together(*calls)}
            with faults.skip(native, "library_for"):
                results |= {np.array(x).tobytes() for x in await together(*calls)}
            assert len(results) == 1
    assert len(folds) == 12
    assert all(folds)


async def test_machines_send_as_many_bytes_as_one_rank_each(clock: MockClock) -> None:
    count, sent = 1_000_000, list[list[int]]()
    for counts in [(1, 1), (2, 2), (3, 1)]:
        async with village(clock, 2) as here:
            trainers = await job_of(here, *counts)
            await sums_of(trainers, count)
            sent.append([machine.agent.jobs.traffic[0] for machine in here.machines])
    for some in sent[1:]:
        assert np.all(np.array(some) <= 1.02 * np.array(sent[0])), sent
    assert min(sent[0]) >= 4 * count


@pytest.mark.parametrize("count", [9, 100_000])
@pytest.mark.parametrize("dies", KILLED)
async def test_who_dies_while_its_machine_is_at_the_network_leaves_the_others_one_result(
    clock: MockClock, faults: Faults, dies: str, count: int
) -> None:
    """V3, O3: what the first rank reads lies in the memory of the second."""
    at_network = hold_at_network(faults)
    async with village(clock, 2) as here:
        trainers = await job_of(here, 3, 2)
        mine = [t for t in trainers if machine_of(here, t) is here.machines[0]]
        assert len(mine) == 3
        lost = (
            mine
            if dies == "the agent"
            else [mine[["the first", "the second", "the third"].index(dies)]]
        )
        left = [trainer for trainer in trainers if trainer not in lost]

        async def lose() -> None:
            await until(lambda: len(at_network) == 2)
            if dies == "the agent":
                await here.machines[0].kill()
            else:
                await lost[0].die()

        results = list[bytes]()

        async def survive(trainer: TrainerClient) -> None:
            results.append((await trainer.reduce(ones(count))).tobytes())

        calls = [partial(swallow, trainer.reduce(ones(count))) for trainer in lost]
        await together(lose, *calls, *[partial(survive, trainer) for trainer in left])
        assert set(results) == {np.full(count, len(left), np.float32).tobytes()}
        assert len(results) == len(left)


@pytest.mark.parametrize("seed", range(12))
async def test_whoever_is_killed_at_any_moment_leaves_the_others_the_same_results(
    clock: MockClock, faults: Faults, seed: int
) -> None:
    """O2, O3: of each op, all have the sum with the lost ranks, or all have it without."""
    random = Random(seed)  # noqa: S311 - no secret
    if seed % 2:  # values are folded as the plan comes to them, as those of large ops
        faults.limit(executor, "FOLDS_BY_PARTS_FROM_BYTES", 0)
    counts = random.choice([(2, 2), (3, 1), (4, 1), (1, 2, 2), (2, 1, 3)])
    count, moments = random.choice([9, 70_000]), random.randrange(random.choice([60, 1500]))
    async with village(clock, len(counts)) as here:
        trainers = await job_of(here, *counts)
        at = [machine_of(here, trainer) for trainer in trainers]
        victim, alone = random.randrange(len(trainers)), random.random() < 0.75
        lost = [
            trainer
            for i, trainer in enumerate(trainers)
            if i == victim or (not alone and at[i] is at[victim])
        ]
        left = [trainer for trainer in trainers if trainer not in lost]
        results: dict[TrainerClient, list[bytes]] = {trainer: [] for trainer in trainers}

        async def train(trainer: TrainerClient) -> None:
            own = np.full(count, 2.0 ** trainers.index(trainer), np.float32)
            for _ in range(4):
                results[trainer].append((await trainer.reduce(own)).tobytes())

        async def lose() -> None:
            for _ in range(moments):
                await trio.lowlevel.checkpoint()
            await (trainers[victim].die() if alone else at[victim].kill())

        calls = [partial(swallow, train(trainer)) for trainer in lost]
        await together(lose, *calls, *[partial(train, trainer) for trainer in left])
        sums = [
            np.full(count, sum(2.0 ** trainers.index(t) for t in some), np.float32).tobytes()
            for some in (trainers, left)
        ]
        for op, result in enumerate(results[left[0]]):
            assert result in sums
            assert {of[op] for of in results.values() if len(of) > op} == {result}


async def test_calls_that_differ_are_noticed_at_one_machine_and_between_two(
    clock: MockClock,
) -> None:
    """O8."""
    for odd in range(4):
        async with village(clock, 2) as here:
            trainers = await job_of(here, 2, 2)
            calls = [
                partial(t.verdict_of, t.reduce(ones(9 + (i == odd))))
                for i, t in enumerate(trainers)
            ]
            assert {verdict.error for verdict in await together(*calls)} == {"OpMismatch"}


async def test_who_is_cancelled_waits_until_the_first_rank_has_left_its_memory() -> None:
    """V3: and nobody has the result then, but all wait for the view."""
    meetings, results = Meetings(), [result_of(36), result_of(36)]
    reads, leaves, ended = trio.Event(), trio.Event(), list[str]()

    async def run(source: memoryview, fold: SourceFold | None) -> None:
        assert fold is not None
        await fold.finish()
        assert np.frombuffer(source[:36], np.float32).tolist() == [3.0] * 9
        reads.set()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):  # as threads take their time
                await leaves.wait()
            ended.append("reading")

    async def take_part(place: int) -> None:
        with scopes[place]:
            try:
                part = part_of(1 + place, results[place])
                await meetings.relay(ATTEMPT, place, 2, part, run=run, traffic=lambda: 7)
            finally:
                ended.append(f"rank {place}")

    scopes = [trio.CancelScope(), trio.CancelScope()]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_part, 1)
        nursery.start_soon(take_part, 0)
        await reads.wait()
        assert meetings.taken(ATTEMPT) > 7
        scopes[1].cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not ended
        leaves.set()
        await trio.testing.wait_all_tasks_blocked()
        assert ended == ["reading", "rank 1"]
        scopes[0].cancel()
    assert ended == ["reading", "rank 1", "rank 0"]


async def test_a_view_that_comes_as_the_last_rank_does_stops_the_first_before_it_plans(
    faults: Faults,
) -> None:
    """V3: the plan would have places in the next roster, and lanes by the places in this one."""
    meetings, attempts = Meetings(), [trio.CancelScope(), trio.CancelScope()]

    async def run(_: memoryview, __: SourceFold | None) -> None:
        raise AssertionError("it must not plan")

    async def take_part(place: int) -> None:
        with attempts[place]:
            part = part_of(1, result_of(36))
            await meetings.relay(ATTEMPT, place, 2, part, run=run, traffic=lambda: 0)

    def wake_and_end(wake: Real, meeting: _Relay) -> None:
        wake(meeting)
        for attempt in attempts:
            attempt.cancel()  # the first rank's task has not run since

    faults.around(_Relay, "wake", wake_and_end)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_part, 0)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(take_part, 1)
    assert all(attempt.cancelled_caught for attempt in attempts)


async def test_ranks_that_differ_in_what_they_get_fail_only_their_job() -> None:
    """A trainer has lied."""
    meetings, parts = Meetings(), [part_of(1, result_of(36)), part_of(1, result_of(32))]

    async def run(_: memoryview, __: SourceFold | None) -> None:
        raise AssertionError("it has not been folded")

    async with trio.open_nursery() as nursery:
        first = partial(meetings.relay, ATTEMPT, 0, 2, parts[0], run=run, traffic=lambda: 0)
        nursery.start_soon(first)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(LaneBroken, match="differ in what they get"):
            await meetings.relay(ATTEMPT, 1, 2, parts[1], run=run, traffic=lambda: 0)
        nursery.cancel_scope.cancel()
