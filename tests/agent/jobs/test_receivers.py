"""Broadcasts for some ranks only: they go no further than that, and who got nothing serves none."""

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.jobs import op_task
from pmesh.agent.jobs.op_task import Op
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.core.ops.reductions import Values
from pmesh.errors import LaneBroken
from pmesh.ids import OpNumber
from tests.worlds.trainer import Trainer, together, until
from tests.worlds.village import village
from tests.worlds.village_ops import ones, ranks_of, reduce_all, swallow

X = np.arange(300_000, dtype=np.float32)


async def broadcast_all(
    trainers: list[Trainer], root: int, receivers: tuple[int, ...]
) -> list[Values]:
    return await together(*[lambda t=t: t.broadcast(X, root, receivers) for t in trainers])


@pytest.mark.parametrize(
    ("root", "receivers", "senders"),
    [
        (1, (2,), [1]),
        (1, (3,), [1, 2]),
        (3, (0, 1), [3, 0]),
        (2, (1,), [2, 3, 0]),
        (0, (0,), []),
        (0, (), [0, 1, 2]),
    ],
)
async def test_the_values_go_along_the_ring_to_the_last_who_lacks_them(
    clock: MockClock, root: int, receivers: tuple[int, ...], senders: list[int]
) -> None:
    async with village(clock, 4) as here:
        trainers = await here.job(*here.machines)
        await reduce_all(trainers, ones(4))
        before = [rank.lanes.traffic[0] for rank in ranks_of(here)]
        results = await broadcast_all(trainers, root, receivers)
        for receiver in receivers:
            assert np.array_equal(results[receiver], X)
        sent = [rank.lanes.traffic[0] - b for rank, b in zip(ranks_of(here), before, strict=True)]
        assert [rank for rank, nbytes in enumerate(sent) if nbytes > X.nbytes] == sorted(senders)
        assert [r[0] for r in await reduce_all(trainers)] == [4.0] * 4


async def test_a_receiver_that_is_lost_is_not_waited_for(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        a, b, c = await here.job(*here.machines)
        await reduce_all([a, b, c])
        async with trio.open_nursery() as nursery:

            async def lose_the_receiver() -> None:
                await until(lambda: ranks_of(here)[0].busy_since is not None)
                await c.die()

            nursery.start_soon(lose_the_receiver)
            await together(lambda: a.broadcast(X, 1, (2,)), lambda: b.broadcast(X, 1, (2,)))
        assert [r[0] for r in await reduce_all([a, b])] == [2.0] * 2


@pytest.mark.parametrize("root_dies", [False, True])
async def test_who_missed_it_fetches_it_from_who_has_it_and_not_from_who_heard_of_it(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, *, root_dies: bool
) -> None:
    async with village(clock, 3) as here:
        a, b, c = await here.job(*here.machines)  # b sends to c, and a hears of it
        await reduce_all([a, b, c])
        real, misses = op_task.run_on_lanes, iter([True])

        async def miss_the_end(rank: LocalRank, op: Op, *more: object) -> None:
            await real(rank, op, *more)  # type: ignore[arg-type] # as they came
            if rank.id == c.id and next(misses, False):
                op.result.memory[:] = bytes(len(op.result.memory))
                await until(lambda: a.next_op == b.next_op == 2)
                if root_dies:
                    await b.die()
                    await trio.sleep_forever()
                raise LaneBroken("its last record never arrived")

        monkeypatch.setattr(op_task, "run_on_lanes", miss_the_end)
        _, _, got = await together(
            lambda: a.broadcast(X, 1, (2,)),
            lambda: b.broadcast(X, 1, (2,)),
            lambda: c.broadcast(X, 1, (2,)),
        )
        assert np.array_equal(got, X)
        left = [a, c] if root_dies else [a, b, c]
        assert [r[0] for r in await reduce_all(left)] == [float(len(left))] * len(left)


async def test_a_rank_that_only_heard_of_it_completes_it_also_if_its_root_is_lost_then(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.broadcast, X, 0, (0,))
            await b.broadcast(X, 0, (0,))
        await a.die()
        assert (await b.reduce(ones(9)))[0] == 1.0
        assert ranks_of(here)[-1].results.get(OpNumber(0)) is None


async def test_receivers_that_are_no_ranks_are_garbage(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swallow, b.broadcast(X, 0, (2,)))
            await until(lambda: ranks_of(here)[0].size == 1)
        assert (await a.reduce(ones(9)))[0] == 1.0
