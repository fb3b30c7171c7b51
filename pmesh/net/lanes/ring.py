"""Collectives along the ring of a job, from arena to arena, with a codec or without."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import trio

from pmesh.compression.blocks import Bytes, Float32s
from pmesh.compression.codecs import Codec, residual_factor
from pmesh.compression.compiled import address_of_floats
from pmesh.core.ops.coded import PIECE_VALUES, draw_key, hop_terms, plan_coded_ring
from pmesh.core.ops.moving import plan_broadcast
from pmesh.core.ops.plan import CodecWork, RankPlan, Region
from pmesh.core.ops.reducing import plan_along_ring
from pmesh.core.ops.reductions import WIRE_DTYPES, check_reduction
from pmesh.core.wire.records import RecordHeader
from pmesh.native.layout import Coding
from pmesh.net.lanes import native
from pmesh.net.lanes.executor import execute, lanes_of, run_plan
from pmesh.net.lanes.lane import Lane


@dataclass(slots=True, kw_only=True)
class RingPosition:
    """One rank's place in its job's ring, with its lanes."""

    rank: int
    size: int
    roster: int
    """The number of the roster, which is in every record (V4)."""
    to_next: Lane | None = None
    from_previous: Lane | None = None
    """Both lanes are None if and only if `size` is 1."""

    def lanes(self) -> tuple[dict[int, Lane], dict[int, Lane]]:
        """Return the lanes to other ranks, and those from other ranks, by rank."""
        to, from_ = self.to_next, self.from_previous
        return (
            {} if to is None else {(self.rank + 1) % self.size: to},
            {} if from_ is None else {(self.rank - 1) % self.size: from_},
        )


async def all_reduce(
    ring: RingPosition,
    *,
    op: int,
    fingerprint: int,
    completed: int,
    source: memoryview,
    result: memoryview,
    dtype: str,
    reduction: str,
) -> None:
    """Reduce the sources of all ranks into the result of each, bit for bit the same (I3).

    It takes 2(n-1) steps and sends 2(n-1)/n of the tensor; two ranks with few values take one step.
    Without values it is a barrier. Cancelling it, or an error, leaves garbage in `result` and the
    lanes whole for a later roster.

    Args:
        ring: this rank's place in the ring.
        op: the op's number in its job.
        fingerprint: the fingerprint of this rank's call.
        completed: the op up to which this rank has completed all; each record carries it.
        source: bytes, never written (I8); may be read-only.
        result: as many writable bytes, which don't overlap `source`.
        dtype: one of WIRE_DTYPES.
        reduction: sum, mean, max, min or prod; a mean divides by `ring.size`.

    Raises:
        ValueError: there is no such reduction of this dtype.
        CallsDiffer: a neighbour called something else.
        LaneBroken: the edge to or from a neighbour is gone.
    """
    check_reduction(reduction, dtype)
    count = source.nbytes // WIRE_DTYPES[dtype].itemsize
    plan = plan_along_ring(
        rank=ring.rank, size=ring.size, count=count, dtype=dtype, reduction=reduction
    )
    await run_plan(
        plan,
        *ring.lanes(),
        RecordHeader(0, ring.roster, op, 0, fingerprint, completed),
        source=source,
        result=result,
        dtype=dtype,
        reduction=reduction,
    )


async def broadcast(
    ring: RingPosition,
    *,
    op: int,
    fingerprint: int,
    completed: int,
    root: int,
    buffer: memoryview,
) -> None:
    """Copy the root's bytes to every rank, along the ring. All buffers have the same length.

    The root only reads `buffer`, the others write it. The root may end before another rank has
    begun: this is no barrier. For the rest see `all_reduce`.
    """
    plan = plan_broadcast(rank=ring.rank, size=ring.size, root=root, nbytes=buffer.nbytes)
    header = RecordHeader(0, ring.roster, op, 0, fingerprint, completed)
    await run_plan(plan, *ring.lanes(), header, source=buffer, result=buffer)


# --- with a codec at every hop (`pmesh.core.ops.coded`)


class Tensors(NamedTuple):
    """One rank's arrays: float32, all of one length; none overlaps another."""

    own: Float32s
    """Never written (I8)."""
    result: Float32s
    residual: Float32s | None = None
    """Added to `own`; never written (O9)."""
    residual_out: Float32s | None = None
    """Gets what this rank rounds away."""


async def all_reduce_coded(
    ring: RingPosition,
    *,
    op: int,
    fingerprint: int,
    completed: int,
    tensors: Tensors,
    codec: Codec,
    reduction: str,
) -> int:
    """Reduce the values of all ranks into the result of each, bit for bit the same (I3).

    A single rank gets the sum of its own values and its residual, and a residual of zeros: nothing
    travels, so nothing is rounded. For the rest see `all_reduce`.

    Args:
        ring: this rank's place in the ring.
        op: the op's number in its job.
        fingerprint: the fingerprint of this rank's call.
        completed: the op up to which this rank has completed all.
        tensors: the arrays; those that are written hold garbage if this fails or is cancelled.
        codec: the same at all ranks.
        reduction: sum or mean.

    Returns:
        How many finite values have been clipped here.

    Raises:
        CallsDiffer: a neighbour called something else.
        LaneBroken: the edge to or from a neighbour is gone.
    """
    if ring.size == 1:
        await _keep_own(tensors)
        return 0
    plan = plan_coded_ring(rank=ring.rank, size=ring.size, count=len(tensors.own), codec=codec)
    header = RecordHeader(0, ring.roster, op, 0, fingerprint, completed)
    own, result = (values.view(np.uint8).data for values in (tensors.own, tensors.result))
    scratch = np.empty(plan.scratch_bytes, np.uint8)
    regions = own, result, scratch.data
    lanes = lanes_of(plan, *ring.lanes())
    library = native.library_for(plan, lanes, codec=codec)
    if library is not None:
        bounce = np.empty(_bounce_bytes(plan), np.uint8)
        coding = _coding(ring, tensors, codec, op=op, reduction=reduction, bounce=bounce)
        await native.run(library, plan, lanes, header, regions, coding=coding)
        return coding.clipped
    kernels = _Kernels(
        plan,
        rank=ring.rank,
        op=op,
        tensors=tensors,
        scratch=scratch,
        codec=codec,
        reduction=reduction,
    )
    await execute(plan, *ring.lanes(), header, regions, work=kernels.work)
    return kernels.clipped


async def _keep_own(tensors: Tensors) -> None:
    for begin in range(0, len(tensors.own), PIECE_VALUES):
        part = slice(begin, begin + PIECE_VALUES)
        residual = 0 if tensors.residual is None else tensors.residual[part]
        np.add(tensors.own[part], residual, out=tensors.result[part])
        if tensors.residual_out is not None:
            tensors.residual_out[part] = 0
        await trio.lowlevel.checkpoint()
    await trio.lowlevel.checkpoint()


def _bounce_bytes(plan: RankPlan) -> int:
    """Return how much room a piece takes that is decoded where it lies."""
    return 0 if plan.small else plan.largest


def _coding(
    ring: RingPosition,
    tensors: Tensors,
    codec: Codec,
    *,
    op: int,
    reduction: str,
    bounce: Bytes,
) -> Coding:
    """Return how the native library does the works of a plan, in these arrays."""
    count = len(tensors.own)
    coding = Coding(
        residual=address_of_floats(tensors.residual, count, written=False),
        residual_out=address_of_floats(tensors.residual_out, count, written=True),
        bounce=bounce.ctypes.data,
        bounce_bytes=len(bounce),
        draw=draw_key(op=op, rank=ring.rank, begin=0, codec=codec),
        block=codec.block,
        codec=native.NUMBERS_OF_CODECS[codec],
    )
    for owner, terms in enumerate(coding.terms):
        own_scale, divisor = hop_terms(codec, reduction, size=ring.size, owner=bool(owner))
        terms.own_scale, terms.divisor = own_scale, divisor
        terms.residual_factor = residual_factor(own_scale, divisor)
    return coding


class _Kernels:
    """Does the works of one plan in Python."""

    def __init__(
        self,
        plan: RankPlan,
        *,
        rank: int,
        op: int,
        tensors: Tensors,
        scratch: Bytes,
        codec: Codec,
        reduction: str,
    ) -> None:
        self.clipped = 0
        self._rank = rank
        self._op = op
        self._size = plan.size
        self._tensors = tensors
        self._codec = codec
        self._reduction = reduction
        self._scratch = scratch
        self._bytes = {Region.RESULT: tensors.result.view(np.uint8), Region.SCRATCH: scratch}
        self._bounce = np.empty(_bounce_bytes(plan), np.uint8)

    def work(self, work: CodecWork) -> None:
        """Do one work of the plan."""
        if not work.length:
            return
        values = slice(work.begin, work.begin + work.length)
        wire = self._bytes[work.region][work.offset : work.offset + work.nbytes]
        if not work.decodes:
            self.clipped += self._hop(work, values, wire)
            return
        if work.region is Region.RESULT:  # where its values will be
            bounce = self._bounce[: work.nbytes]
            bounce[:] = wire
            wire = bounce
        self._codec.decode(wire, self._tensors.result[values])

    def _hop(self, work: CodecWork, values: slice, outgoing: Bytes) -> int:
        tensors, at = self._tensors, work.arrived
        terms = hop_terms(self._codec, self._reduction, size=self._size, owner=work.divides)
        return self._codec.hop(
            None if at < 0 else self._scratch[at : at + work.nbytes],
            tensors.own[values],
            outgoing,
            own_scale=terms.own_scale,
            divisor=terms.divisor,
            residual=None if tensors.residual is None else tensors.residual[values],
            residual_out=None if tensors.residual_out is None else tensors.residual_out[values],
            draw=draw_key(op=self._op, rank=self._rank, begin=work.begin, codec=self._codec),
        )
