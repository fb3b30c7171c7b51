"""Ranks of one agent, which combine in its memory: all of them get a result, or none."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import trio
import trio.testing
from msgspec import structs
from trio.testing import MockClock

from pmesh.agent.jobs.together import Attempt, Meetings, Part
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import OpFailed, StartOp
from pmesh.errors import LaneBroken
from pmesh.ids import Epoch, Incarnation, JobName, NodeId, OpNumber
from pmesh.net.lanes.lane import CallsDiffer
from pmesh.net.sessions import combining
from pmesh.net.sessions.combining import Run
from tests.worlds.trainer import OpError, Trainer, together, until
from tests.worlds.village import village
from tests.worlds.village_ops import ones, ranks_of, reduce_all, run, swallow, verdicts_of_all


def part_of(value: float, result: bytearray) -> Part:
    source = np.full(9, value, np.float32)
    call = Call("all_reduce", "float32", (9,), "sum")
    return Part(
        request=StartOp(OpNumber(0), call, "float32", 9, 0, 1.0),
        source=source.view(np.uint8).data,
        result=memoryview(result),
        root=0,
        reach=0,
        describe=lambda: "a rank",
    )


ATTEMPT = Attempt(JobName("digits"), Epoch(1, NodeId(b"n" * 32), Incarnation(1)), 0, OpNumber(0))


async def test_who_is_cancelled_takes_its_part_away_at_once() -> None:
    """V3: the last rank may come in the same turn of the event loop."""
    meetings, results = Meetings(), [bytearray(36), bytearray(36)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meetings.take_part, ATTEMPT, 0, 2, part_of(1, results[0]))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()  # its task has not run since
        with trio.CancelScope(shield=True), trio.move_on_after(0.01) as scope:
            await meetings.take_part(ATTEMPT, 1, 2, part_of(1, results[1]))
        assert scope.cancelled_caught
    assert results == [bytes(36)] * 2


async def test_the_last_rank_that_comes_ends_its_part_at_once() -> None:
    meetings, results = Meetings(), [bytearray(36), bytearray(36)]
    first = meetings.meet(ATTEMPT, 0, 2, part_of(1, results[0]))
    assert first is not None
    assert not first.ends_at_once()
    last = meetings.meet(ATTEMPT, 1, 2, part_of(2, results[1]))
    assert last is not None
    assert last.ends_at_once()
    with trio.fail_after(0):
        await first.finish()
    assert results == [np.full(9, 3, np.float32).tobytes()] * 2
    assert meetings.meet(ATTEMPT, 0, 2, part_of(1, results[0])) is not None  # it has been forgotten


async def test_who_would_not_fit_takes_no_part() -> None:
    """O8, and a trainer that has lied: `take_part` raises why."""
    meetings, result = Meetings(), bytearray(36)
    meetings.meet(ATTEMPT, 0, 2, part_of(1, result))
    other = part_of(1, bytearray(36))
    barrier = structs.replace(other.request, call=Call("barrier", "float32", ()))
    for part, error in [
        (replace(other, request=barrier), CallsDiffer),
        (replace(other, source=memoryview(b"1234")), LaneBroken),
    ]:
        assert meetings.meet(ATTEMPT, 1, 2, part) is None
        assert meetings.meet(ATTEMPT, 0, 2, part_of(1, result)) is not None  # it still waits
        with pytest.raises(error):
            await meetings.take_part(ATTEMPT, 1, 2, part)
    assert result == bytes(36)


async def test_no_task_ends_while_a_thread_is_in_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V3."""
    leaves, stops = list[Callable[[], None]](), list[Run]()

    def start(work: Run, ended: Callable[[], None]) -> bool:
        work._whole = False  # noqa: SLF001 - it will be stopped
        leaves.append(ended)
        return False

    def stop(work: Run) -> None:
        stops.append(work)

    monkeypatch.setattr(Run, "start", start)
    monkeypatch.setattr(Run, "stop", stop)
    meetings, ended = Meetings(), list[int]()

    async def take_part(rank: int) -> None:
        try:
            await meetings.take_part(ATTEMPT, rank, 2, part_of(1, bytearray(36)))
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

        async def early(other: Trainer) -> None:
            assert (await other.broadcast(ones(9)))[0] == 5

        await together(late, *[partial(early, other) for other in others])


@pytest.mark.parametrize("dies", ["before the others come", "while it is added", "after it"])
async def test_a_trainer_that_dies_leaves_the_others_with_the_same_result(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    begun, real = list[Run](), Run.start

    def start(work: Run, ended: Callable[[], None]) -> bool:
        begun.append(work)
        if len(begun) > 1 or dies != "while it is added":
            return real(work, ended)

        def stop() -> None:  # as its threads notice it; nothing else ends it
            work._whole = False  # noqa: SLF001 - as the last thread leaves it
            trio.lowlevel.current_trio_token().run_sync_soon(ended)

        monkeypatch.setattr(work, "stop", stop)
        return False

    monkeypatch.setattr(combining.Run, "start", start)
    async with village(clock, 1) as here:
        lost, *left = await here.job(*here.machines * 3)

        async def lose() -> None:
            if dies == "after it":
                await lost.reduce(ones(9))
            elif dies == "before the others come":
                await until(lambda: all(rank.busy_since for rank in ranks_of(here)[1:]))
            else:
                await until(lambda: bool(begun))
            await lost.die()

        async def call() -> None:
            if dies == "while it is added":
                await swallow(lost.reduce(ones(9)))

        sums = list[float]()

        async def survive(trainer: Trainer) -> None:
            sums.append(float((await trainer.reduce(ones(9)))[0]))

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


async def test_a_trainer_that_lies_about_its_values_fails_only_its_job(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        others = await here.job(*here.machines * 2, name="other")
        honest, liar = await here.job(*here.machines * 2)
        call = Call("all_reduce", "float32", (40_000,), "sum")

        async def lie() -> str:
            arena = await liar.input_arena(8)
            reply = await liar.ask(StartOp(OpNumber(0), call, "float32", 2, arena, 60.0))
            assert isinstance(reply, OpFailed)
            return reply.verdict.error

        async def be_honest() -> str:
            with pytest.raises(OpError) as caught:
                await run(honest, call, ones(40_000))
            return caught.value.verdict.error

        assert await together(lie, be_honest) == ["LaneBroken"] * 2
        assert [x[0] for x in await reduce_all(others)] == [2.0] * 2
