"""Trainers whom the others went on without: they hear it, and come back by a sync."""

from collections.abc import Callable

import numpy as np
import trio
from trio.testing import MockClock

from tests.worlds.trainer import TrainerClient, together, until
from tests.worlds.village import Village, village
from tests.worlds.village_ops import enter, machine_of, ones, ranks_of, reduce_all, syncing_job


async def supersede(here: Village, trainer: TrainerClient) -> None:
    """As where its process had been stopped for too long."""
    jobs = machine_of(here, trainer).agent.jobs
    (rank,) = [rank for rank in jobs.ranks if rank.id == trainer.id]
    jobs.depart(rank, "is lost: its trainer has been stopped for 60 s")
    await until(lambda: rank.superseded is not None)


async def test_who_was_expelled_hears_it_at_every_call_until_it_comes_back(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        a, b = await syncing_job(here, *here.machines)
        await supersede(here, b)
        calls: list[Callable[[], object]] = [b.barrier, lambda: b.reduce(ones(9)), b.barrier]
        for call in calls:
            verdict = await b.verdict_of(call())  # type: ignore[arg-type] # awaitables
            assert verdict.error == "HistorySuperseded"
            assert "mesh.sync() brings it back" in verdict.message
        assert (await a.reduce(ones(9)))[0] == 1.0
        assert a.names == (a.names[0],)
        await enter(here, [b], [a])
        assert b.id == 2  # a number is never given twice
        assert b.names == a.names
        assert [r[0] for r in await reduce_all([a, b])] == [2.0] * 2


async def test_who_was_expelled_in_the_middle_of_an_op_hears_it_at_once(
    clock: MockClock,
) -> None:
    async with village(clock, 3) as here:
        a, b, c = await syncing_job(here, *here.machines)
        async with trio.open_nursery() as nursery:

            async def expel() -> None:
                await until(lambda: ranks_of(here)[1].busy_since is not None)
                await supersede(here, b)
                results = await together(lambda: a.reduce(ones(9)), lambda: c.reduce(ones(9)))
                assert [r[0] for r in results] == [2.0] * 2

            nursery.start_soon(expel)
            verdict = await b.verdict_of(b.reduce(ones(9)))
        assert verdict.error == "HistorySuperseded"
        await enter(here, [b], [a, c])
        assert [r[0] for r in await reduce_all([a, b, c])] == [3.0] * 3


async def test_who_comes_back_goes_on_serving_what_it_has_left_behind(
    clock: MockClock,
) -> None:
    async with village(clock, 3) as here:
        a, b, c = await syncing_job(here, *here.machines)
        jobs = machine_of(here, a).agent.jobs
        x = np.arange(9, dtype=np.float32)
        await a.broadcast(x)  # which the others take much later
        await supersede(here, a)
        await a.verdict_of(a.barrier())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.sync, 5)
            await until(lambda: len(jobs.waiters) == 1)
            await trio.sleep(20)
            got = await together(lambda: b.broadcast(x), lambda: c.broadcast(x))
            assert all(np.array_equal(g, x) for g in got)
            await together(b.sync, c.sync)
        assert a.id == 3
        await until(lambda: [rank.id for rank in ranks_of(here)] == [1, 2, 3])
        assert [r[0] for r in await reduce_all([a, b, c])] == [3.0] * 3


async def test_the_only_rank_of_a_job_that_is_given_up_begins_the_next_run(
    clock: MockClock,
) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        (trainer,) = await syncing_job(here, one)
        (rank,) = ranks_of(here)
        one.agent.jobs.depart(rank, "is lost: its trainer has been stopped for 60 s")
        await until(lambda: rank.over is not None)
        assert (await trainer.verdict_of(trainer.barrier())).error == "HistorySuperseded"
        assert await trainer.sync(4) == [4]
        assert (trainer.id, trainer.next_op) == (0, 1)
