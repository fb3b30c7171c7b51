"""Collectives along the ring of a job, from arena to arena.

One op is one straight line: each record is sealed from where its values lie and opened into where
they belong. While pieces are large the sending and the receiving half of that line run as two
tasks; small ones fit the socket buffers, and switching tasks would cost more than the network.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import trio

from pmesh.core.ops.reductions import (
    WIRE_DTYPES,
    accumulate,
    check_reduction,
    finish,
    is_exact,
    make_nan_equal,
)
from pmesh.core.ops.schedule import (
    SEGMENT_BYTES,
    SMALL_BYTES,
    Piece,
    Plan,
    plan_all_reduce,
    plan_broadcast,
    plan_exchange,
)
from pmesh.core.wire.records import RecordHeader
from pmesh.net.lanes.lane import CallsDiffer, Lane, Steps, Wait
from pmesh.net.lanes.pipeline import Crew, Part

__all__ = ["CallsDiffer", "RingPosition", "all_reduce", "broadcast"]


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
    itemsize = WIRE_DTYPES[dtype].itemsize
    if ring.size == 1:
        await _copy(source, result)
        return
    exchange = (
        ring.size == 2  # noqa: PLR2004 - as it says
        and source.nbytes <= SMALL_BYTES
        and is_exact(reduction, dtype)
    )
    plan = (
        plan_exchange(source.nbytes)
        if exchange
        else plan_all_reduce(
            rank=ring.rank, size=ring.size, count=source.nbytes // itemsize, itemsize=itemsize
        )
    )
    own = np.frombuffer(source, WIRE_DTYPES[dtype])
    sums = np.frombuffer(result, WIRE_DTYPES[dtype])

    def landed(piece: Piece) -> None:
        if piece.step < ring.size - 1 and piece.nbytes:
            values = slice(piece.offset // itemsize, (piece.offset + piece.nbytes) // itemsize)
            accumulate(reduction, sums[values], own[values])
            if piece.step == ring.size - 2:  # the last to add: this rank finishes the chunk
                finish(reduction, sums[values], ring.size)
            if exchange:  # I3: the other rank adds for itself
                make_nan_equal(sums[values])

    header = RecordHeader(0, ring.roster, op, 0, fingerprint, completed)
    await _Op(ring, plan, header, first=source, result=result, landed=landed).run()


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
    await _Op(ring, plan, header, first=buffer, result=buffer, landed=_keep).run()


def _keep(_piece: Piece) -> None:
    """What a broadcast does with a piece that has landed."""


async def _copy(source: memoryview, result: memoryview) -> None:
    """The all-reduce of one rank, in pieces that don't hold the event loop."""
    for begin in range(0, source.nbytes, SEGMENT_BYTES):
        result[begin : begin + SEGMENT_BYTES] = source[begin : begin + SEGMENT_BYTES]
        await trio.lowlevel.checkpoint()
    await trio.lowlevel.checkpoint()


class _Op:
    """One collective under way: how much of its plan is done."""

    def __init__(
        self,
        ring: RingPosition,
        plan: Plan,
        header: RecordHeader,
        *,
        first: memoryview,
        result: memoryview,
        landed: Callable[[Piece], None],
    ) -> None:
        self._to_next = ring.to_next
        self._from_previous = ring.from_previous
        self._plan = plan
        self._header = header
        self._first = first
        self._result = result
        self._landed = landed
        self._sent = 0
        self._received = 0
        self._crew = Crew()

    async def run(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._plan.in_line:
            await self._run_in_line()
        parts: list[Part] = []
        if self._plan.sends:
            lane = _present(self._to_next)
            if self._sent < len(self._plan.sends) or not lane.idle:
                parts.append(Part(self._send_all(lane), lane))
        if self._received < len(self._plan.receives):
            lane = _present(self._from_previous)
            parts.append(Part(self._receive_all(lane), lane))
        if parts:
            await self._crew.run(parts, moving_bytes=self._plan.moving_bytes)

    async def _run_in_line(self) -> None:
        """Send and receive in turn, until done or until a record does not fit the socket's buffer.

        Then every rank might wait for the next to receive: the rest takes a crew.
        """
        while self._received < len(self._plan.receives):
            while self._may_send():
                lane = _present(self._to_next)
                if not lane.idle or not lane.post(*self._take_record()):
                    return
            lane = _present(self._from_previous)
            for wait in self._receive_one(lane):
                await lane.wait_for(wait)

    def _send_all(self, lane: Lane) -> Steps:
        yield from lane.flushes()
        while self._sent < len(self._plan.sends):
            if self._may_send():
                yield from lane.sends(*self._take_record())
            else:
                yield Wait.PROGRESS

    def _receive_all(self, lane: Lane) -> Steps:
        while self._received < len(self._plan.receives):
            yield from self._receive_one(lane)

    def _receive_one(self, lane: Lane) -> Steps:
        piece = self._plan.receives[self._received]
        expected = self._header._replace(body_bytes=piece.nbytes, segment=self._received)
        into = self._result[piece.offset : piece.offset + piece.nbytes]
        yield from lane.receives(expected, into)
        self._landed(piece)
        self._received += 1
        self._crew.note_progress()

    def _may_send(self) -> bool:
        ready = self._plan.own + self._received  # send own + i forwards what receive i brought
        return self._sent < min(len(self._plan.sends), ready)

    def _take_record(self) -> tuple[RecordHeader, memoryview]:
        number, piece = self._sent, self._plan.sends[self._sent]
        values = self._first if number < self._plan.own else self._result
        self._sent += 1
        header = self._header._replace(body_bytes=piece.nbytes, segment=number)
        return header, values[piece.offset : piece.offset + piece.nbytes]


def _present(lane: Lane | None) -> Lane:
    if lane is None:
        raise ValueError("a ring of several ranks needs its lanes")
    return lane
