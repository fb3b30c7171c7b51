"""What the native library has answered is counted, kept and lent as if Python had done it."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent.jobs.ranks import LocalRank
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.core.wire.session import DropArena
from pmesh.core.wire.trainer import GroupOf
from pmesh.ids import JobName
from pmesh.native.layout import LOGGED_OPS
from pmesh.net.sessions.arena_pools import IDLE_S, MAX_LENT
from tests.agent.jobs.repeating import (
    APART,
    COUNT,
    OpsInPython,
    everywhere,
    reduces,
    repeat,
    repeating,
    time_passes,
)
from tests.worlds.lanes import native_threads
from tests.worlds.trainer import TrainerClient, together, until
from tests.worlds.village import Machine, village
from tests.worlds.village_ops import machine_of, ones, ranks_of, reduce_all, snapshot_of

LARGE = Call("all_reduce", "float32", (20_000,), "sum")


def ops_in_trace(machine: Machine) -> list[list[int]]:
    """Of each rank."""
    ranks = machine.agent.jobs.times
    return [[op.op for _, op in times.after(0, since_us=-(2**62))] for times in ranks]


# --- what is noted


async def test_every_op_is_in_the_trace_and_in_the_durations(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2) as (here, trainers):
        for _ in range(20):
            await reduce_all(trainers, ones(COUNT))
        for machine in here.machines:
            ranks = len(ranks_of(here)) // len(here.machines)
            assert ops_in_trace(machine) == [list(range(20 + in_python.before))] * ranks
            (durations,) = snapshot_of(machine).op_durations
            assert durations.kind == "all_reduce"
            assert sum(durations.counts) == (20 + in_python.before) * ranks
            assert durations.total_s >= 0
        assert in_python == []


async def test_an_op_takes_as_long_in_the_trace_as_it_took(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2) as (here, trainers):
        began = trio.current_time()
        await reduce_all(trainers, ones(COUNT))
        for machine in here.machines:
            *_, times = machine.agent.jobs.times
            *_, (_, op) = times.after(0, since_us=-(2**62))
            assert (op.op, op.kind) == (in_python.before, "all_reduce")
            assert (op.nbytes, op.completed) == (4 * COUNT, True)
            assert 0 < op.took_us < 1e6
            assert -1e6 < op.began_us - 1e6 * began < 1e6


async def test_heartbeats_tell_how_far_a_rank_has_come_and_what_is_stable(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2) as (here, trainers):
        for _ in range(20):
            await reduce_all(trainers, ones(COUNT))
        with time_passes(clock):
            await trio.sleep(1.0)
        for machine in here.machines:
            (job,) = snapshot_of(machine).jobs
            last = 19 + in_python.before
            assert {(rank.started, rank.completed) for rank in job.ranks} == {(last, last)}
            assert job.stable == last


async def test_only_what_others_may_ask_for_is_retained(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2) as (here, trainers):
        before = [rank.arenas.outputs.nbytes for rank in ranks_of(here)]
        for _ in range(20):
            await reduce_all(trainers, ones(COUNT))
            for rank in ranks_of(here):
                rank.catch_up()
                assert list(rank.results) == [rank.ledger.ended]
                assert rank.ledger.stable == rank.ledger.ended - 1
        for rank in ranks_of(here):
            rank.recall()
            (result,) = rank.results.values()
            assert np.frombuffer(result.memory, np.float32).tolist() == [2.0] * COUNT
        assert [rank.arenas.outputs.nbytes for rank in ranks_of(here)] == before


async def test_more_ops_than_can_be_logged_are_all_noted(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2, TrainerClient.barrier) as (here, trainers):

        async def calls_many(trainer: TrainerClient) -> None:
            for _ in range(LOGGED_OPS + 10):
                await trainer.barrier()

        await everywhere(trainers, calls_many)
        assert set(in_python) == {LOGGED_OPS + in_python.before}
        for machine in here.machines:
            for ops in ops_in_trace(machine):
                assert ops == list(range(LOGGED_OPS + 10 + in_python.before))


@APART
async def test_with_three_ranks_costs_are_made_when_they_are_due(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 3) as (here, trainers):
        tables = list[object]()
        for _ in range(60):
            assert [r[0] for r in await reduce_all(trainers, ones(COUNT))] == [3.0] * 3
            (edges,) = {id(rank.costs.edges) for rank in ranks_of(here)[:1]}
            tables += [edges] * (edges not in tables)
        counts = Counter(in_python)
        assert {op for op, ranks in counts.items() if ranks == 3} >= {8, 32}
        assert not set(counts) & {*range(12, 32), *range(36, 63)}


# --- what the trainer keeps


async def borrows(trainer: TrainerClient, value: float = 1.0) -> Values:
    result = await trainer.run(LARGE, np.full(20_000, value, np.float32), borrows=True)
    assert result is not None
    return result


def kept(trainer: TrainerClient, number: int) -> Values:
    """What lies in an arena now."""
    return np.frombuffer(trainer.maps[number], np.float32, 20_000).copy()


async def drops_all(trainer: TrainerClient) -> None:
    for number in trainer.lent:
        await trainer.send(DropArena(number))
    trainer.lent.clear()


async def test_results_that_a_trainer_keeps_stay_as_they_are(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2, borrows) as (_, trainers):
        await everywhere(trainers, drops_all)
        await wait_all_tasks_blocked(0.005)  # the library serves again
        for value in range(2):
            await everywhere(trainers, partial(borrows, value=value))
        assert in_python == []
        for value in range(2, 30):
            await everywhere(trainers, partial(borrows, value=value))
        for trainer in trainers:
            assert len(set(trainer.lent)) == len(trainer.lent) <= MAX_LENT
            assert [kept(trainer, n)[0] for n in trainer.lent[:2]] == [0.0, 2.0]
            values = [kept(trainer, n)[0] for n in trainer.lent]
            assert values == sorted(values)
        in_python.clear()
        for value in range(30, 40):  # it is lent no more, so the library can go on
            await everywhere(trainers, partial(borrows, value=value))
        assert in_python == []


async def test_results_that_are_dropped_are_lent_again_and_again(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2, borrows) as (_, trainers):
        await everywhere(trainers, drops_all)
        await wait_all_tasks_blocked(0.005)  # the library serves again
        seen = set[int]()
        for value in range(30):
            await everywhere(trainers, partial(borrows, value=value))
            for trainer in trainers:
                (number,) = trainer.lent
                assert (kept(trainer, number) == 2 * value).all()
                seen.add(number)
            await everywhere(trainers, drops_all)
        assert in_python == []
        assert len(seen) <= 10


async def test_what_is_lent_when_the_library_is_recalled_stays_lent(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2, borrows) as (here, trainers):
        await everywhere(trainers, drops_all)
        await everywhere(trainers, partial(borrows, value=7))
        for rank in ranks_of(here):
            rank.recall()
        for value in range(5):
            await reduce_all(trainers, np.full(20_000, value, np.float32))
        for trainer in trainers:
            (number,) = trainer.lent
            assert (kept(trainer, number) == 14).all()
        await everywhere(trainers, drops_all)
        await everywhere(trainers, borrows)


async def test_what_is_dropped_while_the_library_answers_is_free_for_python_too(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2, borrows) as (here, trainers):
        for _ in range(10):
            for _ in range(2):
                for rank in ranks_of(here):
                    rank.recall()
                await everywhere(trainers, borrows)
                await wait_all_tasks_blocked(0.005)  # the library serves again
                await everywhere(trainers, borrows)
            assert [len(set(t.lent)) for t in trainers] == [len(t.lent) for t in trainers]
            for trainer in trainers:
                trainer.lent.reverse()  # what the library has lent first
            await everywhere(trainers, drops_all)
            await wait_all_tasks_blocked(0.005)
        assert len(in_python) == 40


async def test_an_arena_that_is_dropped_twice_ends_the_session(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2, borrows) as (_, trainers):
        await everywhere(trainers, drops_all)
        await everywhere(trainers, borrows)
        (number,) = trainers[0].lent
        for _ in range(2):
            await trainers[0].send(DropArena(number))
        with pytest.raises(trio.EndOfChannel):
            await trainers[0].receive()


# --- groups that rest


async def test_a_group_whose_calls_are_repeated_rests_and_wakes(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with village(clock, 2) as here:
        trainers = await here.job(*here.machines)
        ids = tuple(trainer.id for trainer in trainers)
        group = [await here.trainer(machine_of(here, trainer)) for trainer in trainers]

        async def join(trainer: TrainerClient, of: TrainerClient) -> None:
            await trainer.join("digits/1", 2, group_of=GroupOf(JobName("digits"), ids, of.id))

        await together(*[partial(join, *pair) for pair in zip(group, trainers, strict=True)])
        ranks: list[LocalRank] = [r for r in ranks_of(here) if r.roster.job == "digits/1"]
        for _ in range(2):
            await repeat(clock, group, reduces)
            in_python.clear()
            for _ in range(3):
                await reduce_all(group, ones(COUNT))
            assert in_python == []
            threads = native_threads()
            with time_passes(clock):
                await trio.sleep(IDLE_S + 2.0)
            assert native_threads() == threads - 2
            assert not any(rank.lanes.all_open() for rank in ranks)
            assert not any(r.arenas.inputs.nbytes + r.arenas.outputs.nbytes for r in ranks)
            for trainer in group:
                await trainer.drop_input()  # it is gone


# --- threads


async def test_no_thread_stays_when_trainers_leave(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        for _ in range(2):
            trainers = await here.job(*here.machines)
            await repeat(clock, trainers, reduces)
            await reduce_all(trainers, ones(COUNT))
            threads = native_threads()
            with time_passes(clock):
                await everywhere(trainers, TrainerClient.leave)
                await until(lambda: not ranks_of(here))
            clock.autojump_threshold = 0
            assert native_threads() == threads - 2
