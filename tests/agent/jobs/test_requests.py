"""What a request means is found once for its shape, and what a liar could change for each op."""

from types import SimpleNamespace
from typing import cast

import pytest
import trio
from msgspec import structs
from trio.testing import MockClock

from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.jobs.requests import Shapes
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import StartOp
from pmesh.errors import ProtocolError
from pmesh.ids import OpNumber, TrainerId
from tests.worlds.village import training
from tests.worlds.village_ops import ones, reduce_all

SUM = StartOp(OpNumber(0), Call("all_reduce", "float32", (9,), "sum"), "float32", 9, 0, 1.0)
ROWS = StartOp(OpNumber(1), Call("all_gather", "uint8", ()), "uint8", 1, 0, 1.0, (1, 1))


def rank_in(*world: int) -> LocalRank:
    rank = SimpleNamespace(world=tuple(map(TrainerId, world)), id=TrainerId(0))
    return cast("LocalRank", rank)


def test_requests_that_differ_in_number_and_place_have_one_shape() -> None:
    shapes, rank = Shapes(), rank_in(0, 1)
    shape = shapes.of(rank, SUM)
    assert shapes.of(rank, structs.replace(SUM, op=OpNumber(7), arena=3, offset=8)) is shape
    assert shapes.of(rank, structs.replace(SUM, count=8)).extent.gives == 8
    assert shapes.of(rank, structs.replace(SUM, wire_dtype="float64")) is not shape


def test_what_fits_one_world_is_checked_again_in_the_next() -> None:
    shapes, rank = Shapes(), rank_in(0, 1)
    assert shapes.of(rank, ROWS).extent.gets == 2
    with pytest.raises(ProtocolError, match="2 parts for 3 ranks"):
        shapes.of(_with_world(rank, 0, 1, 2), ROWS)


def _with_world(rank: LocalRank, *world: int) -> LocalRank:
    rank.world = tuple(map(TrainerId, world))
    return rank


def test_what_is_wrong_stays_wrong() -> None:
    shapes, rank = Shapes(), rank_in(0, 1)
    wrong = structs.replace(ROWS, parts=(1,))
    for _ in range(2):
        with pytest.raises(ProtocolError):
            shapes.of(rank, wrong)


def test_residuals_are_checked_in_each_op() -> None:
    shapes, rank = Shapes(), rank_in(0, 1)
    call = structs.replace(SUM.call, compression="int8")
    good = structs.replace(SUM, call=call, residual=1, residual_out=2)
    shapes.of(rank, good)
    with pytest.raises(ProtocolError, match="values and residuals in one arena"):
        shapes.of(rank, structs.replace(good, residual_out=1))
    shapes.of(rank, SUM)
    with pytest.raises(ProtocolError, match="residuals of what is not compressed"):
        shapes.of(rank, structs.replace(SUM, residual=1))


def test_a_trainer_that_invents_calls_fills_no_memory() -> None:
    shapes, rank = Shapes(), rank_in(0, 1)
    first = shapes.of(rank, SUM)
    for count in range(100, 200):
        shapes.of(rank, structs.replace(SUM, count=count))
    assert shapes.of(rank, SUM) is not first


@pytest.mark.parametrize("lie", [{"arena": 77}, {"offset": 65_536}, {"op": 5}])
async def test_a_known_shape_protects_no_lie(clock: MockClock, lie: dict[str, int]) -> None:
    async with training(clock, 1) as (_, trainers):
        (trainer,) = trainers
        await reduce_all([trainer], ones(9))
        arena = await trainer.input_arena(36)
        await trainer.send(structs.replace(SUM, **{"op": 1, "arena": arena, **lie}))
        with pytest.raises(trio.EndOfChannel):
            await trainer.receive()
