"""Calls that trainers repeat: the native library answers them, and no result tells."""

from collections.abc import Awaitable
from functools import partial

import numpy as np
import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent.jobs import repeats
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import OpDone, StartOp
from pmesh.ids import OpNumber
from pmesh.native.layout import MOST_CALLS
from tests.agent.jobs.repeating import (
    COUNT,
    SUM,
    AnyCall,
    OpsInPython,
    everywhere,
    reduces,
    repeat,
    repeating,
    time_passes,
)
from tests.worlds.faults import Faults
from tests.worlds.system import without_library
from tests.worlds.trainer import TrainerClient
from tests.worlds.village import village
from tests.worlds.village_ops import RAISE, ones, reduce_all, run, send_garbage

Which = tuple[str, str, str]
BY_DTYPE = [("sum", dtype) for dtype in ("float32", "float64", "int8", "uint64", "complex64")]
BY_REDUCTION = [(reduction, "float32") for reduction in ("mean", "max", "min", "prod")]
PARTS = {2: (10, 20), 3: (5, 10, 15)}


# --- which calls


@pytest.mark.parametrize("ranks", [2, 3])
async def test_a_call_that_is_repeated_needs_no_interpreter(
    clock: MockClock, in_python: OpsInPython, ranks: int
) -> None:
    async with repeating(clock, in_python, ranks) as (_, trainers):
        for value in range(5):
            for result in await reduce_all(trainers, value * ones(COUNT)):
                assert result.tolist() == [ranks * value] * COUNT
        assert in_python == []


def numbers(rank: int, count: int, dtype: str) -> Values:
    return (np.arange(count) % 5 + rank + 1).astype(dtype)


def called(trainer: TrainerClient, which: Which) -> Awaitable[Values]:
    """One op of a kind, with other values at each rank."""
    kind, reduction, dtype = which
    ranks, rank = len(trainer.names), trainer.rank
    parts = PARTS[ranks]
    match kind:
        case "all_gather":
            call = Call(kind, dtype, ())
            return run(trainer, call, numbers(rank, parts[rank], dtype), parts)
        case "reduce_scatter":
            call = Call(kind, dtype, (COUNT,), reduction)
            return run(trainer, call, numbers(rank, COUNT, dtype), parts)
        case _:
            call = Call(kind, dtype, (COUNT,), reduction)
            return run(trainer, call, numbers(rank, COUNT, dtype))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("kind", "each"),
    [
        ("all_reduce", BY_DTYPE),
        ("all_reduce", BY_REDUCTION),
        ("reduce_scatter", BY_DTYPE),
        ("reduce_scatter", BY_REDUCTION),
        ("all_gather", BY_DTYPE),
    ],
)
async def test_it_gives_what_the_interpreter_gives(
    clock: MockClock, in_python: OpsInPython, kind: str, each: list[tuple[str, str]], ranks: int
) -> None:
    wanted: dict[tuple[int, str, str], bytes] = {}

    async def call_all(trainer: TrainerClient) -> None:
        for reduction, dtype in each:
            found = await called(trainer, (kind, reduction, dtype))
            known = wanted.setdefault((trainer.id, reduction, dtype), found.tobytes())
            assert found.tobytes() == known

    async with repeating(clock, in_python, ranks, call_all) as (_, trainers):
        await everywhere(trainers, call_all)  # three ranks have made the table of costs before
        in_python.clear()
        await everywhere(trainers, call_all)
        assert in_python == []


@pytest.mark.parametrize("ranks", [2, 3])
async def test_barriers_are_repeated(clock: MockClock, in_python: OpsInPython, ranks: int) -> None:
    async with repeating(clock, in_python, ranks, TrainerClient.barrier) as (_, trainers):
        for _ in range(4):
            await everywhere(trainers, TrainerClient.barrier)
        assert in_python == []


async def test_values_may_lie_elsewhere_each_time(clock: MockClock, in_python: OpsInPython) -> None:
    async def reduces_at(trainer: TrainerClient, offset: int = 4) -> Values:
        values = numbers(trainer.rank + offset, COUNT, "float32")
        result = await trainer.run(SUM, values, offset=offset)
        assert result is not None
        assert np.array_equal(
            result, numbers(offset, COUNT, "float32") + numbers(1 + offset, COUNT, "float32")
        )
        return result

    async with repeating(clock, in_python, 2, reduces_at) as (_, trainers):
        for offset in (8, 256, 4, 65_536 - 4 * COUNT):
            await everywhere(trainers, partial(reduces_at, offset=offset))
        assert in_python == []


@pytest.mark.parametrize("offset", [2, 65_536 - 4 * COUNT + 4, 2**40])
async def test_values_that_can_not_lie_there_end_the_session(
    clock: MockClock, in_python: OpsInPython, offset: int
) -> None:
    async def reduces_at(trainer: TrainerClient) -> None:
        await trainer.run(SUM, ones(COUNT), offset=8)

    async with repeating(clock, in_python, 2, reduces_at, terms=RAISE) as (_, (a, b)):
        with time_passes(clock):
            arena = await b.input_arena(4 * COUNT)
            op = OpNumber(b.next_op)
            request = StartOp(op, SUM, "float32", COUNT, arena, 1800.0, offset=offset)
            await send_garbage(request, b, other=a)


@pytest.mark.parametrize("behind", [-1, 1, 2**40])
async def test_an_op_with_another_number_ends_the_session(
    clock: MockClock, in_python: OpsInPython, behind: int
) -> None:
    async with repeating(clock, in_python, 2, terms=RAISE) as (_, (a, b)):
        await reduce_all([a, b], ones(COUNT))
        with time_passes(clock):
            arena = await b.input_arena(4 * COUNT)
            op = OpNumber(b.next_op + behind)
            await send_garbage(StartOp(op, SUM, "float32", COUNT, arena, 1800.0), b, other=a)


async def test_a_call_of_values_that_were_dropped_ends_the_session(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2, terms=RAISE) as (_, (a, b)):
        await reduce_all([a, b], ones(COUNT))
        arena = await b.input_arena(4 * COUNT)
        await b.drop_input()
        await wait_all_tasks_blocked(0.005)  # the library might serve again
        with time_passes(clock):
            request = StartOp(OpNumber(b.next_op), SUM, "float32", COUNT, arena, 1800.0)
            await send_garbage(request, b, other=a)


# --- what is never repeated


async def broadcasts(trainer: TrainerClient) -> None:
    await trainer.broadcast(ones(COUNT))


async def gathers(trainer: TrainerClient) -> None:
    await run(trainer, Call("gather", "float32", (), root=0), ones(10), (10, 10))


async def reduces_to_one(trainer: TrainerClient) -> None:
    await run(trainer, Call("reduce", "float32", (COUNT,), "sum", root=0), ones(COUNT))


async def syncs(trainer: TrainerClient) -> None:
    await trainer.sync(1)


async def multiplies_complex(trainer: TrainerClient) -> None:
    await trainer.reduce(np.ones(9, np.complex64), "prod")


async def is_in_a_hurry(trainer: TrainerClient) -> None:
    await trainer.reduce(ones(COUNT), timeout_s=repeats.LEAST_TIMEOUT_S / 2)


async def reduces_compressed(trainer: TrainerClient) -> None:
    call = Call("all_reduce", "float32", (COUNT,), "sum", compression="int8")
    await trainer.run(call, ones(COUNT))


async def follows(trainer: TrainerClient) -> None:
    arena = await trainer.input_arena(4 * COUNT)
    op = OpNumber(trainer.next_op)
    request = StartOp(op, SUM, "float32", COUNT, arena, 1800.0, follows=True)
    reply = await trainer.ask(request)
    assert isinstance(reply, OpDone)
    trainer.has_ended(reply, op)


@pytest.mark.parametrize(
    "make",
    [
        broadcasts,
        gathers,
        reduces_to_one,
        syncs,
        multiplies_complex,
        is_in_a_hurry,
        reduces_compressed,
        follows,
    ],
)
async def test_other_calls_are_never_repeated(
    clock: MockClock, in_python: OpsInPython, make: AnyCall
) -> None:
    async with repeating(clock, in_python, 2, make) as (_, trainers):
        for _ in range(4):
            await everywhere(trainers, make)
        assert len(in_python) == 8


async def test_a_rank_alone_repeats_nothing(clock: MockClock, in_python: OpsInPython) -> None:
    async with village(clock, 1) as here:
        trainers = await here.job(here.machines[0])
        await repeat(clock, trainers, reduces)
        in_python.clear()
        for _ in range(4):
            await reduce_all(trainers, ones(COUNT))
        assert len(in_python) == 4


async def test_without_the_library_nothing_is_repeated(
    clock: MockClock, in_python: OpsInPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_library(monkeypatch):
        async with repeating(clock, in_python, 2) as (_, trainers):
            for _ in range(4):
                assert [r[0] for r in await reduce_all(trainers, ones(COUNT))] == [2.0] * 2
            assert len(in_python) == 8


# --- several calls


@pytest.mark.parametrize("kinds", [2, MOST_CALLS])
async def test_several_calls_are_repeated_in_any_order(
    clock: MockClock, in_python: OpsInPython, kinds: int
) -> None:
    async def reduces_each(trainer: TrainerClient) -> None:
        for count in range(1, kinds + 1):
            assert (await trainer.reduce(ones(100 * count))).tolist() == [2.0] * 100 * count

    async with repeating(clock, in_python, 2, reduces_each) as (_, trainers):
        await everywhere(trainers, reduces_each)
        for count in (kinds, 1, kinds, 2, 2):
            results = await reduce_all(trainers, count * ones(100 * count))
            assert [r.tolist() for r in results] == [[2.0 * count] * 100 * count] * 2
        assert in_python == []


async def reduces_each(trainer: TrainerClient) -> None:
    """Two calls more than the library can have."""
    for count in range(MOST_CALLS + 2, 0, -1):
        assert (await trainer.reduce(ones(100 * count))).tolist() == [2.0] * 100 * count


async def test_more_calls_than_it_can_have_do_not_push_each_other_out(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2, reduces_each) as (_, trainers):
        for _ in range(3):
            await everywhere(trainers, reduces_each)
            # At one agent, one call may be kept by some ranks, and another by others.
            assert len(in_python) <= 2 * (4 if in_python.together else 2)
            in_python.clear()


async def test_calls_that_are_made_no_more_make_room(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    faults.limit(repeats, "IN_USE_OPS", 10)
    async with repeating(clock, in_python, 2, reduces_each) as (_, trainers):
        for _ in range(3):
            await reduce_all(trainers, ones(100))
        in_python.clear()
        for _ in range(20):
            await reduce_all(trainers, ones(100))
        assert in_python == []


async def test_a_step_is_known_though_the_library_answers(
    clock: MockClock, in_python: OpsInPython
) -> None:
    share = 50

    async def steps(trainer: TrainerClient) -> None:
        step = 1 + trainer.next_op
        asked = await trainer.run(SUM, ones(COUNT), step=step, share_percent=share)
        assert asked is not None

    async with repeating(clock, in_python, 2, steps) as (here, trainers):
        share = 60
        for _ in range(2):  # then the agents know this call, too
            await everywhere(trainers, steps)
        for share in (50, 60, 50):
            in_python.clear()
            for _ in range(100):
                await everywhere(trainers, steps)
            assert in_python == []
            marks = [mark for m in here.machines for mark in m.agent.jobs.facts().progress]
            shown = [(mark.step, mark.share_percent) for mark in marks]
            assert shown == [(trainers[0].next_op, share)] * 2


async def test_of_many_different_calls_the_oldest_are_forgotten(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    faults.limit(repeats, "_MOST_SEEN", 3)
    async with repeating(clock, in_python, 2) as (_, trainers):
        for count in (1, 2, 3, 4, 1, 1):
            await reduce_all(trainers, ones(count))
        assert len(in_python) == 12
        await reduce_all(trainers, ones(1))
        in_python.clear()
        await reduce_all(trainers, ones(1))
        assert in_python == []


async def test_a_larger_result_takes_larger_memory(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2) as (_, trainers):
        large = np.arange(100_000, dtype=np.float32)
        for _ in range(5):  # the calls before are learnt anew
            await reduce_all(trainers, large)
            await reduce_all(trainers, ones(COUNT))
        in_python.clear()
        for _ in range(4):
            assert [r.tolist() for r in await reduce_all(trainers, ones(COUNT))] == [
                [2.0] * COUNT
            ] * 2
            assert np.array_equal((await reduce_all(trainers, large))[1], 2 * large)
        assert in_python == []
