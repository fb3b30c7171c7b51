"""Trainers that enter a running job in one of its syncs, or come back to it (O6)."""

from functools import partial
from typing import Literal

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.jobs import session as sessions_module
from pmesh.core.views import room
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import ENTERS, SYNC_VALUES, OpFailed, StartOp
from pmesh.ids import OpNumber
from tests.worlds.faults import Faults
from tests.worlds.trainer import TrainerClient, together, until
from tests.worlds.village import Machine, Village, training, village
from tests.worlds.village_ops import (
    enter,
    hold_all_reduces,
    kinds_of_events,
    ones,
    ranks_of,
    reduce_all,
    swallow,
    syncing_job,
    turned_away,
    verdicts_of_all,
)

SYNC = Call("sync", "int64", (SYNC_VALUES,))


async def newcomer(here: Village, machine: Machine) -> TrainerClient:
    """A trainer that has joined the running job, and not entered it."""
    trainer = await here.trainer(machine)
    joined = await trainer.join("digits", 1)
    assert joined.world.rank == -1
    return trainer


async def test_a_sync_gives_each_rank_what_all_have_given(clock: MockClock) -> None:
    async with training(clock, 3) as (_, trainers):
        for _ in range(3):
            results = await together(*[partial(t.sync, 7 + t.rank) for t in trainers])
            assert results == [[7, 8, 9]] * 3


async def test_a_newcomer_joins_at_once_and_has_everything_after_its_first_sync(
    clock: MockClock,
) -> None:
    async with village(clock, 3) as here:
        one, two, three = here.machines
        pair = await syncing_job(here, one, two)
        began = clock.current_time()
        late = await newcomer(here, three)
        assert clock.current_time() - began < 0.1
        assert late.names == pair[0].names
        for _ in range(2):  # while it prepares its state nobody waits for it
            assert await together(*[partial(t.sync, t.rank) for t in pair]) == [[0, 1]] * 2
        results = await enter(here, [late], pair)
        assert results[0] == results[1] == results[2]
        assert sorted(results[0]) == [0, 1, 100]
        assert late.world.trainers == pair[0].world.trainers
        assert late.names == pair[0].names
        assert late.next_op == pair[0].next_op
        assert [r[0] for r in await reduce_all([*pair, late])] == [3.0] * 3
        for root in range(3):
            x = np.full(9, root, np.float32)
            calls = [partial(t.broadcast, x, root) for t in [*pair, late]]
            assert [g[0] for g in await together(*calls)] == [root] * 3


async def test_a_newcomer_costs_the_others_one_view_and_no_part_of_an_op(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        pair = await syncing_job(here, *here.machines[:2])
        late = await newcomer(here, here.machines[2])
        before = here.machines[0].agent.membership.view.epoch.counter
        await enter(here, [late], pair)
        await trio.sleep(1)
        assert here.machines[0].agent.membership.view.epoch.counter == before + 1
        reruns = [kinds_of_events(machine).count("op rerun") for machine in here.machines]
        assert max(reruns) == 0  # the ring had not begun


async def test_several_newcomers_enter_in_one_sync_two_of_them_on_one_machine(
    clock: MockClock,
) -> None:
    async with village(clock, 3) as here:
        one, two, three = here.machines
        inside = await syncing_job(here, one)
        late = [await newcomer(here, machine) for machine in (two, three, three)]
        results = await enter(here, late, inside)
        assert all(sorted(result) == [0, 100, 101, 102] for result in results)
        assert inside[0].rank == 0  # the oldest stays rank 0
        assert sorted(t.id for t in late) == [1, 2, 3]
        assert [r[0] for r in await reduce_all([*inside, *late])] == [4.0] * 4


async def test_the_first_op_of_all_may_be_the_sync_in_which_a_newcomer_enters(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(here.machines[0], here.machines[0])
        late = await newcomer(here, here.machines[1])  # nobody has called anything yet
        results = await enter(here, [late], [a, b])
        assert sorted(results[0]) == [0, 1, 100]
        assert late.rank >= 0
        assert late.next_op == 1
        assert late.names == a.names
        assert [r[0] for r in await reduce_all([a, b, late])] == [3.0] * 3


async def test_beside_a_sync_that_has_just_completed_it_enters_at_the_next(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with village(clock, 3) as here:
        one, two, three = here.machines
        a, b = await syncing_job(here, one, two)
        held = hold_all_reduces(monkeypatch, size=2, ranks=[1], complete=True)
        late = await newcomer(here, three)
        seen: list[int] = []

        async def come_late() -> None:
            await until(lambda: held == [1])  # the other rank has its result
            await until(lambda: a.next_op == 2)
            async with trio.open_nursery() as inner:
                inner.start_soon(late.sync, 9)
                await until(lambda: one.agent.jobs.newcomers(one.agent.jobs.ranks[0]) == 1)
                monkeypatch.undo()
                seen.extend(await a.sync(5))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(come_late)
            nursery.start_soon(a.sync, 3)
            assert await b.sync(4) == [3, 4]
            assert b.names == a.names
            await b.sync(6)
        assert sorted(seen) == [5, 6, 9]
        assert late.next_op == a.next_op == b.next_op == 3


async def test_a_newcomer_that_dies_while_it_waits_is_forgotten(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        inside = await syncing_job(here, one, one)
        late = await newcomer(here, two)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swallow, late.sync())
            await until(lambda: len(two.agent.jobs.waiters) == 1)
            await late.die()
        await until(lambda: not two.agent.jobs.waiters)
        assert await together(*[partial(t.sync, t.rank) for t in inside]) == [[0, 1]] * 2


async def test_a_newcomer_whose_job_ends_while_it_waits_begins_the_next_run(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        (inside,) = await syncing_job(here, one)
        late = await newcomer(here, two)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(late.sync, 5)
            await until(lambda: len(two.agent.jobs.waiters) == 1)
            await inside.leave()
        assert (late.rank, late.names, late.next_op) == (0, ("mac-1",), 1)
        assert (await late.reduce(ones(4)))[0] == 1.0


async def test_a_newcomer_waits_no_longer_than_it_wants_to(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        inside = await syncing_job(here, here.machines[0])
        late = await newcomer(here, here.machines[1])
        verdict = await late.verdict_of(late.sync(timeout_s=25.0))
        assert verdict.error == "NotEnoughRanks"
        assert verdict.message == "job 'digits' has not called mesh.sync() within 25 s"
        assert [wait.op for wait in late.waits] == [ENTERS] * 24
        await trio.sleep(1)
        await enter(here, [late], inside)  # and it may ask again


async def test_a_newcomer_for_which_a_view_has_no_room_is_told_so(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 1) as here:
        (inside,) = await syncing_job(here, here.machines[0])
        late = await newcomer(here, here.machines[0])
        faults.limit(room, "SHARE_BYTES", 1)

        async def sync_often() -> None:
            for _ in range(5):
                await trio.sleep(1.0)
                await inside.sync()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sync_often)
            verdict = await late.verdict_of(late.sync(timeout_s=5.0))
        assert verdict.error == "NotEnoughRanks"
        assert verdict.message == (
            "job 'digits' has let in no trainer of this machine for 5 s: the view has no room for "
            "more trainers of this machine until others end"
        )
        assert all("has no room" in wait.on[-1] for wait in late.waits)


async def test_a_job_that_turns_out_never_to_sync_refuses_who_waits_for_one(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        inside = await here.job(here.machines[0], here.machines[0])
        late = await newcomer(here, here.machines[1])  # it has not run anything yet

        async def run_something_else() -> None:
            await until(lambda: len(here.machines[1].agent.jobs.waiters) == 1)
            await reduce_all(inside)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_something_else)
            verdict = await late.verdict_of(late.sync())
        assert verdict.error == "JobRunning"
        assert "never calls mesh.sync()" in verdict.message


@pytest.mark.parametrize(
    "request_",
    [
        StartOp(OpNumber(0), Call("barrier", "float32", (0,)), "float32", 0, -1, 5.0),
        StartOp(OpNumber(1), Call("barrier", "float32", (0,)), "float32", 0, -1, 5.0),
        StartOp(OpNumber(ENTERS), Call("barrier", "float32", (0,)), "float32", 0, -1, 5.0),
    ],
    ids=str,
)
async def test_a_newcomer_that_does_not_begin_with_a_sync_is_garbage(
    clock: MockClock, request_: StartOp
) -> None:
    async with village(clock, 2) as here:
        inside = await syncing_job(here, here.machines[0])
        late = await newcomer(here, here.machines[1])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inside[0].sync)
            await late.send(request_)
            with pytest.raises(trio.EndOfChannel):
                await late.receive()
        await until(lambda: turned_away(here.machines[1]) == 1)
        await until(lambda: len(ranks_of(here)) == 1)
        assert (await inside[0].reduce(ones(4)))[0] == 1.0


@pytest.mark.parametrize("wire", [("float32", SYNC_VALUES), ("int64", SYNC_VALUES + 1)])
async def test_a_sync_of_anything_else_than_its_values_is_garbage(
    clock: MockClock, wire: tuple[Literal["float32", "int64"], int]
) -> None:
    async with village(clock, 2) as here:
        a, b = await syncing_job(here, *here.machines)
        arena = await b.input_arena(1000)
        await b.send(StartOp(OpNumber(1), SYNC, *wire, arena, 5.0))
        with pytest.raises(trio.EndOfChannel):
            await b.receive()
        assert await a.sync(3) == [3]


async def test_a_job_that_turns_out_to_run_where_the_mesh_is_met_later_is_entered_by_a_sync(
    clock: MockClock,
) -> None:
    async with village(clock, 1) as here:
        inside = await syncing_job(here, here.machines[0])
        away = here.new_machine("away")
        await away.start()
        late = await here.trainer(away)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(late.join, "digits", 2)
            await until(lambda: len(away.agent.jobs.waiters) == 1)
            away.agent.peers.targets.aim_at(here.machines[0].address)
            await here.settle(here.machines[0], away)
            await until(lambda: late.joined is not None)
        assert late.rank == -1
        assert late.names == ("mac-0",)
        assert await inside[0].sync(1) == [1]  # nobody waits for it
        await enter(here, [late], inside)
        assert late.names == inside[0].names


async def test_who_is_in_the_job_already_may_ask_to_enter_and_is_not_let_in_twice(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        a, b = await syncing_job(here, *here.machines)
        b.superseded = True  # as it takes itself to be
        assert await together(partial(a.sync, 1), partial(b.sync, 2)) == [[1, 2]] * 2
        assert (a.next_op, b.next_op) == (2, 2)


async def test_what_is_refused_as_an_op_is_no_end_of_the_session(
    clock: MockClock, faults: Faults
) -> None:
    faults.limit(sessions_module, "SAY_EVERY_S", 1.0)
    async with village(clock, 2) as here:
        inside = await syncing_job(here, here.machines[0])
        late = await newcomer(here, here.machines[1])
        arena = await late.input_arena(SYNC_VALUES * 8)
        start = StartOp(OpNumber(ENTERS), SYNC, "int64", SYNC_VALUES, arena, 2.5)
        reply = await late.ask(start)
        assert isinstance(reply, OpFailed)
        assert reply.op == ENTERS
        assert len(late.waits) == 2
        verdicts = await verdicts_of_all((late, late.sync(timeout_s=1.0)))
        assert verdicts[0].error == "NotEnoughRanks"
        assert inside[0].names == ("mac-0",)
