"""Ops that a trainer sends without waiting for the answers to those before."""

from collections.abc import Sequence

import numpy as np
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import OpDone, OpFailed, StartOp
from pmesh.ids import OpNumber
from tests.worlds.trainer import PATIENCE_S, TrainerClient, together
from tests.worlds.village import training, village

COUNT = 16
BYTES = 4 * COUNT


async def sent(trainer: TrainerClient, numbers: Sequence[int], *, values: Sequence[float]) -> None:
    """Send ops of these numbers at once, in which all values are the same."""
    arena = await trainer.input_arena(BYTES * len(values))
    call = Call("all_reduce", "float32", (COUNT,), "sum")
    for place, (number, value) in enumerate(zip(numbers, values, strict=True)):
        region = slice(place * BYTES, (place + 1) * BYTES)
        trainer.maps[arena][region] = np.full(COUNT, value, np.float32).tobytes()
        request = StartOp(OpNumber(number), call, "float32", COUNT, arena, 60.0)
        await trainer.send(replace(request, offset=region.start, follows=place > 0))


async def read_at_the_end(trainer: TrainerClient, count: int) -> list[float]:
    """Wait for so many results; then read all of them."""
    replies = [await trainer.receive() for _ in range(count)]
    found = list[float]()
    for reply in replies:
        assert isinstance(reply, OpDone)
        result = np.frombuffer(trainer.maps[reply.arena], np.float32, COUNT)
        assert (result == result[0]).all()
        found.append(float(result[0]))
    return found


@pytest.mark.parametrize("machines", [1, 2])
async def test_no_result_is_overwritten_before_all_are_read(
    clock: MockClock, machines: int
) -> None:
    async with training(clock, machines) as (_, trainers):

        async def reduce(trainer: TrainerClient) -> list[list[float]]:
            found = list[list[float]]()
            for first in (0, 8, 16):
                values = [first + k for k in range(8)]
                await sent(trainer, range(first, first + 8), values=values)
                found.append(await read_at_the_end(trainer, 8))
            return found

        results = await together(*[lambda t=t: reduce(t) for t in trainers])
        assert results == [[[machines * (f + k) for k in range(8)] for f in (0, 8, 16)]] * machines


async def test_what_follows_a_failure_is_void_until_an_op_that_follows_nothing(
    clock: MockClock,
) -> None:
    async with training(clock, 2) as (_, trainers):

        async def differs(trainer: TrainerClient) -> list[float]:
            await trainer.verdict_of(trainer.barrier())
            trainer.next_op = 1
            return [float((await trainer.reduce(np.full(COUNT, 5.0, np.float32)))[0])]

        async def reduce(trainer: TrainerClient) -> list[float]:
            await sent(trainer, range(3), values=[1, 2, 3])
            failed = await trainer.receive()
            assert isinstance(failed, OpFailed)
            assert (failed.op, failed.verdict.error) == (0, "OpMismatch")
            await sent(trainer, [1], values=[5])
            return await read_at_the_end(trainer, 1)

        one, two = trainers
        assert await together(lambda: differs(one), lambda: reduce(two)) == [[10], [10]]


async def test_a_trainer_dies_with_ops_that_it_has_sent(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        machine = here.machines[0]
        one, two = await here.job(machine, machine)
        await sent(one, range(3), values=[1, 2, 3])
        await one.die()
        with trio.fail_after(PATIENCE_S):
            sums = [float((await two.reduce(np.ones(COUNT, np.float32)))[0]) for _ in range(4)]
        assert sums[-1] == 1
        assert len(two.names) == 1
