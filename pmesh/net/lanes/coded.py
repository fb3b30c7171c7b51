"""The ring all-reduce with a codec at every hop (`pmesh.core.ops.coded`), from arena to arena.

Large tensors take a crew of four threads: one receives, one sends, one computes hops, one decodes
finished values. Partial sums arrive in a few places that are used again and again; they wait for no
other machine there, so that all ranks get on. What is to be sent is kept in the result, where its
values will be: encoded ones need less room. They are decoded once they have been sent on. Small
tensors are done in line.
"""

from collections import deque
from typing import NamedTuple, TypeAlias

import numpy as np
import trio

from pmesh.compression.blocks import Bytes, Float32s
from pmesh.compression.codecs import Codec
from pmesh.core.ops.coded import (
    PIECE_VALUES,
    CodedPiece,
    CodedPlan,
    draw_key,
    hop_terms,
    plan_coded_ring,
)
from pmesh.core.wire.records import RecordHeader
from pmesh.net.lanes.collectives import RingPosition
from pmesh.net.lanes.lane import Steps, Wait
from pmesh.net.lanes.pipeline import Crew, Part

_VALUE_BYTES = 4
SLOTS = 3  # one is received while another is worked on, and one lies ready

_Job: TypeAlias = tuple[int, Bytes | None]
"""The number of a send or of a receive, and the place in which something has arrived for it."""


class Tensors(NamedTuple):
    """One rank's memory: fp32, of one length, none overlaps another."""

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

    A rank that is alone gets its own values and the residual, which nothing is left of: nothing
    travels, so nothing is rounded. For the rest see `pmesh.net.lanes.collectives.all_reduce`.

    Args:
        ring: where this rank stands.
        op: the op's number in its job.
        fingerprint: of this rank's call.
        completed: up to where this rank has completed all ops.
        tensors: garbage in what is written if this fails or is cancelled.
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
    count = len(tensors.own)
    plan = plan_coded_ring(rank=ring.rank, size=ring.size, count=count, codec=codec)
    header = RecordHeader(0, ring.roster, op, 0, fingerprint, completed)
    kernels = _Kernels(
        plan, rank=ring.rank, op=op, tensors=tensors, codec=codec, reduction=reduction
    )
    return await _Run(ring, plan, header, kernels).run()


async def _keep_own(tensors: Tensors) -> None:
    for begin in range(0, len(tensors.own), PIECE_VALUES):
        part = slice(begin, begin + PIECE_VALUES)
        residual = 0 if tensors.residual is None else tensors.residual[part]
        np.add(tensors.own[part], residual, out=tensors.result[part])
        if tensors.residual_out is not None:
            tensors.residual_out[part] = 0
        await trio.lowlevel.checkpoint()
    await trio.lowlevel.checkpoint()


class _Kernels:
    """What is computed of a piece, and where its bytes lie until they are sent."""

    def __init__(
        self,
        plan: CodedPlan,
        *,
        rank: int,
        op: int,
        tensors: Tensors,
        codec: Codec,
        reduction: str,
    ) -> None:
        self._rank = rank
        self._op = op
        self._plan = plan
        self._tensors = tensors
        self._codec = codec
        self._reduction = reduction
        self._room = tensors.result.view(np.uint8)
        # Small pieces of int8 may take more bytes than their values, so they have a place apart.
        self._apart = np.empty((plan.size if plan.small else 0, plan.largest), np.uint8)
        self._bounce = np.empty(0 if plan.small else plan.largest, np.uint8)

    def place_of(self, number: int) -> Bytes:
        """Where the bytes of a send lie, on a multiple of 4."""
        piece = self._plan.sends[number]
        if self._plan.small:
            return self._apart[number % self._plan.size, : piece.nbytes]
        begin = piece.begin * _VALUE_BYTES
        return self._room[begin : begin + piece.nbytes]

    def hop(self, number: int, arrived: Bytes | None) -> int:
        """Make the bytes of a send of what has arrived; returns how many values were clipped."""
        piece = self._plan.sends[number]
        if not piece.length:
            return 0
        tensors, size, values = self._tensors, self._plan.size, _values_of(piece)
        # The owner sends what it has encoded in the first step of the gather phase.
        owner = piece.step == size - 1
        terms = hop_terms(self._codec, self._reduction, size=size, owner=owner)
        return self._codec.hop(
            None if arrived is None else arrived[: piece.nbytes],
            tensors.own[values],
            self.place_of(number),
            own_scale=terms.own_scale,
            divisor=terms.divisor,
            residual=None if tensors.residual is None else tensors.residual[values],
            residual_out=None if tensors.residual_out is None else tensors.residual_out[values],
            draw=draw_key(op=self._op, rank=self._rank, begin=piece.begin, codec=self._codec),
        )

    def finish(self, number: int, arrived: Bytes | None) -> None:
        """Decode values where they belong: of a receive, or of a send, whose bytes lie there."""
        if arrived is not None:
            piece, wire = self._plan.receives[number], arrived
        else:
            piece, wire = self._plan.sends[number], self.place_of(number)
            if not self._plan.small:
                wire = self._bounce[: piece.nbytes]
                wire[:] = self.place_of(number)
        if piece.length:
            self._codec.decode(wire[: piece.nbytes], self._tensors.result[_values_of(piece)])


def _values_of(piece: CodedPiece) -> slice:
    return slice(piece.begin, piece.begin + piece.length)


class _Run:
    """One op under way: how much of its plan is done.

    Each count is changed by one member of the crew alone, after what it counts has been done.
    """

    def __init__(
        self, ring: RingPosition, plan: CodedPlan, header: RecordHeader, kernels: _Kernels
    ) -> None:
        if ring.to_next is None or ring.from_previous is None:
            raise ValueError("a ring of several ranks needs its lanes")
        self._to_next = ring.to_next
        self._from_previous = ring.from_previous
        self._plan = plan
        self._header = header
        self._kernels = kernels
        self._free = deque[Bytes](np.empty((SLOTS, plan.largest), np.uint8))
        self._arrived = deque[Bytes]()
        self._finished = deque[_Job]()
        self._sent = 0
        self._received = 0
        self._hopped = 0
        self._decoded = 0
        self._clipped = 0
        self._crew = Crew()

    async def run(self) -> int:
        await trio.lowlevel.checkpoint_if_cancelled()
        plan, parts = self._plan, list[Part]()
        if plan.small:
            await self._run_in_line()
        if self._hopped < plan.encoded:
            parts.append(Part(self._hop_all()))
        if self._sent < len(plan.sends) or not self._to_next.idle:
            parts.append(Part(self._send_all(), self._to_next))
        if self._received < len(plan.receives):
            parts.append(Part(self._receive_all(), self._from_previous))
        if self._decoded < plan.decoded:
            parts.append(Part(self._decode_all()))
        if parts:
            await self._crew.run(parts, moving_bytes=plan.moving_bytes, computing=True)
        return self._clipped

    async def _run_in_line(self) -> None:
        """Send and receive in turn, until done or until a record does not fit the socket's buffer.

        Then every rank might wait for the next to receive: the rest takes a crew.
        """
        while True:
            while (hop := self._next_hop()) is not None:
                self._hop(hop)
            while self._may_send():
                if not self._to_next.idle:
                    return
                whole = self._to_next.post(*self._record())
                self._has_sent()
                if not whole:
                    return
            while self._finished:
                self._decode(self._finished.popleft())
            if self._received == len(self._plan.receives):
                return
            for wait in self._receive_one():
                await self._from_previous.wait_for(wait)

    # --- what the crew does

    def _hop_all(self) -> Steps:
        while self._hopped < self._plan.encoded:
            hop = self._next_hop()
            if hop is None:
                yield Wait.PROGRESS
            else:
                self._hop(hop)
                yield Wait.TURN

    def _send_all(self) -> Steps:
        yield from self._to_next.flushes()
        while self._sent < len(self._plan.sends):
            if self._may_send():
                yield from self._to_next.sends(*self._record())
                self._has_sent()
            else:
                yield Wait.PROGRESS

    def _receive_all(self) -> Steps:
        while self._received < len(self._plan.receives):
            if self._free:
                yield from self._receive_one()
            else:
                yield Wait.PROGRESS

    def _decode_all(self) -> Steps:
        while self._decoded < self._plan.decoded:
            if self._finished:
                self._decode(self._finished.popleft())
                yield Wait.TURN
            else:
                yield Wait.PROGRESS

    # --- one step each

    def _next_hop(self) -> _Job | None:
        if self._hopped < self._plan.own:
            return self._hopped, None
        return (self._hopped, self._arrived.popleft()) if self._arrived else None

    def _hop(self, hop: _Job) -> None:
        self._clipped += self._kernels.hop(*hop)
        self._hopped += 1
        self._give_back(hop)

    def _decode(self, job: _Job) -> None:
        self._kernels.finish(*job)
        self._decoded += 1
        self._give_back(job)

    def _give_back(self, job: _Job) -> None:
        if job[1] is not None:
            self._free.append(job[1])
        self._crew.note_progress()

    def _may_send(self) -> bool:
        number, plan = self._sent, self._plan
        if number < plan.encoded:
            return number < self._hopped
        return number < min(len(plan.sends), plan.own + self._received)

    def _record(self) -> tuple[RecordHeader, memoryview]:
        place = self._kernels.place_of(self._sent)
        return self._header._replace(body_bytes=place.nbytes, segment=self._sent), place.data

    def _has_sent(self) -> None:
        if self._plan.sends[self._sent].step >= self._plan.size - 1:
            self._finished.append((self._sent, None))
        self._sent += 1
        self._crew.note_progress()

    def _is_forwarded(self, number: int) -> bool:
        """Whether a receive brings finished values that others still want."""
        return self._plan.encoded <= self._plan.own + number < len(self._plan.sends)

    def _receive_one(self) -> Steps:
        number = self._received
        piece, forwarded = self._plan.receives[number], self._is_forwarded(number)
        into = self._kernels.place_of(self._plan.own + number) if forwarded else self._free.pop()
        expected = self._header._replace(body_bytes=piece.nbytes, segment=number)
        yield from self._from_previous.receives(expected, into[: piece.nbytes].data)
        if piece.step < self._plan.size - 1:
            self._arrived.append(into)
        elif not forwarded:
            self._finished.append((number, into))
        self._received += 1
        self._crew.note_progress()
