"""Results that ranks of one agent share when they meet in the native library."""

import os
from functools import partial

import numpy as np
import psutil
import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent.jobs import repeats
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.core.wire.session import DropArena
from pmesh.ids import OpNumber
from pmesh.net.sessions import arena_pools
from pmesh.net.sessions.arena_pools import OutputArenas
from pmesh.net.sessions.arenas import Arena
from tests.agent.jobs.repeating import (
    COUNT,
    SUM,
    OpsInPython,
    everywhere,
    reduces,
    repeat,
    repeating,
)
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import TrainerClient
from tests.worlds.village import village
from tests.worlds.village_ops import ones, ranks_of, reduce_all, run

pytestmark = pytest.mark.parametrize("in_python", ["together"], indirect=True)


async def borrows(trainer: TrainerClient, value: float = 1.0) -> Values:
    result = await trainer.run(SUM, np.full(COUNT, value, np.float32), borrows=True)
    assert result is not None
    return result


async def drops(trainer: TrainerClient) -> None:
    """Drop what stays, and let the agent read that before the next call comes."""
    for number in trainer.lent:
        await trainer.send(DropArena(number))
    trainer.lent.clear()
    await wait_all_tasks_blocked(0.005)


def kept(trainer: TrainerClient, number: int) -> Values:
    """What lies in an arena now."""
    return np.frombuffer(trainer.maps[number], np.float32, COUNT).copy()


@pytest.mark.parametrize("who", [0, 1])
async def test_what_is_lent_stays_though_its_calls_are_learnt_anew(
    clock: MockClock, in_python: OpsInPython, who: int
) -> None:
    async with repeating(clock, in_python, 2, borrows) as (_, trainers):
        await everywhere(trainers, borrows)
        await everywhere(trainers, drops)
        in_python.clear()
        await everywhere(trainers, partial(borrows, value=7))
        assert in_python == []
        (number,) = trainers[who].lent
        trainers[who].lent.clear()  # it keeps that one
        await drops(trainers[1 - who])
        await trainers[who].drop_input()
        for _ in range(12):
            await everywhere(trainers, borrows)
            assert kept(trainers[who], number).tolist() == [14.0] * COUNT
            await everywhere(trainers, drops)
        assert len(in_python) < 24


async def test_without_memory_for_enough_results_python_goes_on(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    memory = psutil.virtual_memory()._replace(total=40 * 2**20)  # 10 MiB for one program
    faults.instead(psutil, "virtual_memory", lambda: memory)
    large = np.ones(2**18, np.float32)
    async with repeating(clock, in_python, 2) as (_, trainers):
        for _ in range(5):
            assert [r[0] for r in await reduce_all(trainers, large)] == [2.0] * 2
        assert len(in_python) == 10


async def reduces_nothing(trainer: TrainerClient) -> None:
    await trainer.run(Call("all_reduce", "float32", (0,), "sum"), None)


async def test_no_values_are_reduced_without_the_interpreter(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2, reduces_nothing) as (_, trainers):
        await everywhere(trainers, reduces_nothing)
        in_python.clear()
        for _ in range(5):
            await everywhere(trainers, reduces_nothing)
        assert in_python == []


@pytest.mark.parametrize("who", [0, 1])
async def test_some_ranks_may_keep_their_results_and_others_not(
    clock: MockClock, in_python: OpsInPython, who: int
) -> None:
    async def calls(trainer: TrainerClient) -> None:
        await (borrows if trainer.rank == who else reduces)(trainer)
        await drops(trainer)

    async with repeating(clock, in_python, 2, calls) as (_, trainers):
        await everywhere(trainers, calls)
        in_python.clear()
        for _ in range(5):
            await everywhere(trainers, calls)
        assert in_python == []


async def reduces_much(trainer: TrainerClient) -> None:
    await trainer.reduce(ones(2**17))


async def test_memory_that_other_ops_have_left_is_there_for_results_that_are_shared(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    faults.limit(arena_pools, "MAX_ARENAS", 12)

    async def calls_once_each(trainer: TrainerClient) -> None:
        for count in range(1, 7):
            await trainer.reduce(ones(count * 2**14))

    async with village(clock, 1) as here:
        trainers = await here.job(*here.machines * 2)
        await everywhere(trainers, calls_once_each)
        await repeat(clock, trainers, reduces_much)
        for _ in range(2):
            await everywhere(trainers, reduces_much)
        in_python.clear()
        for _ in range(5):
            await everywhere(trainers, reduces_much)
        assert in_python == []


@pytest.mark.parametrize(("kind", "moves"), [("all_gather", 2), ("reduce_scatter", 3)])
async def test_all_ranks_meet_though_their_parts_differ(
    clock: MockClock, in_python: OpsInPython, faults: Faults, kind: str, moves: int
) -> None:
    """Whether an op moves too many bytes is the same for all of them."""
    parts = 10, 20

    async def calls(trainer: TrainerClient) -> None:
        count = parts[trainer.rank] if kind == "all_gather" else COUNT
        await run(trainer, Call(kind, "float32", (), "sum"), ones(count), parts)

    for most in ("MOST_BYTES_HERE", "FEW_BYTES_HERE"):
        faults.limit(repeats, most, moves * 4 * COUNT)
    async with repeating(clock, in_python, 2, calls) as (_, trainers):
        await everywhere(trainers, calls)
        in_python.clear()
        for _ in range(3):
            await everywhere(trainers, calls)
        assert in_python == []


async def test_without_memory_for_large_results_small_ones_are_shared(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    memory = psutil.virtual_memory()._replace(total=56 * 2**20)  # 14 MiB for one program
    faults.instead(psutil, "virtual_memory", lambda: memory)
    large = np.ones(2**18, np.float32)

    async def calls(trainer: TrainerClient) -> None:
        await trainer.reduce(large)
        await borrows(trainer)
        await drops(trainer)

    async with repeating(clock, in_python, 2, calls) as (_, trainers):
        for _ in range(5):
            await everywhere(trainers, calls)
        in_python.clear()
        for _ in range(5):
            await everywhere(trainers, calls)
        assert len(in_python) == 10  # the large ones


async def test_a_rank_that_has_no_room_for_large_results_shares_small_ones(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    large = np.ones(2**18, np.float32)
    asked = list[Arena]()

    def adopt(real: Real, outputs: OutputArenas, other: Arena) -> object:
        if other.nbytes < large.nbytes:
            return real(outputs, other)
        asked.append(other)
        return None

    async def calls(trainer: TrainerClient) -> None:
        await trainer.reduce(large)
        await trainer.reduce(ones(COUNT))

    faults.around(OutputArenas, "adopt", adopt)
    async with repeating(clock, in_python, 2, calls) as (_, trainers):
        for _ in range(3):
            await everywhere(trainers, calls)
        in_python.clear()
        asked.clear()
        for _ in range(5):
            await everywhere(trainers, calls)
        assert len(in_python) == 10  # the large ones
        assert len(asked) == 5  # by Python, for their results


@pytest.mark.parametrize("larger", ["all_reduce", "reduce_scatter"])
async def test_results_that_are_shared_lie_apart_from_those_that_are_not(
    clock: MockClock, in_python: OpsInPython, larger: str
) -> None:
    few, many = 2 * COUNT, 2**17
    shared, own = (many, few) if larger == "all_reduce" else (few, many)

    async def calls(trainer: TrainerClient, value: float = 1.0) -> None:
        total = await trainer.reduce(np.full(shared, value, np.float32))
        assert (total == 2 * value).all()
        values = np.full(own, value + trainer.rank, np.float32)
        call, parts = Call("reduce_scatter", "float32", (own,), "sum"), (own // 2, own // 2)
        assert (await run(trainer, call, values, parts) == 2 * value + 1).all()

    async with repeating(clock, in_python, 2, calls) as (here, trainers):
        for _ in range(3):
            await everywhere(trainers, calls)
        in_python.clear()
        for value in range(5):
            await everywhere(trainers, partial(calls, value=value))
            for rank in ranks_of(here):
                rank.catch_up()
                result = rank.results[OpNumber(rank.ledger.ended)].memory  # for who lacks it (O2)
                assert (np.frombuffer(result, np.float32) == 2 * value + 1).all()
        assert in_python == []


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
async def test_a_larger_result_takes_larger_memory_though_its_values_lie_where_others_have(
    clock: MockClock, in_python: OpsInPython, kind: str
) -> None:
    """So its calls are not forgotten with an input arena."""

    async def calls(trainer: TrainerClient, count: int = COUNT) -> None:
        await trainer.input_arena(2**19)
        parts = () if kind == "all_reduce" else (count // 2, count // 2)
        call = Call(kind, "float32", (count,), "sum")
        assert (await run(trainer, call, ones(count), parts) == 2.0).all()

    async with repeating(clock, in_python, 2, calls) as (_, trainers):
        for _ in range(4):
            await everywhere(trainers, partial(calls, count=2**17))
            await everywhere(trainers, calls)
        in_python.clear()
        for _ in range(3):
            await everywhere(trainers, partial(calls, count=2**17))
            await everywhere(trainers, calls)
        assert in_python == []


@pytest.mark.parametrize(
    ("cores", "most"), [(2, "MOST_BYTES_HERE"), (3, "FEW_BYTES_HERE")], ids=["few", "many"]
)
async def test_how_much_is_moved_where_ranks_meet_depends_on_the_cores(
    clock: MockClock, in_python: OpsInPython, faults: Faults, cores: int, most: str
) -> None:
    """Python uses those that the ranks leave."""
    faults.instead(os, "cpu_count", lambda: cores)
    faults.limit(repeats, most, 3 * 4 * COUNT)
    async with repeating(clock, in_python, 2) as (_, trainers):
        await everywhere(trainers, reduces)
        in_python.clear()
        await everywhere(trainers, reduces)
        assert in_python == []
        for _ in range(5):
            await reduce_all(trainers, ones(COUNT + 1))
        assert len(in_python) == 10


async def test_a_job_shares_its_results_though_another_one_gives_its_own_up(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2) as (here, trainers):
        clock.autojump_threshold = 0
        others = await here.job(*here.machines * 2, name="letters")
        for _ in range(2):
            await repeat(clock, others, reduces)
        in_python.clear()
        await trainers[0].drop_input()
        await everywhere(trainers, reduces)
        assert len(in_python) == 2
        for rank in ranks_of(here):
            rank.recall()
        await everywhere(others, reduces)
        in_python.clear()
        for _ in range(3):
            await everywhere(others, reduces)
        assert in_python == []


async def test_memory_that_was_refused_is_asked_for_again_among_other_ranks(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    is_full = True

    async def acquire(real: Real, outputs: OutputArenas, nbytes: int, *, follows: bool) -> object:
        if follows and is_full:
            raise OSError(12, "Cannot allocate memory")
        return await real(outputs, nbytes, follows=follows)

    faults.around(OutputArenas, "acquire", acquire)
    async with repeating(clock, in_python, 3) as (_, trainers):
        is_full = False
        await everywhere(trainers, reduces)
        assert len(in_python) == 3
        await trainers.pop().leave()
        for _ in range(2):
            await repeat(clock, trainers, reduces)
        in_python.clear()
        await everywhere(trainers, reduces)
        assert in_python == []
