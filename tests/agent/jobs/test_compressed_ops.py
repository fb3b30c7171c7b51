"""Compressed all-reduces across whole agents: the bits, the residuals, and who is lost."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.jobs import op_task
from pmesh.compression.blocks import Float32s
from pmesh.compression.codecs import codec_of
from pmesh.core.wire.calls import Call
from pmesh.core.wire.session import ArenaGranted, WantArena
from pmesh.core.wire.trainer import StartOp
from pmesh.errors import LaneBroken
from pmesh.ids import OpNumber
from pmesh.net.lanes.ring import RingPosition, Tensors, all_reduce_coded
from tests.agent.jobs.buckets import CompressedBucket, buckets_of, reduce_buckets
from tests.worlds.coded_rings import Coded, reduce_coded
from tests.worlds.faults import Faults
from tests.worlds.trainer import together, until
from tests.worlds.village import training, village
from tests.worlds.village_ops import RAISE, ranks_of, reduce_all, send_garbage, verdicts_of_all

COUNT = 3000


def noise(size: int, *, seed: int) -> list[Float32s]:
    dice = np.random.default_rng(seed)
    return [dice.standard_normal(COUNT).astype(np.float32) for _ in range(size)]


class ReductionModel:
    """What the residuals and the results are to be: hop after hop, without a network."""

    def __init__(self, size: int) -> None:
        self.residuals = [np.zeros(COUNT, np.float32) for _ in range(size)]

    def reduce(
        self, xs: list[Float32s], op: int, compression: str = "int8", reduction: str = "mean"
    ) -> Float32s:
        kept = [np.empty(COUNT, np.float32) for _ in xs]
        coded = [Coded(*three) for three in zip(xs, self.residuals, kept, strict=True)]
        result, _ = reduce_coded(codec_of(compression), coded, reduction=reduction, op=op)
        self.residuals = kept
        return result


def check(
    buckets: list[CompressedBucket],
    results: list[Float32s],
    model: ReductionModel,
    expected: Float32s,
) -> None:
    assert [result.tobytes() for result in results] == [expected.tobytes()] * len(results)  # I3
    for bucket, residual in zip(buckets, model.residuals, strict=True):
        assert bucket.read(bucket.residual).tobytes() == residual.tobytes()


@pytest.mark.parametrize("places", [(0,), (0, 1), (0, 1, 2), (0, 1, 0, 1)])
async def test_every_rank_gets_the_same_bits_and_keeps_what_it_rounded_away(
    clock: MockClock, places: tuple[int, ...]
) -> None:
    async with village(clock, max(places) + 1) as here:
        trainers = await here.job(*[here.machines[place] for place in places])
        buckets, model = await buckets_of(trainers, COUNT), ReductionModel(len(places))
        for op, (name, reduction) in enumerate(
            [("int8", "mean"), ("int8-stochastic", "sum"), ("bf16", "mean"), ("fp16", "mean")]
        ):
            xs = noise(len(places), seed=op)
            results = await reduce_buckets(buckets, xs, name, reduction)
            check(buckets, results, model, model.reduce(xs, op, name, reduction))
        assert not any(rank.costs.edges for rank in ranks_of(here))  # it is a ring, never a choice
        assert [x[0] for x in await reduce_all(trainers)] == [float(len(places))] * len(places)


async def test_it_works_without_residuals_and_the_arenas_are_free_again(clock: MockClock) -> None:
    async with training(clock, 2) as (here, trainers):
        xs = noise(2, seed=1)
        bare = [CompressedBucket(trainer, COUNT) for trainer in trainers]
        results = await reduce_buckets(bare, xs)
        expected = ReductionModel(2).reduce(xs, 0)
        assert {result.tobytes() for result in results} == {expected.tobytes()}
        await reduce_buckets(await buckets_of(trainers, COUNT), xs)
        for rank in ranks_of(here):
            assert rank.arenas.inputs.nbytes > 0
            await rank.arenas.inputs.rest()  # it closes those that no op holds
            assert rank.arenas.inputs.nbytes == 0


async def test_what_fp16_clips_is_told_to_the_trainer_that_gave_it(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        buckets = await buckets_of(await here.job(*here.machines), COUNT)
        xs = [np.zeros(COUNT, np.float32) for _ in buckets]
        xs[0][:5], xs[1][-7:] = 1e6, -1e6
        results = await reduce_buckets(buckets, xs, "fp16", "sum")
        assert {result.tobytes() for result in results} == {results[0].tobytes()}
        assert sum(bucket.clipped for bucket in buckets) >= 12
        # Nothing is lost: what was cut off comes with the next ops, as far as fp16 can say it.
        again = await reduce_buckets(buckets, [np.zeros_like(x) for x in xs], "fp16", "sum")
        assert (again[0][:5] > 60_000).all()


async def test_infinity_and_nan_come_out(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        buckets = await buckets_of(await here.job(*here.machines), COUNT)
        for name in ("bf16", "fp16", "int8"):
            xs = [np.zeros(COUNT, np.float32) for _ in buckets]
            xs[0][5], xs[1][700] = np.nan, np.inf
            for result in await reduce_buckets(buckets, xs, name):
                assert not np.isfinite(result[[5, 700]]).any()
            for bucket in buckets:
                assert np.isfinite(bucket.read(bucket.residual)).all()


# --- who is lost meanwhile


def hold_coded(faults: Faults, *, size: int, complete: Callable[[int], bool]) -> list[int]:
    """In rings of this size nobody comes to the end of a compressed all-reduce.

    Returns a list that grows by each rank that is held.

    Args:
        faults: what it is one of.
        size: of the ring.
        complete: whether a rank has sent and received everything by then.
    """
    held: list[int] = []

    async def hold(ring: RingPosition, *, tensors: Tensors, **call: Any) -> int:  # noqa: ANN401 - passed on
        if ring.size != size or complete(ring.rank):
            clipped = await all_reduce_coded(ring, tensors=tensors, **call)
            if ring.size != size:
                return clipped
        tensors.result.fill(np.nan)  # what it has must not be believed
        if tensors.residual_out is not None and not complete(ring.rank):
            tensors.residual_out.fill(np.nan)
        held.append(ring.rank)
        await trio.sleep_forever()
        raise AssertionError("nobody wakes it")

    faults.instead(op_task, "all_reduce_coded", hold)
    return held


@pytest.mark.parametrize("complete", [False, True])
async def test_an_op_that_loses_a_rank_runs_again_from_the_same_residual(
    clock: MockClock, faults: Faults, *, complete: bool
) -> None:
    """O9: what the first attempt has kept is forgotten, however far it came."""
    async with training(clock, 3) as (_, (*left, lost)):
        buckets, model = await buckets_of([*left, lost], COUNT), ReductionModel(3)
        xs = noise(3, seed=1)
        check(buckets, await reduce_buckets(buckets, xs), model, model.reduce(xs, 0))
        held = hold_coded(faults, size=3, complete=lambda _: complete)
        xs = noise(3, seed=2)

        async def lose() -> Float32s:
            with pytest.raises((trio.ClosedResourceError, trio.EndOfChannel)):
                await buckets[2].reduce(xs[2])
            return xs[2]

        async def kill() -> Float32s:
            await until(lambda: len(held) == 3)
            await lost.die()
            return xs[2]

        calls = [partial(bucket.reduce, x) for bucket, x in zip(buckets[:2], xs, strict=False)]
        *results, _, _ = await together(*calls, lose, kill)
        model.residuals.pop()
        check(buckets[:2], results, model, model.reduce(xs[:2], 1))


async def test_the_last_rank_goes_on_alone_with_its_residual_and_keeps_none(
    clock: MockClock, faults: Faults
) -> None:
    async with training(clock, 2) as (_, (one, other)):
        buckets, model = await buckets_of([one, other], COUNT), ReductionModel(2)
        xs = noise(2, seed=1)
        check(buckets, await reduce_buckets(buckets, xs), model, model.reduce(xs, 0))
        owed = model.residuals[0]
        held = hold_coded(faults, size=2, complete=lambda _: False)

        async def kill() -> Float32s:
            await until(lambda: len(held) == 1)
            await other.die()
            return xs[1]

        result, _ = await together(partial(buckets[0].reduce, xs[0]), kill)
        np.testing.assert_array_equal(result, xs[0] + owed)
        assert not buckets[0].read(buckets[0].residual).any()


@pytest.mark.parametrize("together_on_one", [False, True])
async def test_who_missed_the_end_fetches_the_same_bits_and_keeps_what_it_rounded_away(
    clock: MockClock, faults: Faults, *, together_on_one: bool
) -> None:
    """O9: its own encoded values are in that result, so its residual is that attempt's."""
    misses = iter([True])

    async def miss_the_end(ring: RingPosition, *, tensors: Tensors, **call: Any) -> int:  # noqa: ANN401 - passed on
        clipped = await all_reduce_coded(ring, tensors=tensors, **call)
        if ring.rank == 1 and next(misses, False):
            tensors.result.fill(np.nan)
            raise LaneBroken("its last record never arrived")
        return clipped

    async with village(clock, 2) as here:
        one, two = here.machines
        trainers = await here.job(*([one, one] if together_on_one else [one, two]))
        buckets, model = await buckets_of(trainers, COUNT), ReductionModel(2)
        faults.instead(op_task, "all_reduce_coded", miss_the_end)
        for op in range(2):
            xs = noise(2, seed=op)
            check(buckets, await reduce_buckets(buckets, xs), model, model.reduce(xs, op))
        assert next(misses, None) is None


async def test_a_failed_op_leaves_the_residual_as_it_was(clock: MockClock, faults: Faults) -> None:
    async with village(clock, 2) as here:
        buckets, model = await buckets_of(await here.job(*here.machines), COUNT), ReductionModel(2)
        xs = noise(2, seed=1)
        check(buckets, await reduce_buckets(buckets, xs), model, model.reduce(xs, 0))

        async def breaks(_: RingPosition, *, tensors: Tensors, **__: object) -> int:
            assert tensors.residual_out is not None
            tensors.residual_out.fill(np.nan)
            raise LaneBroken("the data connection to mac-1 ended")

        with faults.instead(op_task, "all_reduce_coded", breaks):
            calls = [(b.trainer, b.reduce(x)) for b, x in zip(buckets, xs, strict=True)]
            verdicts = await verdicts_of_all(*calls)
        assert {verdict.error for verdict in verdicts} == {"LaneBroken"}
        check(buckets, await reduce_buckets(buckets, xs), model, model.reduce(xs, 2))


# --- what does not fit


@pytest.mark.parametrize("other", ["bf16", "int8-stochastic", "", "randomk(0.1)"])
async def test_ranks_that_compress_differently_are_told_so(clock: MockClock, other: str) -> None:
    async with training(clock, 2) as (_, trainers):
        buckets = [CompressedBucket(trainer, COUNT) for trainer in trainers]
        xs = noise(2, seed=1)
        calls = [buckets[0].reduce(xs[0], "int8"), buckets[1].reduce(xs[1], other)]
        verdicts = await verdicts_of_all(*zip(trainers, calls, strict=True))
        assert {verdict.error for verdict in verdicts} == {"OpMismatch"}
        assert "int8" in verdicts[1].message
        assert [x[0] for x in await reduce_all(trainers)] == [2.0] * 2


async def test_a_name_with_parentheses_is_the_trainers_matter(clock: MockClock) -> None:
    async with training(clock, 2) as (_, trainers):
        xs = noise(2, seed=1)
        buckets = [CompressedBucket(trainer, COUNT) for trainer in trainers]
        for result in await reduce_buckets(buckets, xs, "randomk(0.1)", "sum"):
            np.testing.assert_array_equal(result, xs[0] + xs[1])


def start_op(call: Call, **changed: object) -> StartOp:
    fields = {"op": 0, "call": call, "wire_dtype": "float32", "count": 9, "arena": 0} | changed
    return StartOp(**fields, timeout_s=5.0)  # type: ignore[arg-type]


def reduce_call(compression: str = "int8", **changed: Any) -> Call:  # noqa: ANN401 - of many types
    fields = {"kind": "all_reduce", "dtype": "float32", "shape": (9,), "reduction": "sum"} | changed
    return Call(**fields, compression=compression)


def hostile() -> Iterator[StartOp]:
    """Arenas 0 and 1 are the trainer's, of 64 KiB, and 2 for 100,000 values; 3 is not."""
    yield start_op(reduce_call("int9"))
    yield start_op(reduce_call(reduction="max"))
    yield start_op(reduce_call(reduction="prod"))
    yield start_op(reduce_call(strategy="tree"))
    yield start_op(reduce_call(dtype="int32"), wire_dtype="int32")
    yield start_op(reduce_call(dtype="float64"), wire_dtype="float64")
    yield start_op(reduce_call(kind="reduce", root=0))
    yield start_op(reduce_call(kind="broadcast", root=0))
    yield start_op(reduce_call(kind="barrier", shape=(0,)), count=0, arena=-1)
    yield start_op(reduce_call(), residual=3)
    yield start_op(reduce_call(), residual_out=3)
    yield start_op(reduce_call(), residual=0)
    yield start_op(reduce_call(), residual=1, residual_out=1)
    yield start_op(reduce_call(), count=17_000, arena=2, residual=1)
    yield start_op(reduce_call(""), residual=1)
    yield start_op(reduce_call("topk(0.1)"), residual_out=1)


@pytest.mark.parametrize("request_", list(hostile()), ids=str)
async def test_a_call_that_no_client_makes_ends_that_trainer_alone(
    clock: MockClock, request_: StartOp
) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        trainers = await here.job(one, one, terms=RAISE)
        a, b = trainers
        for nbytes in (9, 9, 400_000):
            assert isinstance(await b.ask(WantArena(nbytes)), ArenaGranted)
        await send_garbage(request_, b, other=a)


async def test_there_is_room_for_the_residuals_of_a_hundred_buckets(clock: MockClock) -> None:
    async with training(clock, 2) as (_, trainers):
        models = [await buckets_of(trainers, 64) for _ in range(100)]
        x = np.ones(64, np.float32)
        for buckets in models:
            for result in await reduce_buckets(buckets, [x, x], "bf16"):
                np.testing.assert_array_equal(result, x)
        assert models[0][0].trainer.next_op == OpNumber(100)
