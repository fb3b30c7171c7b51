"""Ranks of which some share an agent, and others are elsewhere, need no interpreter either."""

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent.jobs import repeats, session
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.jobs.together import Attempt, Meetings
from pmesh.core.ops.reductions import Values
from pmesh.core.values import Terms
from pmesh.core.wire.calls import Call
from pmesh.core.wire.session import WantArena
from pmesh.core.wire.trainer import StartOp
from pmesh.errors import LaneBroken
from pmesh.ids import TrainerId
from pmesh.net.lanes import native, persistent
from pmesh.net.lanes.native import KeptThreads
from tests.agent.jobs.repeating import (
    COUNT,
    SUM,
    AnyCall,
    OpsInPython,
    everywhere,
    is_repeated,
    reduces,
    repeat,
    repeating,
    time_passes,
)
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import ANY, TrainerClient, together, until
from tests.worlds.village import Village, village
from tests.worlds.village_ops import (
    RAISE,
    machine_of,
    ones,
    ranks_of,
    reduce_all,
    run,
)

BY_DTYPE = [("sum", dtype) for dtype in ("float32", "float64", "int8", "uint64", "complex64")]
BY_REDUCTION = [(reduction, "float32") for reduction in ("mean", "max", "min", "prod")]

pytestmark = pytest.mark.parametrize("in_python", ["mixed"], indirect=True)
each_rank = pytest.mark.parametrize("who", [0, 1, 2], ids=["first", "beside", "elsewhere"])


@asynccontextmanager
async def three(
    clock: MockClock, in_python: OpsInPython, make: AnyCall = reduces, *, terms: Terms = ANY
) -> AsyncGenerator[tuple[Village, list[TrainerClient]]]:
    """The first one of two that share an agent, the one beside it, and one elsewhere."""
    async with repeating(clock, in_python, 3, make, terms=terms) as (here, trainers):
        is_alone = {t.id: trainers[0].names.count(t.names[t.rank]) == 1 for t in trainers}
        yield here, sorted(trainers, key=lambda t: (is_alone[t.id], t.rank))


def numbers(rank: int, dtype: str) -> Values:
    """Whose sums, if they are not of integers, depend on the order."""
    values = (np.arange(COUNT) % 5 + rank + 1).astype(dtype)
    if values.dtype.kind in "fc":
        values /= values.dtype.type(7 + rank)
        values[rank] = np.nan
    return values


@pytest.mark.parametrize("machines", [(0, 0, 1), (0, 1, 0, 1), (0, 0, 0, 1, 2)])
async def test_reductions_and_barriers_are_repeated(
    clock: MockClock, in_python: OpsInPython, machines: tuple[int, ...], faults: Faults
) -> None:
    """They give what Python gives."""
    faults.limit(repeats, "TRUST_S", 60.0)  # of a busy machine's time, in which no agent looks
    wanted: dict[tuple[str, str], bytes] = {}

    async def calls_all(trainer: TrainerClient) -> None:
        await trainer.barrier()
        for reduction, dtype in [*BY_DTYPE, *BY_REDUCTION]:
            values = numbers(trainer.rank, dtype)
            found = await run(trainer, Call("all_reduce", dtype, (COUNT,), reduction), values)
            known = wanted.setdefault((reduction, dtype), found.tobytes())
            assert found.tobytes() == known

    async with village(clock, 1 + max(machines)) as here:
        trainers = await here.job(*[here.machines[place] for place in machines])
        await repeat(clock, trainers, calls_all, count=6)  # with the costs that are made in op 32
        in_python.clear()
        for _ in range(3):
            await everywhere(trainers, calls_all)
        assert in_python == []


@pytest.mark.parametrize("lends", [False, True])
async def test_values_may_lie_elsewhere_each_time_and_results_be_kept(
    clock: MockClock, in_python: OpsInPython, *, lends: bool
) -> None:
    offset, value = 0, 1

    async def reduces_there(trainer: TrainerClient) -> Values:
        values = np.full(COUNT, value * (1 + trainer.rank), np.float32)
        found = await trainer.run(SUM, values, offset=offset, borrows=lends)
        assert found is not None
        return found

    async with three(clock, in_python, reduces_there) as (_, trainers):
        offset = 4 * COUNT
        await repeat(clock, trainers, reduces_there, count=in_python.before)
        in_python.clear()
        for value in range(1, 4):
            offset = 4 * value
            for found in await together(*[partial(reduces_there, t) for t in trainers]):
                assert found.tolist() == [6.0 * value] * COUNT
        assert lends or in_python == []


async def test_large_values_are_left_to_python(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    """It folds them as they are sent, and the ranks of one agent share the result."""
    faults.limit(repeats, "SHARED_BYTES", 4 * COUNT)
    async with three(clock, in_python) as (_, trainers):
        for result in await reduce_all(trainers, ones(COUNT)):
            assert result.tolist() == [3.0] * COUNT
        assert len(in_python) == 2  # of the two that share an agent


@each_rank
@pytest.mark.parametrize("waits_for", ["reduces", "barrier"])
async def test_a_rank_that_comes_late_is_waited_for(
    clock: MockClock, in_python: OpsInPython, who: int, waits_for: str
) -> None:
    call = reduces if waits_for == "reduces" else TrainerClient.barrier
    async with three(clock, in_python, call) as (_, trainers):
        op = trainers[0].next_op

        async def late(trainer: TrainerClient) -> None:
            await wait_all_tasks_blocked(0.005)
            with time_passes(clock):
                await trio.sleep(2)  # the agents recall the library
            await call(trainer)

        calls = [partial(late if i == who else call, t) for i, t in enumerate(trainers)]
        await together(*calls)
        assert set(in_python) <= {op}
        assert {trainer.next_op for trainer in trainers} == {op + 1}
        await is_repeated(clock, in_python, trainers)


@pytest.mark.parametrize("who", [0, 1], ids=["first", "beside"])
@pytest.mark.parametrize("threads", ["one thread", "two threads"])
async def test_who_waits_for_ranks_elsewhere_can_be_recalled(
    clock: MockClock, in_python: OpsInPython, faults: Faults, who: int, threads: str
) -> None:
    """V3: the event loop waits until a thread has stopped, and here the op would never end."""
    faults.limit(persistent, "MOST_WAIT_S", math.inf)
    faults.limit(repeats, "TRUST_S", 60.0)  # of a busy machine's time, in which no agent looks
    count = COUNT
    if threads == "two threads":
        faults.limit(native, "TWO_THREADS_FROM_BYTES", 1)
        count = 4321  # a plan that no other test has

    async def reduces_many(trainer: TrainerClient) -> Values:
        return await trainer.reduce(ones(count))

    async with three(clock, in_python, reduces_many) as (here, trainers):
        op, recalled = trainers[0].next_op, trainers[who].id

        async def recall_and_come() -> Values:
            await wait_all_tasks_blocked(0.005)
            (rank,) = (rank for rank in ranks_of(here) if rank.id == recalled)
            rank.recall()
            return await reduces_many(trainers[2])

        early = [partial(reduces_many, trainer) for trainer in trainers[:2]]
        for result in await together(*early, recall_and_come):
            assert result.tolist() == [3.0] * count
        assert in_python == [op, op]  # of those who share the agent
        in_python.clear()
        await everywhere(trainers, reduces_many)
        assert in_python == []


@pytest.mark.parametrize("who", [0, 1], ids=["first", "beside"])
async def test_who_calls_in_python_does_not_wait_for_one_whom_the_library_serves(
    clock: MockClock, in_python: OpsInPython, who: int
) -> None:
    """No time passes, so nothing else recalls that one."""
    async with three(clock, in_python) as (here, trainers):
        op, recalled = trainers[0].next_op, trainers[who].id

        async def in_python_too() -> Values:
            await wait_all_tasks_blocked(0.005)
            (rank,) = (rank for rank in ranks_of(here) if rank.id == recalled)
            rank.recall()
            await wait_all_tasks_blocked(0.005)
            return await reduces(trainers[who])

        calls = [partial(reduces, trainer) for trainer in trainers]
        calls[who] = partial(in_python_too)
        for result in await together(*calls):
            assert result.tolist() == [3.0] * COUNT
        assert set(in_python) == {op}


@pytest.mark.parametrize("who", [0, 1], ids=["first", "beside"])
async def test_the_library_does_not_wait_for_one_who_has_called_in_python(
    clock: MockClock, in_python: OpsInPython, who: int
) -> None:
    async with three(clock, in_python) as (here, trainers):
        op, other = trainers[0].next_op, trainers[1 - who]

        async def comes_late() -> Values:
            await wait_all_tasks_blocked(0.005)
            await other.ask(WantArena(100))  # after which the library might serve it
            await wait_all_tasks_blocked(0.005)
            return await reduces(other)

        for rank in ranks_of(here):
            rank.recall()
        await wait_all_tasks_blocked(0.005)
        calls = [partial(reduces, trainer) for trainer in trainers]
        calls[1 - who] = partial(comes_late)
        for result in await together(*calls):
            assert result.tolist() == [3.0] * COUNT
        assert in_python == [op] * 3


async def test_an_op_that_the_library_has_begun_is_given_up_if_python_can_not_go_on_with_it(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    """Its lanes are whole again, and the view that follows has all of them try once more."""
    failed, given_up = list[int](), list[KeptThreads]()

    def abandon(real: Real, threads: KeptThreads) -> None:
        given_up.append(threads)
        real(threads)

    async def relay(
        real: Real, meetings: Meetings, attempt: Attempt, rank: int, *args: object, **more: object
    ) -> object:
        if rank == 0 and not failed:
            failed.append(attempt.op)
            raise LaneBroken("no more")
        return await real(meetings, attempt, rank, *args, **more)

    async with three(clock, in_python) as (_, trainers):
        faults.around(Meetings, "relay", relay)
        faults.around(KeptThreads, "abandon", abandon)
        op = trainers[0].next_op

        async def late(trainer: TrainerClient) -> Values:
            await wait_all_tasks_blocked(0.005)
            with time_passes(clock):
                await trio.sleep(2)
            clock.autojump_threshold = 0
            return await reduces(trainer)

        calls = [partial(reduces, trainer) for trainer in trainers[:2]]
        for result in await together(*calls, partial(late, trainers[2])):
            assert result.tolist() == [3.0] * COUNT
        assert failed == [op]
        assert len(given_up) == 1
        assert {trainer.next_op for trainer in trainers} == {op + 1}
        await is_repeated(clock, in_python, trainers)


async def calls_until_it_dies(trainer: TrainerClient) -> None:
    with suppress(trio.ClosedResourceError):
        await reduces(trainer)


@each_rank
@pytest.mark.parametrize("other", [0, 1, 2])
@pytest.mark.parametrize("terms", [RAISE, ANY], ids=["raise", "continue"])
async def test_a_loss_in_the_middle_of_an_op(
    clock: MockClock, in_python: OpsInPython, terms: Terms, who: int, other: int
) -> None:
    """A rank is late, and it or another one dies, which may have brought its values."""
    async with three(clock, in_python, terms=terms) as (here, trainers):
        left = [trainer for i, trainer in enumerate(trainers) if i != who]
        lost, op, ended = trainers[who].rank, trainers[0].next_op, list[object]()

        async def call(trainer: TrainerClient) -> None:
            if terms == RAISE:
                verdict = await trainer.verdict_of(reduces(trainer))
                ended.append((verdict.error, verdict.trainers))
            else:
                ended.append((await reduces(trainer)).tolist())

        async def die() -> None:
            await wait_all_tasks_blocked(0.005)
            with time_passes(clock):
                await trainers[who].die()
                await until(lambda: all(rank.size == 2 for rank in ranks_of(here)))
            clock.autojump_threshold = 0

        async with trio.open_nursery() as nursery:
            for trainer in left:
                if trainer is not trainers[other]:
                    nursery.start_soon(call, trainer)
            if who != other:
                nursery.start_soon(calls_until_it_dies, trainers[who])
            await die()
            if who != other:
                nursery.start_soon(call, trainers[other])
        if terms == RAISE:
            assert ended == [("RankLost", (lost,))] * 2
        else:
            assert ended == [[2.0] * COUNT] * 2
        assert {trainer.next_op for trainer in left} == {op + 1}
        await is_repeated(clock, in_python, left)


@pytest.mark.parametrize("who", [0, 1, 2], ids=["first", "beside", "elsewhere"])
@pytest.mark.parametrize("held", [0, 1], ids=["holds first", "holds beside"])
@pytest.mark.parametrize("terms", [RAISE, ANY], ids=["raise", "continue"])
async def test_a_loss_after_an_op_has_ended_elsewhere(
    clock: MockClock, in_python: OpsInPython, faults: Faults, *, terms: Terms, held: int, who: int
) -> None:
    """I4: of those who share an agent, which can't end it (V8), not all have called it again."""
    faults.limit(repeats, "TRUST_S", 60.0)  # of a busy machine's time
    goes_on, ended = trio.Event(), dict[TrainerId, list[float]]()

    async def call(trainer: TrainerClient) -> None:
        with suppress(trio.ClosedResourceError):
            ended[trainer.id] = (await reduces(trainer)).tolist()

    async with three(clock, in_python, terms=terms) as (here, trainers):
        op, held_id, lost = trainers[0].next_op, trainers[held].id, trainers[who]

        async def hold(real: Real, rank: LocalRank, request: StartOp, *others: object) -> object:
            if rank.id == held_id:
                await goes_on.wait()
            return await real(rank, request, *others)

        faults.around(session, "run_op", hold)
        async with trio.open_nursery() as nursery:
            for trainer in trainers[:2]:
                nursery.start_soon(call, trainer)
            await wait_all_tasks_blocked(0.005)
            faults.limit(repeats, "TRUST_S", -60.0)
            machine_of(here, trainers[0]).agent.jobs.vouch()
            faults.limit(repeats, "TRUST_S", 60.0)
            await call(trainers[2])
            assert ended == {trainers[2].id: [3.0] * COUNT}
            await wait_all_tasks_blocked(0.005)
            with time_passes(clock):
                await lost.die()
                left = [rank for rank in ranks_of(here) if rank.id != lost.id]
                await until(lambda: all(rank.size == 2 for rank in left))
            clock.autojump_threshold = 0
            goes_on.set()
        others = [trainer for trainer in trainers if trainer is not lost]
        assert all(ended[trainer.id] == [3.0] * COUNT for trainer in others)
        assert {trainer.next_op for trainer in others} == {op + 1}
        if terms == RAISE:
            errors = [(await t.verdict_of(reduces(t))).error for t in others]
            assert errors == ["RankLost"] * 2
        else:
            await is_repeated(clock, in_python, others)
