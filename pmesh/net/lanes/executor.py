"""Runs the plan of any collective (`pmesh.core.ops.plan`), over lanes to and from any ranks.

Each record is sealed from where its values lie and opened into where they belong. Each lane's
records go in their order, and wait for what the plan says. While they are large, a pipeline has a
member for every lane; small ones fit the sockets' buffers and go in line, because switching tasks
would cost more than the network.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import trio

from pmesh.core.ops.plan import (
    SEGMENT_BYTES,
    Copy,
    Need,
    RankPlan,
    Receive,
    Region,
    Send,
    Then,
    Work,
)
from pmesh.core.ops.reductions import WIRE_DTYPES, accumulate, finish, make_nan_equal
from pmesh.core.wire.records import RecordHeader
from pmesh.net.lanes.lane import Lane, Steps, Wait
from pmesh.net.lanes.pipeline import Pipeline, Stage

_NOTHING = memoryview(bytearray())


async def run_plan(
    plan: RankPlan,
    lanes_to: Mapping[int, Lane],
    lanes_from: Mapping[int, Lane],
    header: RecordHeader,
    *,
    source: memoryview,
    result: memoryview,
    dtype: str = "",
    reduction: str = "",
) -> None:
    """Do one rank's part of a collective.

    Cancelling it, or an error, leaves garbage in `result` and the lanes whole for a later roster.

    Args:
        plan: what to do.
        lanes_to: at least one for each of `plan.peers_to`.
        lanes_from: at least one for each of `plan.peers_from`.
        header: of every record of this op, but for its size and its segment.
        source: bytes, never written (I8); may be read-only. As many as the plan's maker says.
        result: writable bytes, which don't overlap `source`; likewise.
        dtype: one of WIRE_DTYPES, of the tensor that is reduced; of no matter to other plans.
        reduction: as `check_reduction` allows; likewise.

    Raises:
        CallsDiffer: a rank from which something comes called something else.
        LaneBroken: one of the lanes is gone.
    """
    nbytes = plan.scratch_bytes
    scratch = np.empty(nbytes, np.uint8).data if nbytes else _NOTHING
    regions = (source, result, scratch)
    landed = _adding(plan, regions, dtype, reduction) if dtype else _keep
    await execute(plan, lanes_to, lanes_from, header, regions, landed=landed)


def _keep(_: Receive | Work) -> None:
    """What becomes of a record where nothing is reduced."""


async def execute(
    plan: RankPlan,
    lanes_to: Mapping[int, Lane],
    lanes_from: Mapping[int, Lane],
    header: RecordHeader,
    regions: Sequence[memoryview],
    *,
    landed: Callable[[Receive], None] = _keep,
    work: Callable[[Work], None] = _keep,
) -> None:
    """As `run_plan`, but for the last arguments.

    Args:
        plan: what to do.
        lanes_to: see `run_plan`.
        lanes_from: likewise.
        header: likewise.
        regions: the source, the result, and the scratch, of `plan.scratch_bytes`.
        landed: is called when a record has landed.
        work: does what the queues of the plan say.
    """
    if not (lanes_to.keys() >= plan.sends.keys() and lanes_from.keys() >= plan.receives.keys()):
        raise ValueError("a plan among several ranks needs its lanes")
    to = {peer: _Track(lanes_to[peer], sends) for peer, sends in plan.sends.items()}
    from_ = {peer: _Track(lanes_from[peer], receives) for peer, receives in plan.receives.items()}
    await _Execution(plan, to, from_, header, regions=regions, landed=landed, work=work).run()


def _adding(
    plan: RankPlan, regions: Sequence[memoryview], dtype: str, reduction: str
) -> Callable[[Receive], None]:
    """What becomes of a record that has landed."""
    wire = WIRE_DTYPES[dtype]
    values, itemsize = [np.frombuffer(memory, wire) for memory in regions], wire.itemsize
    source, sums, _ = values
    adds_source = Then.ADD_SOURCE

    def landed(receive: Receive) -> None:
        if not (receive.then and receive.nbytes):
            return
        count = receive.nbytes // itemsize
        here, there = receive.offset // itemsize, receive.other // itemsize
        arrived = values[receive.region][here : here + count]
        if receive.then == adds_source:
            into, other = arrived, source[there : there + count]
        else:
            into, other = sums[there : there + count], arrived
        accumulate(reduction, into, other)
        if receive.finishes:
            finish(reduction, into, plan.size)
            if plan.added_twice:  # I3: the other rank adds for itself
                make_nan_equal(into)

    return landed


@dataclass(slots=True)
class _Queue:
    """Computations, and how many are done."""

    works: Sequence[Work]
    done: int = 0


_T = TypeVar("_T", Send, Receive)


@dataclass(slots=True)
class _Track(Generic[_T]):
    """One lane, what is to go over it, and how many records have."""

    lane: Lane
    records: Sequence[_T]
    done: int = 0

    @property
    def is_over(self) -> bool:
        return self.done == len(self.records)


class _Execution:
    """One plan under way."""

    def __init__(
        self,
        plan: RankPlan,
        to: Mapping[int, _Track[Send]],
        from_: Mapping[int, _Track[Receive]],
        header: RecordHeader,
        *,
        regions: Sequence[memoryview],
        landed: Callable[[Receive], None],
        work: Callable[[Work], None],
    ) -> None:
        self._plan = plan
        self._to = to
        self._from = from_
        self._header = header
        self._regions = regions
        self._landed = landed
        self._work = work
        self._queues = [_Queue(works) for works in plan.works]
        self._progress = (from_, to, self._queues)  # by `Event`
        self._copied = 0
        self._pipe = Pipeline()

    async def run(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._plan.small or not await self._run_in_line():
            parts = [Stage(self._copy_all())] if self._copied < len(self._plan.copies) else []
            workers = self._queues[:1], self._queues[1:]
            parts += [Stage(self._work_off(queues)) for queues in workers if queues]
            parts += [Stage(self._send_all(track), track.lane) for track in self._to.values()]
            parts += [
                Stage(self._receive_all(track), track.lane)
                for track in self._from.values()
                if not track.is_over
            ]
            await self._pipe.run(
                parts, moving_bytes=self._plan.moving_bytes, computing=bool(self._queues)
            )
        elif not self._from:  # else it has let others run while it received
            await trio.lowlevel.checkpoint()

    async def _run_in_line(self) -> bool:
        """Receive in the plan's order, and before each receive send all that may be sent.

        False: a record doesn't fit its socket's buffer. Every rank might wait for another to
        receive, so the rest takes a pipeline.
        """
        for copy in self._plan.copies:
            self._copy(copy, 0, copy.nbytes)
            self._copied += 1
        for peer in self._plan.in_line:
            if not self._post_all():
                return False
            track = self._from[peer]
            for wait in self._receive_one(track):
                await track.lane.wait_for(wait)
        return self._post_all()

    def _post_all(self) -> bool:
        """Compute and send what may be; False if a socket's buffer is full."""
        while self._queues and self._work_some(self._queues):
            pass
        for track in self._to.values():
            lane, sends = track.lane, track.records
            while track.done < len(sends) and self._has(sends[track.done].needs):
                if not lane.idle:
                    return False
                whole = lane.post(*self._next_record(track))
                track.done += 1
                if not whole:
                    return False
        while self._queues and self._work_some(self._queues):
            pass
        return True

    def _work_off(self, queues: Sequence[_Queue]) -> Steps:
        while any(queue.done < len(queue.works) for queue in queues):
            if self._work_some(queues):
                self._pipe.note_progress()
                yield Wait.TURN
            else:
                yield Wait.PROGRESS

    def _work_some(self, queues: Sequence[_Queue]) -> int:
        """Take one work of each queue, if it may begin; returns how many."""
        count = 0
        for queue in queues:
            if queue.done < len(queue.works) and self._has(queue.works[queue.done].needs):
                self._work(queue.works[queue.done])
                queue.done += 1
                count += 1
        return count

    def _copy_all(self) -> Steps:
        for copy in self._plan.copies:
            for begin in range(0, copy.nbytes, SEGMENT_BYTES):
                self._copy(copy, begin, min(begin + SEGMENT_BYTES, copy.nbytes))
                yield Wait.TURN

    def _copy(self, copy: Copy, begin: int, end: int) -> None:
        source, result = self._regions[Region.SOURCE], self._regions[Region.RESULT]
        result[copy.result + begin : copy.result + end] = source[
            copy.source + begin : copy.source + end
        ]

    def _send_all(self, track: _Track[Send]) -> Steps:
        yield from track.lane.flushes()
        while not track.is_over:
            while not self._has(track.records[track.done].needs):
                yield Wait.PROGRESS
            yield from track.lane.sends(*self._next_record(track))
            track.done += 1
            self._pipe.note_progress()

    def _next_record(self, track: _Track[Send]) -> tuple[RecordHeader, memoryview]:
        send = track.records[track.done]
        place = self._regions[send.region][send.offset : send.offset + send.nbytes]
        return self._header_of(send.nbytes, track.done), place

    def _receive_all(self, track: _Track[Receive]) -> Steps:
        while not track.is_over:
            yield from self._receive_one(track)
            self._pipe.note_progress()

    def _receive_one(self, track: _Track[Receive]) -> Steps:
        receive = track.records[track.done]
        while not self._has(receive.needs):
            yield Wait.PROGRESS
        into = self._regions[receive.region][receive.offset : receive.offset + receive.nbytes]
        yield from track.lane.receives(self._header_of(receive.nbytes, track.done), into)
        self._landed(receive)
        track.done += 1

    def _header_of(self, nbytes: int, segment: int) -> RecordHeader:
        _, roster, op, _, fingerprint, completed = self._header
        return RecordHeader(nbytes, roster, op, segment, fingerprint, completed)

    def _has(self, needs: Sequence[Need]) -> bool:
        for need in needs:  # noqa: SIM110 - all() takes twice the time, for each record
            if self._progress[need.event][need.peer].done < need.number:
                return False
        return True
