"""What happens while the native library answers calls has the same end as without it."""

import itertools
import re
from collections import Counter, defaultdict
from contextlib import suppress
from functools import partial

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent.jobs import repeats, session
from pmesh.core.ops.reductions import Values
from pmesh.core.values import Terms
from pmesh.core.wire.calls import Call
from pmesh.core.wire.session import ArenaGranted, WantArena
from pmesh.core.wire.trainer import StartOp
from pmesh.errors import LaneBroken
from pmesh.ids import OpNumber
from pmesh.net.sessions.arena_pools import OutputArenas
from pmesh.net.sessions.processes import ProcessExits
from tests.agent.jobs.repeating import (
    APART,
    COUNT,
    OpsInPython,
    everywhere,
    is_repeated,
    reduces,
    repeating,
    time_passes,
)
from tests.worlds.faults import Faults, Real
from tests.worlds.system import without_library
from tests.worlds.trainer import ANY, TrainerClient, together, until
from tests.worlds.village import village
from tests.worlds.village_ops import (
    RAISE,
    enter,
    machine_of,
    ones,
    ranks_of,
    reduce_all,
    syncing_job,
    verdicts_of_all,
)

BARRIER = Call("barrier", "float32", (0,))


# --- ranks that are late


async def test_a_rank_that_comes_late_is_waited_for(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2) as (_, (a, b)):

        async def late() -> float:
            await wait_all_tasks_blocked(0.005)
            with time_passes(clock):
                await trio.sleep(2)  # the agents recall the library
            return float((await b.reduce(7 * ones(COUNT)))[0])

        async def early() -> float:
            return float((await a.reduce(7 * ones(COUNT)))[0])

        op = a.next_op
        assert await together(early, late) == [14.0] * 2
        assert set(in_python) == {op}
        assert a.next_op == b.next_op == op + 1
        await is_repeated(clock, in_python, [a, b])


async def test_a_barrier_that_a_rank_comes_late_to_goes_on(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2, TrainerClient.barrier) as (_, (a, b)):

        async def late() -> None:
            await wait_all_tasks_blocked(0.005)
            with time_passes(clock):
                await trio.sleep(2)
            await b.barrier()

        op = a.next_op
        await together(a.barrier, late)
        assert set(in_python) == {op}
        assert a.next_op == b.next_op == op + 1


async def test_a_rank_that_is_late_keeps_nobody_from_hearing_of_it(
    clock: MockClock, in_python: OpsInPython
) -> None:
    """I6: who waits in an op that the library has begun is told for whom."""
    async with repeating(clock, in_python, 2) as (_, (a, b)):

        async def late() -> Values:
            await wait_all_tasks_blocked(0.005)
            with time_passes(clock):
                await trio.sleep(12)
            return await b.reduce(ones(COUNT))

        await together(partial(a.reduce, ones(COUNT)), late)
        wait = a.waits[-1]
        assert 9.0 <= wait.waited_s <= 12.0
        assert f"rank {b.rank}" in wait.on[0]


async def test_a_timeout_holds_for_an_op_that_the_library_has_begun(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async def reduces_within(trainer: TrainerClient) -> Values:
        return await trainer.reduce(ones(COUNT), timeout_s=3.0)

    async with repeating(clock, in_python, 2, reduces_within) as (_, (a, b)):

        async def lets_time_pass() -> None:
            await wait_all_tasks_blocked(0.005)
            clock.autojump_threshold = 0

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lets_time_pass)
            began = clock.current_time()
            verdict = await a.verdict_of(reduces_within(a))
            assert 2.5 <= clock.current_time() - began <= 4.0
        assert (verdict.error, verdict.trainers) == ("OpTimedOut", (b.id,))
        assert await b.verdict_of(reduces_within(b)) == verdict
        await is_repeated(clock, in_python, [a, b])


@pytest.mark.parametrize("terms", [RAISE, ANY], ids=["raise", "continue"])
async def test_a_loss_in_the_middle_of_an_op(
    clock: MockClock, in_python: OpsInPython, terms: Terms
) -> None:
    async with repeating(clock, in_python, 3, terms=terms) as (here, trainers):
        a, b, c = trainers

        async def lose_one() -> None:
            await wait_all_tasks_blocked(0.005)
            with time_passes(clock):
                await c.die()
                await until(lambda: all(rank.size == 2 for rank in ranks_of(here)))
            clock.autojump_threshold = 0

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose_one)
            if terms == RAISE:
                verdicts = await verdicts_of_all(*[(t, t.reduce(ones(COUNT))) for t in (a, b)])
                assert verdicts[0] == verdicts[1]
                assert (verdicts[0].error, verdicts[0].trainers) == ("RankLost", (2,))
            else:
                results = await reduce_all([a, b], ones(COUNT))
                assert [r.tolist() for r in results] == [[2.0] * COUNT] * 2
        assert a.world.trainers == b.world.trainers == (0, 1)
        await is_repeated(clock, in_python, [a, b])


async def test_a_loss_between_ops(clock: MockClock, in_python: OpsInPython) -> None:
    async with repeating(clock, in_python, 3) as (here, trainers):
        await reduce_all(trainers, ones(COUNT))
        with time_passes(clock):
            await trainers[2].die()
            await until(lambda: all(rank.size == 2 for rank in ranks_of(here)))
            assert [r[0] for r in await reduce_all(trainers[:2], ones(COUNT))] == [2.0] * 2
        assert trainers[0].world.trainers == (0, 1)
        await is_repeated(clock, in_python, trainers[:2])


@APART
async def test_a_machine_is_lost_while_the_others_wait_for_it(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2) as (here, (a, b)):

        async def lose_one() -> None:
            await wait_all_tasks_blocked(0.005)
            clock.autojump_threshold = 0
            await machine_of(here, b).kill()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose_one)
            assert (await a.reduce(ones(COUNT))).tolist() == [1.0] * COUNT
        assert a.world.trainers == (0,)
        assert (await a.reduce(ones(COUNT))).tolist() == [1.0] * COUNT


async def test_who_leaves_is_not_missed(clock: MockClock, in_python: OpsInPython) -> None:
    async with repeating(clock, in_python, 3) as (here, trainers):
        await reduce_all(trainers, ones(COUNT))
        with time_passes(clock):
            await trainers[1].leave()
            await until(lambda: all(rank.size == 2 for rank in ranks_of(here)))
        await is_repeated(clock, in_python, [trainers[0], trainers[2]])


async def test_a_newcomer_takes_part(clock: MockClock, in_python: OpsInPython) -> None:
    async with village(clock, 3) as here:
        inside = await syncing_job(here, *here.machines[:2])
        await is_repeated(clock, in_python, inside)
        clock.autojump_threshold = 0
        newcomer = await here.trainer(here.machines[2])
        await newcomer.join("digits", 2)
        assert sorted((await enter(here, [newcomer], inside))[0]) == [0, 1, 100]
        await is_repeated(clock, in_python, [*inside, newcomer])


# --- ranks that call something else


async def differing(
    trainers: list[TrainerClient], sizes: tuple[int, ...]
) -> "set[tuple[str, str]]":
    calls = [(t, t.reduce(ones(size))) for t, size in zip(trainers, sizes, strict=True)]
    verdicts = await verdicts_of_all(*calls)
    return {(v.error, v.message) for v in verdicts}


@pytest.mark.parametrize("ranks", [2, 3])
async def test_ranks_that_call_different_things_all_get_the_error_that_python_makes(
    clock: MockClock, in_python: OpsInPython, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    sizes = (COUNT, 5, COUNT)[:ranks]
    async with repeating(clock, in_python, ranks) as (_, trainers):
        with time_passes(clock):
            (of_library,) = await differing(trainers, sizes)
        await is_repeated(clock, in_python, trainers)
    with without_library(monkeypatch):
        async with repeating(clock, in_python, ranks) as (_, trainers):
            with time_passes(clock):
                (of_python,) = await differing(trainers, sizes)
    for error, message in (of_library, of_python):
        assert error == "OpMismatch"
        # One of three may not have called yet when two were seen to differ.
        called = re.findall(r"rank (\d) \([^)]*\): all_reduce\(float32, (\d+), sum\)", message)
        assert {(int(rank), int(size)) for rank, size in called} <= set(enumerate(sizes))
        assert len({size for _, size in called}) == 2


@pytest.mark.parametrize("other", [0, 1])
async def test_two_calls_that_are_both_repeated_may_differ(
    clock: MockClock, in_python: OpsInPython, other: int
) -> None:
    async def reduces_both(trainer: TrainerClient) -> None:
        for count in (COUNT, 5):
            await trainer.reduce(ones(count))

    async with repeating(clock, in_python, 2, reduces_both) as (_, trainers):
        await everywhere(trainers, reduces_both)
        assert in_python == []
        with time_passes(clock):
            (found,) = await differing(trainers, (COUNT, 5) if other else (5, COUNT))
        assert found[0] == "OpMismatch"
        assert [r[0] for r in await reduce_all(trainers, ones(5))] == [2.0] * 2
        await is_repeated(clock, in_python, trainers)


# --- what the trainer does


async def test_a_trainer_may_drop_the_arena_of_its_values(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2) as (_, trainers):
        for trainer in trainers:
            await trainer.drop_input()
        await is_repeated(clock, in_python, trainers)


async def test_a_trainer_that_dies_while_its_calls_are_answered_leaves_nothing(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2) as (here, trainers):
        await reduce_all(trainers, ones(COUNT))
        machines = [machine_of(here, trainer) for trainer in trainers]
        with time_passes(clock):
            for trainer in trainers:
                await trainer.die()
            await until(lambda: not ranks_of(here))
            others = await here.job(*machines)
        await is_repeated(clock, in_python, others)


async def test_two_who_leave_at_once_leave_nothing(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2) as (here, trainers):
        await reduce_all(trainers, ones(COUNT))
        machines = [machine_of(here, trainer) for trainer in trainers]
        with time_passes(clock):
            await everywhere(trainers, TrainerClient.leave)
            await until(lambda: not ranks_of(here))
            others = await here.job(*machines)
        await is_repeated(clock, in_python, others)


async def test_a_trainer_that_does_not_read_its_replies_is_lost_and_the_others_go_on(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2, TrainerClient.barrier) as (_, (a, b)):

        async def goes_on() -> None:
            while b.world.trainers != (b.id,):
                await b.barrier()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(goes_on)
            with suppress(trio.BrokenResourceError):
                for op in itertools.count(a.next_op):
                    request = StartOp(OpNumber(op), BARRIER, "float32", 0, -1, 1800.0)
                    await a.send(request)
            clock.autojump_threshold = 0
        assert in_python == [b.next_op - 1]


# --- what the machine lacks


async def test_an_agent_that_may_have_slept_answers_nothing_by_itself(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    """V8."""
    faults.limit(repeats, "TRUST_S", 0.0)
    async with repeating(clock, in_python, 2) as (_, trainers):
        for _ in range(3):
            assert [r[0] for r in await reduce_all(trainers, ones(COUNT))] == [2.0] * 2
        assert len(in_python) == 6


@pytest.mark.parametrize("room_for", [0, 2])
async def test_without_room_for_more_results_python_goes_on(
    clock: MockClock, in_python: OpsInPython, faults: Faults, room_for: int
) -> None:
    tries = Counter[OutputArenas]()

    async def acquire(real: Real, outputs: OutputArenas, nbytes: int, *, follows: bool) -> object:
        if follows:
            tries[outputs] += 1
            if tries[outputs] > room_for:
                raise OSError(12, "Cannot allocate memory")
        return await real(outputs, nbytes, follows=follows)

    faults.around(OutputArenas, "acquire", acquire)
    async with repeating(clock, in_python, 2) as (_, trainers):
        for _ in range(3):
            assert [r[0] for r in await reduce_all(trainers, ones(COUNT))] == [2.0] * 2
        assert len(in_python) == 6
        # Each agent tries once; where all ranks meet, only the first one makes room.
        assert list(tries.values()) == [room_for + 1] * (1 if in_python.together else 2)


@pytest.mark.parametrize("error", [OSError("no thread"), LaneBroken("no pipe")], ids=repr)
async def test_without_room_for_a_thread_python_goes_on(
    clock: MockClock, in_python: OpsInPython, faults: Faults, error: Exception
) -> None:
    faults.fail(repeats, "PersistentCalls", error)
    async with repeating(clock, in_python, 2) as (_, trainers):
        for _ in range(3):
            assert [r[0] for r in await reduce_all(trainers, ones(COUNT))] == [2.0] * 2
        assert len(in_python) == 6


async def test_of_many_trainers_some_are_answered_by_python(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    faults.limit(repeats, "MOST_TRAINERS", 1)
    async with repeating(clock, in_python, 2) as (_, trainers):
        for _ in range(3):
            assert [r[0] for r in await reduce_all(trainers, ones(COUNT))] == [2.0] * 2
        assert len(in_python) == (6 if in_python.together else 3)


@APART
async def test_a_lane_that_is_closed_is_replaced(clock: MockClock, in_python: OpsInPython) -> None:
    async with repeating(clock, in_python, 2) as (here, trainers):
        await reduce_all(trainers, ones(COUNT))
        before = {lane for machine in here.machines for lane in machine.lanes()}
        here.machines[1].lanes()[0].close()
        with time_passes(clock):
            assert [r[0] for r in await reduce_all(trainers, ones(COUNT))] == [2.0] * 2
        assert not before & {lane for machine in here.machines for lane in machine.lanes()}
        await is_repeated(clock, in_python, trainers)


@APART
async def test_a_lane_that_is_closed_while_python_serves_is_replaced(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2) as (here, trainers):
        for rank in ranks_of(here):
            rank.recall()
        await wait_all_tasks_blocked(0.005)
        here.machines[0].lanes()[0].close()
        for trainer in trainers:
            reply = await trainer.ask(WantArena(9))  # then the library would serve again
            assert isinstance(reply, ArenaGranted)
        with time_passes(clock):
            assert [r[0] for r in await reduce_all(trainers, ones(COUNT))] == [2.0] * 2
        await is_repeated(clock, in_python, trainers)


async def test_a_trainer_whose_process_ends_while_the_library_waits_for_others_is_lost_at_once(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    """It is a child that holds the connection open."""
    ends = defaultdict[ProcessExits, trio.Event](trio.Event)

    async def is_cut_off() -> None:
        with pytest.raises(trio.EndOfChannel):
            await reduces(trainers[0])

    faults.instead(ProcessExits, "wait", lambda exits, _: ends[exits].wait())
    async with repeating(clock, in_python, 2) as (here, trainers):
        jobs = machine_of(here, trainers[0]).agent.jobs
        async with trio.open_nursery() as nursery:
            nursery.start_soon(is_cut_off)
            await wait_all_tasks_blocked(0.005)
            ends[jobs.exits].set()
            for _ in range(20):
                await wait_all_tasks_blocked(0.005)
            with time_passes(clock):
                await trio.sleep(2 * session.LOOK_S)
            left = [rank for rank in jobs.ranks if rank.id == trainers[0].id]
            assert all(rank.leaving for rank in left)  # perhaps a view has removed it already
