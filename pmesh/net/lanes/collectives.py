"""The collectives along the ring of a job, from arena to arena."""

from dataclasses import dataclass

from pmesh.core.ops.moving import plan_broadcast
from pmesh.core.ops.reducing import plan_along_ring
from pmesh.core.ops.reductions import WIRE_DTYPES, check_reduction
from pmesh.core.wire.records import RecordHeader
from pmesh.net.lanes.executor import run_plan
from pmesh.net.lanes.lane import Lane


@dataclass(slots=True, kw_only=True)
class RingPosition:
    """One rank's place in its job's ring, with its lanes."""

    rank: int
    size: int
    roster: int
    """The number of the roster: in every record (V4)."""
    to_next: Lane | None = None
    from_previous: Lane | None = None
    """Both None if and only if `size` is 1."""

    def lanes(self) -> tuple[dict[int, Lane], dict[int, Lane]]:
        """The lanes to and from other ranks, by rank."""
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

    Takes 2(n-1) steps and sends 2(n-1)/n of the tensor; two ranks with little take one step. With
    no values it is a barrier. Cancelling it, or an error, leaves garbage in `result` and the lanes
    whole for a later roster.

    Args:
        ring: where this rank stands.
        op: the op's number in its job.
        fingerprint: of this rank's call.
        completed: up to where this rank has completed all ops: goes along in each record.
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
    """Copy the root's bytes to every rank, along the ring; as long as the root's in each.

    At the root `buffer` is only read, at the others written. The root may be done before another
    has begun: this is no barrier. For the rest see `all_reduce`.
    """
    plan = plan_broadcast(rank=ring.rank, size=ring.size, root=root, nbytes=buffer.nbytes)
    header = RecordHeader(0, ring.roster, op, 0, fingerprint, completed)
    await run_plan(plan, *ring.lanes(), header, source=buffer, result=buffer)
