"""A bucket of gradients whose all-reduces are compressed, as a training script keeps it."""

from functools import partial

import numpy as np

from pmesh.compression.blocks import Float32s
from pmesh.core.wire.calls import Call
from pmesh.core.wire.session import ArenaGranted, WantArena
from pmesh.core.wire.trainer import OpDone, OpFailed, StartOp
from pmesh.ids import OpNumber
from tests.worlds.trainer import OpError, TrainerClient, together


class CompressedBucket:
    """One rank's: its values, the residual, and room for the next one."""

    def __init__(self, trainer: TrainerClient, count: int) -> None:
        self.trainer = trainer
        self.count = count
        self.residual = -1
        self.residual_out = -1
        self.clipped = 0

    async def keep_residual(self) -> None:
        self.residual, self.residual_out = await self._arena(), await self._arena()

    async def reduce(
        self, own: Float32s, compression: str = "int8", reduction: str = "mean"
    ) -> Float32s:
        """One op; a copy of the result. What it keeps takes its place if it succeeds (O9)."""
        arena = await self.trainer.input_arena(own.nbytes)
        self.trainer.maps[arena][: own.nbytes] = own.tobytes()
        number = OpNumber(self.trainer.next_op)
        call = Call("all_reduce", "float32", (self.count,), reduction, compression=compression)
        residuals = (self.residual, self.residual_out)
        reply = await self.trainer.ask(
            StartOp(number, call, "float32", self.count, arena, 60.0, (), (), *residuals)
        )
        assert isinstance(reply, OpDone | OpFailed)
        self.trainer.has_ended(reply, number)
        if isinstance(reply, OpFailed):
            raise OpError(reply)
        self.clipped = reply.clipped
        self.residual, self.residual_out = self.residual_out, self.residual
        return self.read(reply.arena)

    def read(self, arena: int) -> Float32s:
        """A copy of the values in an arena."""
        return np.frombuffer(self.trainer.maps[arena], np.float32, self.count).copy()

    async def _arena(self) -> int:
        reply = await self.trainer.ask(WantArena(4 * self.count))
        assert isinstance(reply, ArenaGranted)
        self.trainer.maps[reply.arena][:] = bytes(reply.nbytes)  # it may have been used before
        return reply.arena


async def buckets_of(trainers: list[TrainerClient], count: int) -> list[CompressedBucket]:
    """One for each rank, with a residual of zeros."""
    buckets = [CompressedBucket(trainer, count) for trainer in trainers]
    await together(*[bucket.keep_residual for bucket in buckets])
    return buckets


async def reduce_buckets(
    buckets: list[CompressedBucket],
    xs: list[Float32s],
    compression: str = "int8",
    reduction: str = "mean",
) -> list[Float32s]:
    """One op of all these ranks; each one's result."""
    pairs = zip(buckets, xs, strict=True)
    return await together(*[partial(b.reduce, x, compression, reduction) for b, x in pairs])
