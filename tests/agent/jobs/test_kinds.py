"""Every kind of collective across whole agents, and the requests that no client makes."""

import math
from functools import partial
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.jobs import op_task
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.jobs.requests import check_request
from pmesh.core.ops.plan import RankPlan
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import StartOp
from pmesh.errors import LaneBroken, ProtocolError
from pmesh.ids import OpNumber, TrainerId
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import OpError, TrainerClient, together, until
from tests.worlds.village import training, village
from tests.worlds.village_ops import ones, ranks_of, reduce_all, run, swallow, use_lanes


def block(rank: int, size: int) -> Values:
    return np.full(size, rank, np.float32)


@pytest.mark.parametrize("places", [(0, 1), (0, 1, 2), (0, 1, 0, 1)])
async def test_every_kind_brings_each_rank_what_is_its(
    clock: MockClock, places: tuple[int, ...]
) -> None:
    async with village(clock, max(places) + 1) as here:
        trainers = await here.job(*[here.machines[place] for place in places])
        clock.autojump_threshold = math.inf  # it doesn't see that the library's threads work
        size = len(trainers)
        sizes = tuple(3 * rank + 1 for rank in range(size))
        whole = np.concatenate([block(rank, sizes[rank]) for rank in range(size)])

        async def call(trainer: TrainerClient, root: int) -> None:
            rank = trainer.rank
            own, nothing = block(rank, sizes[rank]), block(0, 0)
            summed = ones(7) * sum(range(size))

            def rooted(kind: str, reduction: str = "") -> Call:
                return Call(kind, "float32", (), reduction, root)

            np.testing.assert_array_equal(
                await run(trainer, Call("all_gather", "float32", ()), own, sizes), whole
            )
            got = await run(trainer, rooted("gather"), own, sizes)
            np.testing.assert_array_equal(got, whole if rank == root else nothing)
            given = whole if rank == root else nothing
            got = await run(trainer, rooted("scatter"), given, sizes)
            np.testing.assert_array_equal(got, own)
            got = await run(trainer, rooted("reduce", "sum"), block(rank, 7))
            np.testing.assert_array_equal(got, summed if rank == root else nothing)
            scattering = Call("reduce_scatter", "float32", (), "sum")
            got = await run(trainer, scattering, block(rank, whole.size), sizes)
            np.testing.assert_array_equal(got, np.full(sizes[rank], summed[0]))
            to = tuple(rank + other for other in range(size))
            xs = np.concatenate([block(10 * rank + other, to[other]) for other in range(size)])
            got = await run(trainer, Call("all_to_all", "float32", ()), xs, to, to)
            expected = [block(10 * other + rank, to[other]) for other in range(size)]
            np.testing.assert_array_equal(got, np.concatenate(expected))
            table = await run(trainer, collecting(9), np.full(9, rank, np.uint8))
            np.testing.assert_array_equal(table.reshape(size, 9)[:, 0], range(size))
            for strategy in ("ring", "tree", "centralized", "hierarchical", "chain", "direct"):
                reducing = Call("all_reduce", "float32", (7,), "sum", strategy=strategy)
                np.testing.assert_array_equal(await run(trainer, reducing, block(rank, 7)), summed)

        for root in range(size):
            await together(*[partial(call, trainer, root) for trainer in trainers])


ONES = (1, 1, 1)


@pytest.mark.parametrize(
    ("call", "gives", "parts", "parts_in"),
    [
        (Call("all_gather", "float32", ()), (1, 1), ONES, ()),
        (Call("gather", "float32", (), root=0), (1, 1), ONES, ()),
        (Call("scatter", "float32", (), root=0), (3, 0), ONES, ()),
        (Call("reduce_scatter", "float32", (), "sum"), (3, 3), ONES, ()),
        (Call("all_to_all", "float32", ()), (3, 3), ONES, ONES),
    ],
    ids=lambda value: value.kind if isinstance(value, Call) else "",
)
async def test_what_is_bound_to_its_ranks_fails_for_all_who_are_left_and_they_go_on(
    clock: MockClock,
    call: Call,
    gives: tuple[int, ...],
    parts: tuple[int, ...],
    parts_in: tuple[int, ...],
) -> None:
    """O4; also for who had its part already, and is told at its next call."""
    async with training(clock, 3) as (here, trainers):
        *left, lost = trainers

        async def call_and_call_again(trainer: TrainerClient) -> None:
            await run(trainer, call, ones(gives[trainer.rank]), parts, parts_in)
            await until(lambda: all(rank.size == 2 for rank in ranks_of(here)))
            await reduce_all([trainer])

        async def fail(trainer: TrainerClient) -> str:
            with pytest.raises(OpError) as caught:
                await call_and_call_again(trainer)
            return caught.value.verdict.error

        errors = await together(*[partial(fail, trainer) for trainer in left], partial(die, lost))
        assert errors[:2] == ["RosterChanged"] * 2
        assert [x[0] for x in await reduce_all(left)] == [2.0, 2.0]


def collecting(count: int) -> Call:
    return Call("collect", "uint8", (count,), compression="topk(0.1)")


@pytest.mark.parametrize("count", [0, 5, 200_000])
async def test_a_collect_that_loses_a_rank_runs_again_among_the_rest(
    clock: MockClock, count: int
) -> None:
    async with training(clock, 3) as (here, trainers):
        first, lost, last = trainers
        dice = np.random.default_rng(1)
        rows = {t.id: dice.integers(0, 256, count).astype(np.uint8) for t in trainers}

        async def collect(trainer: TrainerClient) -> Values:
            return await run(trainer, collecting(count), rows[trainer.id])

        async def lose() -> Values:
            await until(
                lambda: all(rank.busy_since for rank in (ranks_of(here)[0], *ranks_of(here)[2:]))
            )
            await lost.die()
            return np.empty(0)

        tables = await together(partial(collect, first), partial(collect, last), lose)
        expected = np.concatenate([rows[first.id], rows[last.id]])
        for table, trainer in zip(tables[:2], (first, last), strict=True):
            assert len(trainer.names) == 2
            assert table[: 2 * count].tobytes() == expected.tobytes()


@pytest.mark.parametrize("together_on_one", [False, True])
async def test_who_missed_the_end_of_a_collect_fetches_the_rows_of_those_who_were_left(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults, *, together_on_one: bool
) -> None:
    misses, held = iter([True]), list[int]()

    async def miss_the_end(
        real: Real, plan: RankPlan, *lanes: object, result: memoryview, **call: object
    ) -> None:
        if plan.size > 2:
            held.append(plan.size)
            await trio.sleep_forever()  # until one is lost
        await real(plan, *lanes, result=result, **call)
        if next(misses, False):
            result[:] = bytes(len(result))
            raise LaneBroken("its last record never arrived")

    use_lanes(monkeypatch)
    faults.around(op_task, "run_plan", miss_the_end)
    async with village(clock, 3) as here:
        one, two, three = here.machines
        *left, lost = await here.job(*([one, one, one] if together_on_one else [one, two, three]))

        async def lose() -> Values:
            await swallow(run(lost, collecting(9), np.full(9, 7, np.uint8)))
            return np.empty(0)

        async def kill() -> Values:
            await until(lambda: len(held) == 3)
            await lost.die()
            return np.empty(0)

        calls = [partial(run, t, collecting(9), np.full(9, t.rank, np.uint8)) for t in left]
        for table in (await together(*calls, lose, kill))[:2]:
            np.testing.assert_array_equal(table[:18], np.repeat([0, 1], 9))
        assert next(misses, None) is None


async def die(trainer: TrainerClient) -> str:
    await trainer.die()
    return ""


@pytest.mark.parametrize("loses_root", [False, True])
async def test_a_reduce_runs_again_among_the_rest_unless_its_root_is_lost(
    clock: MockClock, *, loses_root: bool
) -> None:
    async with training(clock, 3) as (_, trainers):
        lost = trainers[2]
        left = trainers[:2]
        call = Call("reduce", "float32", (5,), "sum", 2 if loses_root else 0)

        async def attempt(trainer: TrainerClient) -> str:
            try:
                got = await run(trainer, call, ones(5))
            except OpError as e:
                return e.verdict.error
            return str(got.tolist())

        ended = await together(*[partial(attempt, trainer) for trainer in left], partial(die, lost))
        expected = ["RankLost"] * 2 if loses_root else [str([2.0] * 5), "[]"]
        assert ended[:2] == expected
        assert [x[0] for x in await reduce_all(left)] == [2.0, 2.0]


GOOD = StartOp(OpNumber(0), Call("all_gather", "uint8", ()), "uint8", 1, 0, 1.0, (1, 1))


@pytest.mark.parametrize(
    ("call", "dtype", "count", "parts"),
    [
        (Call("transpose", "float32", ()), "float32", 1, ()),
        (Call("gather", "uint8", (), root=2), "uint8", 1, (1, 1)),
        (Call("broadcast", "uint8", (), root=-1), "uint8", 1, ()),
        (Call("broadcast", "uint8", (), root=0, receivers=(2,)), "uint8", 1, ()),
        (Call("broadcast", "uint8", (), root=0, receivers=(1, 1)), "uint8", 1, ()),
        (Call("exchange", "int64", ()), "int32", 1, ()),
        (Call("collect", "float32", ()), "float32", 1, ()),
        (Call("collect", "uint8", (), compression="int8"), "uint8", 1, ()),
        (Call("exchange", "int64", ()), "int64", 4097, ()),
        (Call("sync", "int64", ()), "int64", 7, ()),
        (Call("all_gather", "uint8", ()), "uint8", 1, (1,)),
        (Call("all_to_all", "uint8", ()), "uint8", 1, (1, 1)),
        (Call("all_reduce", "uint8", (), "mean"), "uint8", 1, ()),
        (Call("reduce_scatter", "int64", (), "mean"), "int64", 2, (1, 1)),
    ],
)
def test_what_no_client_sends_is_refused(
    call: Call, dtype: str, count: int, parts: tuple[int, ...]
) -> None:
    rank = cast("LocalRank", SimpleNamespace(world=(TrainerId(0), TrainerId(1)), id=TrainerId(0)))
    check_request(rank, GOOD)
    request = StartOp(OpNumber(0), call, dtype, count, 0, 1.0, parts)  # type: ignore[arg-type] # a key of WIRE_DTYPES

    with pytest.raises(ProtocolError, match=f"op 0 is {call.kind}"):
        check_request(rank, request)


def test_who_has_not_entered_can_only_sync() -> None:
    rank = cast("LocalRank", SimpleNamespace(world=(), id=TrainerId(0)))
    with pytest.raises(ProtocolError, match="before the sync"):
        check_request(
            rank, StartOp(OpNumber(0), Call("barrier", "float32", ()), "float32", 0, -1, 1.0)
        )
