"""all_gather among ranks of several agents, of which some have several."""

from collections.abc import Awaitable, Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.jobs import op_task
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.jobs.together import SHARED_BYTES, _Work
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.ids import OpNumber
from tests.agent.jobs.machines import KILLED, hold_at_network, machine_at, placed
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import OpError, TrainerClient, together, until
from tests.worlds.village import village
from tests.worlds.village_ops import machine_of, ranks_of, reduce_all, run, swallow

LARGE = SHARED_BYTES // 16  # values of each of four ranks
CALL = Call("all_gather", "float32", ())


def block_of(rank: int, parts: Sequence[int], op: int = 0) -> Values:
    return np.arange(parts[rank], dtype=np.float32) + 100 * rank + op


def all_blocks(parts: Sequence[int], op: int = 0) -> bytes:
    return np.concatenate([block_of(rank, parts, op) for rank in range(len(parts))]).tobytes()


async def gather(trainer: TrainerClient, parts: Sequence[int], op: int = 0) -> bytes:
    return (await run(trainer, CALL, block_of(trainer.rank, parts, op), tuple(parts))).tobytes()


@pytest.mark.parametrize("placement", ["aaab", "abbb", "aabb", "aabc", "abbc"])
async def test_all_get_all_blocks(clock: MockClock, placement: str) -> None:
    async with village(clock, len(set(placement))) as here:
        trainers = await placed(here, placement)
        for parts in [(3, 3, 3, 3), (1, 0, 5, 2), (0, 0, 7, 0), (0, 0, 0, 0), (LARGE,) * 4]:
            results = await together(*[partial(gather, t, parts) for t in trainers])
            assert set(results) == {all_blocks(parts)}


@pytest.mark.parametrize("placement", ["aaab", "aabc"])
async def test_a_large_result_is_in_one_memory_of_a_machine(
    clock: MockClock, faults: Faults, placement: str
) -> None:
    faults.skip(LocalRank, "stabilize")
    async with village(clock, len(set(placement))) as here:
        trainers = await placed(here, placement)
        await together(*[partial(gather, t, (LARGE,) * 4) for t in trainers])
        arenas = [[*rank.results.values()][-1].arena for rank in ranks_of(here)]
        assert len({arena and (arena.of or arena) for arena in arenas}) == len(set(placement))


@pytest.mark.parametrize("placement", ["ab", "aabb", "abbb", "aabc"])
async def test_the_blocks_of_a_machine_are_sent_once(clock: MockClock, placement: str) -> None:
    count, machines = LARGE, sorted(set(placement))
    async with village(clock, len(machines)) as here:
        trainers = await placed(here, placement)
        await together(*[partial(gather, t, (count,) * len(trainers)) for t in trainers])
        for at, letter in enumerate(machines):  # all but the block of the machine after it
            following = machines[(at + 1) % len(machines)]
            most = 4 * count * (len(trainers) - placement.count(following))
            sent = machine_at(here, letter).agent.jobs.traffic[0]
            assert most <= sent < 1.01 * most


async def test_calls_that_differ_are_noticed(clock: MockClock) -> None:
    """O8."""
    for odd in range(4):
        async with village(clock, 2) as here:
            trainers = await placed(here, "aabb")
            calls = [
                partial(t.verdict_of, t.barrier() if t.rank == odd else gather(t, (3,) * 4))
                for t in trainers
            ]
            assert {verdict.error for verdict in await together(*calls)} == {"OpMismatch"}


@pytest.mark.parametrize("count", [9, LARGE])
@pytest.mark.parametrize("dies", KILLED)
async def test_who_dies_while_its_machine_is_at_the_network_fails_it_for_all(
    clock: MockClock, faults: Faults, dies: str, count: int
) -> None:
    """O4: it names a block of each rank."""
    at_network, parts = hold_at_network(faults), (count,) * 5
    async with village(clock, 2) as here:
        trainers = await placed(here, "aaabb")
        lost = trainers[:3] if dies == "the agent" else [trainers[KILLED.index(dies)]]
        left = [trainer for trainer in trainers if trainer not in lost]

        async def lose() -> None:
            await until(lambda: len(at_network) == 2)
            await (machine_of(here, lost[0]).kill() if len(lost) > 1 else lost[0].die())

        calls = [partial(swallow, gather(trainer, parts)) for trainer in lost]
        errors = set[str]()

        async def fail(trainer: TrainerClient) -> None:
            errors.add((await trainer.verdict_of(gather(trainer, parts))).error)

        await together(lose, *calls, *[partial(fail, trainer) for trainer in left])
        assert errors == {"RosterChanged"}
        assert [x[0] for x in await reduce_all(left)] == [len(left)] * len(left)


async def test_an_attempt_that_has_ended_sends_no_blocks(clock: MockClock, faults: Faults) -> None:
    """V3: also if it ends just as the blocks of a machine have been put together."""
    attempts, sent = list[trio.CancelScope](), list[OpNumber]()

    def begin(real: Real, rank: LocalRank, *deadline: float) -> trio.CancelScope:
        scope: trio.CancelScope = real(rank, *deadline)
        attempts.append(scope)
        return scope

    async def finish(real: Real, work: _Work) -> None:
        await real(work)
        if sent:
            for scope in attempts:
                scope.cancel()

    async def run_plan(real: Real, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - as it is
        sent.append(args[3].op)
        await real(*args, **settings)

    faults.around(LocalRank, "attempt", begin)
    faults.around(op_task, "run_plan", run_plan)
    async with village(clock, 2) as here:
        trainers = await placed(here, "aabb")
        await together(*[trainer.barrier for trainer in trainers])  # the lanes are open
        faults.around(_Work, "finish", finish)
        await together(*[partial(t.verdict_of, gather(t, (9,) * 4)) for t in trainers])
        assert OpNumber(1) not in sent


@pytest.mark.parametrize("seed", range(12))
async def test_whoever_is_killed_at_any_moment_leaves_the_others_the_same_blocks(
    clock: MockClock, seed: int
) -> None:
    """O4: of each op, all have all blocks, or all learn that the ranks have changed."""
    random = Random(seed)  # noqa: S311 - no secret
    placement = random.choice(["aabb", "aaab", "abbb", "aabc", "abbc"])
    count, moments = random.choice([9, LARGE]), random.randrange(random.choice([60, 600]))
    async with village(clock, len(set(placement))) as here:
        trainers = await placed(here, placement)
        victim, alone = random.randrange(4), random.random() < 0.75
        lost = [
            trainer
            for i, trainer in enumerate(trainers)
            if i == victim or (not alone and placement[i] == placement[victim])
        ]
        left = [trainer for trainer in trainers if trainer not in lost]
        errors = set[str]()

        async def train(trainer: TrainerClient) -> None:
            parts = (count,) * 4
            for op in range(5):
                assert await gather(trainer, parts, op) == all_blocks(parts, op)

        async def ends_well(call: Awaitable[None]) -> bool:
            try:
                await call
            except OpError as e:
                errors.add(e.verdict.error)
                return False
            return True

        async def survive(trainer: TrainerClient) -> None:
            """I5: who has all blocks of an op that fails learns of it in its next call."""
            await ends_well(train(trainer))
            while not await ends_well(trainer.barrier()):
                pass

        async def lose() -> None:
            for _ in range(moments):
                await trio.lowlevel.checkpoint()
            at = machine_at(here, placement[victim])
            await (trainers[victim].die() if alone else at.kill())

        calls = [partial(swallow, train(trainer)) for trainer in lost]
        await together(lose, *calls, *[partial(survive, trainer) for trainer in left])
        assert errors <= {"RosterChanged"}
        assert [x[0] for x in await reduce_all(left)] == [len(left)] * len(left)
