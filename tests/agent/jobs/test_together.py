"""Ranks of one agent, which combine in its memory: all of them get a result, or none."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import trio
import trio.testing
from msgspec import structs
from trio.testing import MockClock

from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.jobs.together import SHARED_BYTES, Meetings
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.core.wire.session import DropArena
from pmesh.core.wire.trainer import OpFailed, StartOp
from pmesh.errors import LaneBroken
from pmesh.ids import OpNumber
from pmesh.net.lanes.lane import CallsDiffer
from pmesh.net.sessions import combining
from pmesh.net.sessions.arena_pools import OutputArenas
from pmesh.net.sessions.arenas import Arena
from pmesh.net.sessions.combining import CombiningRun
from tests.agent.jobs.parts import ATTEMPT, part_of, result_of
from tests.worlds.faults import Faults, Real
from tests.worlds.kept import kept
from tests.worlds.trainer import OpError, TrainerClient, together, until
from tests.worlds.village import Village, village
from tests.worlds.village_ops import ones, ranks_of, reduce_all, run, swallow, verdicts_of_all

LARGE = SHARED_BYTES // 4  # values


async def test_who_is_cancelled_takes_its_part_away_at_once() -> None:
    """V3: the last rank may come in the same turn of the event loop."""
    meetings, results = Meetings(), [result_of(36), result_of(36)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meetings.take_part, ATTEMPT, 0, 2, part_of(1, results[0]))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()  # its task has not run since
        with trio.CancelScope(shield=True), trio.move_on_after(0.01) as scope:
            await meetings.take_part(ATTEMPT, 1, 2, part_of(1, results[1]))
        assert scope.cancelled_caught
    assert [bytes(result.memory) for result in results] == [bytes(36)] * 2


async def test_the_last_rank_that_comes_ends_its_part_at_once() -> None:
    meetings, results = Meetings(), [result_of(36), result_of(36)]
    first = meetings.meet(ATTEMPT, 0, 2, part_of(1, results[0]))
    assert first is not None
    assert not first.ends_at_once()
    last = meetings.meet(ATTEMPT, 1, 2, part_of(2, results[1]))
    assert last is not None
    assert last.ends_at_once()
    with trio.fail_after(0):
        await first.finish()
    sums = np.full(9, 3, np.float32).tobytes()
    assert [bytes(result.memory) for result in results] == [sums] * 2
    assert meetings.meet(ATTEMPT, 0, 2, part_of(1, results[0])) is not None  # it has been forgotten


async def test_who_would_not_fit_takes_no_part() -> None:
    """O8, and a trainer that has lied: `take_part` raises why."""
    meetings, result = Meetings(), result_of(36)
    meetings.meet(ATTEMPT, 0, 2, part_of(1, result))
    other = part_of(1, result_of(36))
    barrier = structs.replace(other.request, call=Call("barrier", "float32", ()))
    for part, error in [
        (replace(other, request=barrier), CallsDiffer),
        (replace(other, source=memoryview(b"1234")), LaneBroken),
    ]:
        assert meetings.meet(ATTEMPT, 1, 2, part) is None
        assert meetings.meet(ATTEMPT, 0, 2, part_of(1, result)) is not None  # it still waits
        with pytest.raises(error):
            await meetings.take_part(ATTEMPT, 1, 2, part)
    assert bytes(result.memory) == bytes(36)


async def test_no_task_ends_while_a_thread_is_in_its_memory(faults: Faults) -> None:
    """V3."""
    leaves, stops = list[Callable[[], None]](), list[CombiningRun]()

    def start(work: CombiningRun, ended: Callable[[], None]) -> bool:
        faults.instead(work, "result", lambda: False)  # it will be stopped
        leaves.append(ended)
        return False

    def stop(work: CombiningRun) -> None:
        stops.append(work)

    faults.instead(CombiningRun, "start", start)
    faults.instead(CombiningRun, "stop", stop)
    meetings, ended = Meetings(), list[int]()

    async def take_part(rank: int) -> None:
        try:
            await meetings.take_part(ATTEMPT, rank, 2, part_of(1, result_of(36)))
        finally:
            ended.append(rank)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_part, 0)
        nursery.start_soon(take_part, 1)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
        assert stops
        assert not ended
        leaves[0]()
    assert sorted(ended) == [0, 1]


async def test_ranks_of_one_agent_open_no_lane(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        trainers = await here.job(*here.machines * 3)
        assert [x[0] for x in await reduce_all(trainers)] == [3.0] * 3
        assert here.machines[0].lanes() == []


async def test_a_root_waits_for_nobody_and_the_others_take_its_values_later(
    clock: MockClock,
) -> None:
    async with village(clock, 1) as here:
        root, *others = await here.job(*here.machines * 3)
        for value in range(3):
            await root.broadcast(np.full(9, value, np.float32))
        for other in others:
            for value in range(3):
                assert (await other.broadcast(ones(9)))[0] == value
        assert [x[0] for x in await reduce_all([root, *others])] == [3.0] * 3


async def test_ranks_that_come_first_wait_for_the_root(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        root, *others = await here.job(*here.machines * 3)

        async def late() -> None:
            await until(lambda: all(rank.busy_since for rank in ranks_of(here)[1:]))
            await root.broadcast(np.full(9, 5, np.float32))

        async def early(other: TrainerClient) -> None:
            assert (await other.broadcast(ones(9)))[0] == 5

        await together(late, *[partial(early, other) for other in others])


@pytest.mark.parametrize("count", [9, LARGE])
@pytest.mark.parametrize("dies", ["before the others come", "while it is added", "after it"])
async def test_a_trainer_that_dies_leaves_the_others_with_the_same_result(
    clock: MockClock, faults: Faults, dies: str, count: int
) -> None:
    begun = list[CombiningRun]()

    def start(real: Real, work: CombiningRun, ended: Callable[[], None]) -> object:
        begun.append(work)
        if len(begun) > 1 or dies != "while it is added":
            return real(work, ended)

        def stop() -> None:  # as its threads notice it; nothing else ends it
            faults.instead(work, "result", lambda: False)  # as the last thread leaves it
            trio.lowlevel.current_trio_token().run_sync_soon(ended)

        faults.instead(work, "stop", stop)
        return False

    faults.around(combining.CombiningRun, "start", start)
    async with village(clock, 1) as here:
        lost, *left = await here.job(*here.machines * 3)

        async def lose() -> None:
            if dies == "after it":
                await lost.reduce(ones(count))
            elif dies == "before the others come":
                await until(lambda: all(rank.busy_since for rank in ranks_of(here)[1:]))
            else:
                await until(lambda: bool(begun))
            await lost.die()

        async def call() -> None:
            if dies == "while it is added":
                await swallow(lost.reduce(ones(count)))

        sums = list[float]()

        async def survive(trainer: TrainerClient) -> None:
            sums.append(float((await trainer.reduce(ones(count)))[-1]))

        await together(lose, call, *[partial(survive, trainer) for trainer in left])
        assert sums == [3.0 if dies == "after it" else 2.0] * 2
        assert [x[0] for x in await reduce_all(left)] == [2.0] * 2


async def test_a_deadline_fails_the_op_for_all_and_they_go_on(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        trainers = await here.job(*here.machines * 2)
        early, late = trainers

        async def never_in_time() -> None:
            await trio.sleep(4)
            with pytest.raises(OpError) as caught:
                await late.reduce(ones(9))
            assert caught.value.verdict.error == "OpTimedOut"

        async def impatient() -> None:
            with pytest.raises(OpError) as caught:
                await early.reduce(ones(9), timeout_s=2.0)
            assert caught.value.verdict.error == "OpTimedOut"

        await together(never_in_time, impatient)
        assert [x[0] for x in await reduce_all(trainers)] == [2.0] * 2


async def test_ranks_whose_calls_differ_all_get_the_error(clock: MockClock) -> None:
    """O8."""
    async with village(clock, 1) as here:
        a, b = trainers = await here.job(*here.machines * 2)
        verdicts = await verdicts_of_all((a, a.reduce(ones(9))), (b, b.reduce(ones(10))))
        assert [verdict.error for verdict in verdicts] == ["OpMismatch"] * 2
        assert [x[0] for x in await reduce_all(trainers)] == [2.0] * 2


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
async def test_a_trainer_that_lies_about_its_values_fails_only_its_job(
    clock: MockClock, kind: str
) -> None:
    async with village(clock, 1) as here:
        others = await here.job(*here.machines * 2, name="other")
        honest, liar = await here.job(*here.machines * 2)
        call = Call(kind, "float32", (LARGE,), "sum" if kind == "all_reduce" else "")
        parts: tuple[int, ...] = ()
        lies, count = parts, 2
        if kind == "all_gather":
            parts, lies, count = (LARGE, LARGE), (1, LARGE), LARGE

        async def lie() -> str:
            arena = await liar.input_arena(4 * count)
            request = StartOp(OpNumber(0), call, "float32", count, arena, 60.0, lies)
            reply = await liar.ask(request)
            assert isinstance(reply, OpFailed)
            return reply.verdict.error

        async def be_honest() -> str:
            with pytest.raises(OpError) as caught:
                await run(honest, call, ones(LARGE), parts)
            return caught.value.verdict.error

        assert await together(lie, be_honest) == ["LaneBroken"] * 2
        assert [x[0] for x in await reduce_all(others)] == [2.0] * 2


# --- one result for all


def memories_of(here: Village) -> set[Arena | None]:
    """In which the results of the last op are."""
    arenas = [[*rank.results.values()][-1].arena for rank in ranks_of(here)]
    return {arena and (arena.of or arena) for arena in arenas}


async def of_all(trainers: Sequence[TrainerClient], kind: str, value: float) -> list[Values]:
    """What each gets of an op of all of them."""
    size, values = len(trainers), np.full(LARGE, value, np.float32)
    if kind == "broadcast":
        return await together(*[partial(t.broadcast, values) for t in trainers])
    call = Call(kind, "float32", (LARGE,), "sum" if kind == "all_reduce" else "")
    parts = (LARGE,) * size if kind == "all_gather" else ()
    return await together(*[partial(run, t, call, values, parts) for t in trainers])


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "broadcast"])
async def test_what_all_get_is_written_once(clock: MockClock, kind: str) -> None:
    async with village(clock, 1) as here:
        trainers = await here.job(*here.machines * 3)
        for value in range(1, 5):
            results = await of_all(trainers, kind, value)
            right = 3 * value if kind == "all_reduce" else value
            assert all((result == right).all() for result in results)
            memories = memories_of(here)
            assert len(memories) == 1 + (kind == "broadcast")  # its root has its own values
        assert len({number for t in trainers for number in t.maps}) < 12  # from op to op the same


async def test_a_rank_without_room_for_it_gets_a_copy(clock: MockClock, faults: Faults) -> None:
    async with village(clock, 1) as here:
        trainers = await here.job(*here.machines * 3)
        faults.skip(OutputArenas, "adopt")
        results = await of_all(trainers, "all_reduce", 1)
        assert all((result == 3).all() for result in results)
        assert len(memories_of(here)) == 3


@pytest.mark.parametrize("keeper", [0, 1])
async def test_what_one_rank_keeps_stays_as_it_is(clock: MockClock, keeper: int) -> None:
    async with village(clock, 1) as here:
        trainers = await here.job(*here.machines * 2)
        call, first = Call("all_reduce", "float32", (LARGE,), "sum"), 5

        def one(trainer: TrainerClient, value: float) -> Callable[[], Awaitable[object]]:
            values, borrows = np.full(LARGE, value, np.float32), trainer.rank == keeper
            return partial(trainer.run, call, values, borrows=borrows and value == first)

        for value in range(first, first + 6):
            await together(*[one(t, value) for t in trainers])
            await trio.sleep(1)  # heartbeats: all of it is stable
        kept = trainers[keeper]
        (number,) = kept.lent
        assert (np.frombuffer(kept.maps[number], np.float32, LARGE) == 10).all()
        await kept.send(DropArena(number))


async def test_a_rank_that_is_slow_to_read_is_not_overtaken(clock: MockClock) -> None:
    """Until its second call after it, its trainer may read what it was given."""
    async with village(clock, 1) as here:
        fast, root, slow = await here.job(*here.machines * 3)
        await of_all([fast, root, slow], "all_reduce", 1)
        (read,) = ranks_of(here)[2].results.values()
        assert read.arena is not None
        await trio.sleep(1)  # heartbeats: it is stable
        for value in range(5, 9):
            await root.broadcast(np.full(LARGE, value, np.float32), root=1)
            assert (await fast.broadcast(ones(LARGE), root=1))[0] == value
        memory = slow.maps[read.arena.number]
        assert (np.frombuffer(memory, np.float32, LARGE) == 3).all()


@pytest.mark.parametrize("interrupted", [{1}, {0, 1}, {0, 1, 2}])
async def test_who_is_interrupted_before_the_end_gets_what_the_others_get(
    clock: MockClock, faults: Faults, interrupted: set[int]
) -> None:
    """Where nobody has the result yet, the op runs again without the lost rank."""
    held = set[int | None]()

    async def unfenced(real: Real, rank: LocalRank) -> None:
        if rank.size == 3 and rank.rank in interrupted:
            held.add(rank.rank)
            await trio.sleep_forever()
        await real(rank)

    faults.around(LocalRank, "unfenced", unfenced)
    async with village(clock, 1) as here:
        *left, lost = await here.job(*here.machines * 3)

        async def die() -> None:
            await until(lambda: held == interrupted)
            await lost.die()

        async def reduce(trainer: TrainerClient) -> float:
            return float((await trainer.reduce(ones(LARGE)))[-1])

        calls = [partial(reduce, trainer) for trainer in left]
        *sums, _, _ = await together(*calls, die, partial(swallow, reduce(lost)))
        assert sums == [2.0 if len(interrupted) == 3 else 3.0] * 2
        assert [x[0] for x in await reduce_all(left)] == [2.0] * 2
        await trio.sleep(1)  # heartbeats: all of it is stable
        assert not any(kept(rank.arenas.outputs)["ops"] for rank in ranks_of(here))


async def test_who_is_beyond_the_receivers_takes_nothing(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        root, *others = await here.job(*here.machines * 3)
        results = await together(
            *[partial(t.broadcast, ones(LARGE), receivers=(1,)) for t in (root, *others)]
        )
        assert [result[-1] for result in results] == [1, 1, 0]
