"""Inputs that the trainer has put into an arena itself, and results that it keeps."""

from functools import partial

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.core.ops.reductions import Values
from pmesh.core.values import Terms
from pmesh.core.wire.calls import Call
from pmesh.core.wire.session import DropArena
from pmesh.core.wire.trainer import StartOp
from pmesh.ids import OpNumber
from pmesh.net.sessions.arena_pools import MAX_LENT
from tests.worlds.trainer import TrainerClient, together, until
from tests.worlds.village import training, village
from tests.worlds.village_ops import hold_all_reduces, kinds_of_events, machine_of, ones, reduce_all

COUNT = 20_000
SUM = Call("all_reduce", "float32", (COUNT,), "sum")


def numbered(first: int) -> Values:
    return np.arange(first, first + COUNT, dtype=np.float32)


async def borrow(trainers: list[TrainerClient], values: Values) -> list[Values]:
    """A sum that all of them keep."""
    results = await together(*[partial(t.run, SUM, values, borrows=True) for t in trainers])
    assert all(result is not None for result in results)
    return [result for result in results if result is not None]


def kept(trainer: TrainerClient, number: int) -> Values:
    """What lies in an arena now."""
    return np.frombuffer(trainer.maps[number], np.float32, COUNT).copy()


@pytest.mark.parametrize("offset", [4, 400, 65_536])
async def test_an_op_reads_its_values_where_they_begin(clock: MockClock, offset: int) -> None:
    async with training(clock, 2) as (_, trainers):
        results = await together(
            *[partial(t.run, SUM, numbered(t.rank), offset=offset) for t in trainers]
        )
        for result in results:
            assert result is not None
            assert np.array_equal(result, numbered(0) + numbered(1))


@pytest.mark.parametrize("offset", [2, 65_536])
async def test_values_that_can_not_lie_there_end_the_session(clock: MockClock, offset: int) -> None:
    async with training(clock, 1) as (_, (trainer,)):
        arena = await trainer.input_arena(4 * COUNT)
        await trainer.send(StartOp(OpNumber(0), SUM, "float32", COUNT, arena, 10.0, offset=offset))
        with pytest.raises(trio.EndOfChannel):
            await trainer.receive()


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_result_that_is_kept_stays_as_it_is(clock: MockClock, ranks: int) -> None:
    async with training(clock, ranks) as (_, trainers):
        results = await borrow(trainers, numbered(5))
        for value in range(4):
            await reduce_all(trainers, np.full(COUNT, value, np.float32))
        await trio.sleep(1)  # heartbeats: all of it is stable
        await reduce_all(trainers, ones(COUNT))
        for trainer, result in zip(trainers, results, strict=True):
            (number,) = trainer.lent
            assert np.array_equal(kept(trainer, number), result)
            assert np.array_equal(result, numbered(5) * ranks)


async def test_one_that_comes_back_is_written_again(clock: MockClock) -> None:
    async with training(clock, 1) as (_, (trainer,)):
        await borrow([trainer], numbered(5))
        (number,) = trainer.lent
        await trainer.send(DropArena(number))
        for _ in range(3):
            await reduce_all([trainer], ones(COUNT))
        assert np.array_equal(kept(trainer, number), ones(COUNT))
        await trainer.send(DropArena(number))
        with pytest.raises(trio.EndOfChannel):  # it has been dropped already
            await trainer.receive()


async def test_who_keeps_everything_is_lent_no_more(clock: MockClock) -> None:
    async with training(clock, 2) as (_, trainers):
        for value in range(MAX_LENT + 3):
            await borrow(trainers, np.full(COUNT, value, np.float32))
        for trainer in trainers:
            assert len(set(trainer.lent)) == MAX_LENT
            assert [kept(trainer, n)[0] for n in trainer.lent] == [2 * v for v in range(MAX_LENT)]


async def test_one_that_was_fetched_is_kept_too(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with village(clock, 3) as here:
        trainers = await here.job(*here.machines, terms=Terms(on_loss="continue"))
        await reduce_all(trainers)
        # Rank 0 completes the op; when rank 2 dies, rank 1 fetches its result.
        held = hold_all_reduces(monkeypatch, size=3, ranks=[1, 2], complete=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(borrow, trainers[:2], ones(COUNT))
            nursery.start_soon(_swallowed, trainers[2])
            await until(lambda: len(held) == 2)
            await trainers[2].die()
        for trainer in trainers[:2]:
            await reduce_all(trainers[:2], numbered(1))
            assert (kept(trainer, trainer.lent[0]) == 3).all()
        assert "op fetched" in kinds_of_events(machine_of(here, trainers[1]))


async def _swallowed(trainer: TrainerClient) -> None:
    with pytest.raises((trio.ClosedResourceError, trio.EndOfChannel, OSError)):
        await trainer.run(SUM, ones(COUNT))
