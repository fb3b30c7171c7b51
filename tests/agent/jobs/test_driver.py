"""The jobs of whole agents, as machines and trainers come and go."""

from functools import partial

import numpy as np
import trio
from trio.testing import MockClock

from pmesh.agent.jobs import retained
from pmesh.agent.mesh.membership import DOUBT_S
from pmesh.core.wire.lanes import AskResult
from pmesh.errors import LaneBroken
from pmesh.ids import OpNumber
from pmesh.net.sessions.processes import Stall
from simulation.wire import AnyMessage
from tests.worlds.faults import Faults
from tests.worlds.trainer import TrainerClient, together
from tests.worlds.village import training, village
from tests.worlds.village_ops import cut, enter


async def reduce_all(trainers: list[TrainerClient]) -> list[float]:
    x = np.ones(100, np.float32)
    results = await together(*[partial(t.reduce, x) for t in trainers])
    return [float(r[0]) for r in results]


async def test_both_sides_of_a_cut_go_on_and_one_history_wins_when_they_meet(
    clock: MockClock,
) -> None:
    """V9: the other's trainers hear it at their next op, and come back by a sync."""
    async with village(clock, 3) as here:
        one, two, three = here.machines
        trainers = await here.job(one, two, three)
        assert await together(*[t.sync for t in trainers]) == [[0, 0, 0]] * 3
        alone = next(t for t in trainers if t.names[t.rank] == "mac-2")
        pair = [t for t in trainers if t is not alone]
        async with cut(three, one, two):
            assert await reduce_all(pair) == [2.0, 2.0]
            assert await reduce_all([alone]) == [1.0]
            assert alone.names == ("mac-2",)
        await here.settle(one, two, three)
        for _ in range(2):  # a call that fails so does not use up its number
            verdict = await alone.verdict_of(alone.barrier())
            assert verdict.error == "HistorySuperseded"
            assert "mesh.sync()" in verdict.message
        assert await reduce_all(pair) == [2.0, 2.0]
        await enter(here, [alone], pair)
        assert alone.rank == 2
        assert await reduce_all([*pair, alone]) == [3.0] * 3


async def test_a_job_on_one_machine_outlives_every_cut(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        trainers = [await here.job(m, m, name=f"only-{i}") for i, m in enumerate((one, two))]
        for _ in range(2):
            async with cut(one, two):
                for both in trainers:
                    assert await reduce_all(both) == [2.0, 2.0]
            await here.settle(one, two)
            for both in trainers:
                assert await reduce_all(both) == [2.0, 2.0]


async def test_jobs_that_a_change_does_not_concern_run_on(clock: MockClock) -> None:
    """V7."""
    async with village(clock, 3) as here:
        *pair, third = here.machines
        ours, theirs = await here.job(*pair, name="ours"), await here.job(third, name="theirs")
        before = [lane for machine in pair for lane in machine.lanes()]
        assert await reduce_all(ours) == [2.0, 2.0]
        await theirs[0].die()
        await third.kill()
        await here.settle(*pair)
        assert await reduce_all(ours) == [2.0, 2.0]
        lanes = [lane for machine in pair for lane in machine.lanes()]
        assert not before or lanes == before


async def test_after_an_own_stall_an_op_ends_only_when_the_others_confirm_the_view(
    clock: MockClock, faults: Faults
) -> None:
    """V8."""
    async with village(clock, 2) as here:
        one, _ = here.machines
        trainers = await here.job(*here.machines)
        await reduce_all(trainers)
        (rank,) = one.agent.jobs.ranks
        (live,) = one.agent.peers.links.values()
        unsent = list[AnyMessage]()
        with faults.instead(live, "send", unsent.append):  # nobody is asked yet
            one.agent.membership.judge(Stall(late_s=DOUBT_S, slept_s=0.0))
        theirs = next(t for t in trainers if t.names[t.rank] == "mac-0")
        async with trio.open_nursery() as nursery:
            for trainer in trainers:
                nursery.start_soon(trainer.barrier)
            await trio.sleep(0.1)
            assert theirs.next_op == 1
            assert rank.ledger.started == 1
            for message in unsent:
                live.send(message)
        assert theirs.next_op == 2


async def test_the_only_rank_of_a_job_does_not_tell_its_peers_of_each_op(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 2) as here:
        (trainer,) = await here.job(here.machines[0])
        faults.forbid(here.machines[0].agent.jobs, "beat")
        for _ in range(20):
            await trainer.barrier()


async def test_a_fetch_that_breaks_on_its_way_ends_nobody(clock: MockClock, faults: Faults) -> None:
    faults.fail(retained, "serve_result", LaneBroken("the data connection to mac-1 ended"))
    async with training(clock, 2) as (here, trainers):
        jobs = here.machines[0].agent.jobs
        (rank,) = jobs.ranks
        r = rank.roster
        (other,) = [trainer for trainer in r.ids if trainer != rank.id]
        ask = AskResult(r.job, r.born, r.number, OpNumber(0), rank.id, other)
        jobs.results.answer(here.machines[1].agent.jobs.me, ask)
        assert await reduce_all(trainers) == [2.0, 2.0]
