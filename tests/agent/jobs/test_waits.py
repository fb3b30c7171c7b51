"""What ops wait for: enough ranks, a majority, and trainers that compute or are stopped."""

import os
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from pmesh.core.values import Terms
from pmesh.net.sessions import processes, sessions
from pmesh.net.sessions.sessions import PeerCredentials
from tests.worlds.faults import Faults
from tests.worlds.trainer import together, until
from tests.worlds.village import training, village
from tests.worlds.village_ops import (
    cut,
    enter,
    kinds_of_events,
    machine_of,
    ones,
    ranks_of,
    reduce_all,
    verdicts_of_all,
)

# --- min_ranks


async def test_with_too_few_ranks_ops_wait_say_so_and_end_at_their_deadline(
    clock: MockClock,
) -> None:
    async with village(clock, 3) as here:
        trainers = await here.job(*here.machines, terms=Terms(min_ranks=3))
        a, b, c = trainers
        await reduce_all(trainers)
        await c.die()
        await until(lambda: all(rank.size == 2 for rank in ranks_of(here)))
        epoch = here.machines[0].agent.membership.view.epoch
        epochs: list[object] = []

        async def look() -> None:
            await trio.sleep(20)
            epochs.append(here.machines[0].agent.membership.view.epoch)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            verdicts = await verdicts_of_all(
                (a, a.reduce(ones(9), timeout_s=25)), (b, b.reduce(ones(9), timeout_s=1000))
            )
        assert epochs == [epoch]  # nobody has asked for another view meanwhile
        assert verdicts[0] == verdicts[1]
        assert verdicts[0].error == "NotEnoughRanks"
        assert "2 of at least 3 ranks (min_ranks) are here" in verdicts[0].message
        for trainer in (a, b):
            assert [round(wait.waited_s) for wait in trainer.waits] == [10, 20]
            assert {wait.on for wait in trainer.waits} == {
                ("missing: more ranks: 2 of at least 3 ranks (min_ranks) are here",)
            }


async def test_with_too_few_ranks_a_sync_goes_on_when_somebody_comes_to_it(
    clock: MockClock,
) -> None:
    async with village(clock, 3) as here:
        trainers = await here.job(*here.machines, terms=Terms(min_ranks=3))
        a, b, c = trainers
        await together(*[t.sync for t in trainers])
        await c.die()
        async with trio.open_nursery() as nursery:
            for trainer in (a, b):
                nursery.start_soon(trainer.sync, trainer.id)
            await trio.sleep(20)
            assert a.next_op == b.next_op == 1
            late = await here.trainer(machine_of(here, c))
            assert (await late.join("digits", 1)).world.rank == -1
            assert sorted(await late.sync(7)) == [0, 1, 7]
        assert [r[0] for r in await reduce_all([a, b, late])] == [3.0] * 3


async def test_the_strictest_terms_hold_for_all(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        a, b = [await here.trainer(machine) for machine in here.machines]
        wants = Terms(min_ranks=2, on_loss="raise")
        await together(partial(a.join, "digits", 2), partial(b.join, "digits", 2, terms=wants))
        await b.die()
        assert (await a.verdict_of(a.barrier())).error == "RankLost"
        assert (await a.verdict_of(a.barrier(timeout_s=5))).error == "NotEnoughRanks"


# --- quorum


async def test_only_the_side_with_the_majority_goes_on_and_then_all_do(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        one, two, three = here.machines
        trainers = await here.job(one, two, three, terms=Terms(quorum="majority"))
        await together(*[t.sync for t in trainers])
        alone = next(t for t in trainers if machine_of(here, t) is three)
        pair = [t for t in trainers if t is not alone]
        async with cut(three, one, two):
            assert [r[0] for r in await reduce_all(pair)] == [2.0] * 2
            verdict = await alone.verdict_of(alone.barrier(timeout_s=15))
            assert verdict.error == "NotEnoughRanks"
            why = "this side of a partition has 1 of 3 ranks, which is no majority"
            assert why in verdict.message
            assert [wait.on for wait in alone.waits] == [(f"missing: more ranks: {why}",)]
        await here.settle(one, two, three)
        assert (await alone.verdict_of(alone.barrier())).error == "HistorySuperseded"
        await enter(here, [alone], pair)
        assert [r[0] for r in await reduce_all([*pair, alone])] == [3.0] * 3


# --- trainers that are stopped, and those that compute


@pytest.fixture
def stopped(faults: Faults) -> set[str]:
    """The machines whose trainers' processes are stopped: here all of them are one process."""
    names: set[str] = set()
    pids: dict[int, str] = {}

    def credentials_of(connection: trio.socket.SocketType) -> PeerCredentials:
        name = Path(connection.getsockname()).parent.name
        pid = 10_000 + int(name.removeprefix("mac-"))
        pids[pid] = name
        return PeerCredentials(uid=os.getuid(), pid=pid)

    faults.pretend(sessions, "credentials_of", credentials_of)
    faults.pretend(processes, "is_stopped", lambda pid: pids[pid] in names)
    faults.hang(processes, "wait_for_exit")
    return names


async def test_a_stopped_trainer_is_named_and_after_a_while_the_others_go_on_without_it(
    clock: MockClock, stopped: set[str]
) -> None:
    async with village(clock, 3) as here:
        trainers = await here.job(*here.machines, straggler_after_s=30.0)
        a, b, c = trainers
        await together(*[t.sync for t in trainers])
        machine, other = machine_of(here, c), machine_of(here, a)
        stopped.add(machine.settings.name)
        began = clock.current_time()
        mark = partial(other.agent.jobs.progress.of, ranks_of(here)[0].roster, c.id)
        await until(lambda: (m := mark()) is not None and m.stopped)
        assert clock.current_time() - began <= 1.0
        results = await reduce_all([a, b])
        assert [r[0] for r in results] == [2.0] * 2
        assert 29 <= clock.current_time() - began <= 32
        assert {w.on for w in a.waits} == {
            (f"missing: rank 2 ({c.names[2]}), whose process is stopped",)
        }
        assert "trainer stopped" in kinds_of_events(machine)
        stopped.clear()
        await trio.sleep(1)
        verdict = await c.verdict_of(c.barrier())
        assert verdict.error == "HistorySuperseded"
        await enter(here, [c], [a, b])
        assert [r[0] for r in await reduce_all([a, b, c])] == [3.0] * 3


async def test_a_trainer_that_was_stopped_for_a_while_is_neither_lost_nor_forgotten(
    clock: MockClock, stopped: set[str]
) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines, straggler_after_s=30.0)
        machine = machine_of(here, b)
        (rank,) = machine.agent.jobs.ranks
        for _ in range(3):  # the time counts from each stop anew
            stopped.add(machine.settings.name)
            await trio.sleep(20)
            assert rank.stopped
            stopped.clear()
            await trio.sleep(1)
            assert not rank.stopped
        assert [r[0] for r in await reduce_all([a, b])] == [2.0] * 2
        kinds = kinds_of_events(machine)
        assert kinds.count("trainer stopped") == kinds.count("trainer continued") == 3
        assert rank.size == 2


async def test_who_waits_is_told_soon_that_another_is_stopped_in_each_op_anew(
    clock: MockClock, stopped: set[str]
) -> None:
    async with training(clock, 2) as (here, (a, b)):
        machine = machine_of(here, b)
        for times in (1, 2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(a.barrier)
                await trio.sleep(3)
                stopped.add(machine.settings.name)
                await trio.sleep(3)
                assert len(a.waits) == times
                assert a.waits[-1].waited_s < 5
                assert a.waits[-1].on == (
                    f"missing: rank 1 ({b.names[1]}), whose process is stopped",
                )
                await b.barrier()  # which its agent does for it


async def test_a_trainer_that_waits_to_enter_and_is_stopped_holds_up_nobody(
    clock: MockClock, stopped: set[str]
) -> None:
    async with village(clock, 2) as here:
        (a,) = await here.job(here.machines[0])
        await a.sync()
        late = await here.trainer(here.machines[1])
        await late.join("digits", 1)
        stopped.add("mac-1")
        await trio.sleep(20)
        assert await a.sync(3) == [3]
        assert late.rank == -1
