"""Runs the plan of any collective (`pmesh.core.ops.plan`), over lanes to and from any ranks.

Each lane's records go in their order, and wait for what the plan says. While they are large, a crew
has a member for every lane; small ones fit the sockets' buffers and go in line, because switching
tasks would cost more than the network.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import trio

from pmesh.core.ops.plan import Copy, Need, RankPlan, Receive, Region, Then
from pmesh.core.ops.reductions import WIRE_DTYPES, accumulate, finish
from pmesh.core.ops.schedule import SEGMENT_BYTES
from pmesh.core.wire.records import RecordHeader
from pmesh.net.lanes.lane import Lane, Steps, Wait
from pmesh.net.lanes.pipeline import Crew, Part


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
    regions = {
        Region.SOURCE: source,
        Region.RESULT: result,
        Region.SCRATCH: np.empty(plan.scratch_bytes, np.uint8).data,
    }
    landed = _adding(plan.size, regions, dtype, reduction) if dtype else _keep
    await _Run(plan, lanes_to, lanes_from, header, regions=regions, landed=landed).run()


def _keep(_receive: Receive) -> None:
    """What becomes of a record where nothing is reduced."""


def _adding(
    size: int, regions: Mapping[Region, memoryview], dtype: str, reduction: str
) -> Callable[[Receive], None]:
    """What becomes of a record that has landed."""
    values = {
        region: np.frombuffer(memory, WIRE_DTYPES[dtype]) for region, memory in regions.items()
    }
    itemsize = WIRE_DTYPES[dtype].itemsize

    def landed(receive: Receive) -> None:
        if receive.then is Then.KEEP or not receive.nbytes:
            return
        count = receive.nbytes // itemsize
        here, there = receive.offset // itemsize, receive.other // itemsize
        arrived = values[receive.region][here : here + count]
        if receive.then is Then.ADD_SOURCE:
            into, other = arrived, values[Region.SOURCE][there : there + count]
        else:
            into, other = values[Region.RESULT][there : there + count], arrived
        accumulate(reduction, into, other)
        if receive.finishes:
            finish(reduction, into, size)

    return landed


class _Run:
    """One plan under way: how far it is on each lane."""

    def __init__(
        self,
        plan: RankPlan,
        lanes_to: Mapping[int, Lane],
        lanes_from: Mapping[int, Lane],
        header: RecordHeader,
        *,
        regions: Mapping[Region, memoryview],
        landed: Callable[[Receive], None],
    ) -> None:
        self._plan = plan
        self._lanes_to = {peer: lanes_to[peer] for peer in plan.sends}
        self._lanes_from = {peer: lanes_from[peer] for peer in plan.receives}
        self._header = header
        self._regions = regions
        self._landed = landed
        self._sent = dict.fromkeys(plan.sends, 0)
        self._received = dict.fromkeys(plan.receives, 0)
        self._copied = 0
        self._crew = Crew()

    async def run(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._plan.small:
            await self._run_in_line()
        parts: list[Part] = []
        if self._copied < len(self._plan.copies):
            parts.append(Part(self._copy_all()))
        for peer, lane in self._lanes_to.items():
            if self._sent[peer] < len(self._plan.sends[peer]) or not lane.idle:
                parts.append(Part(self._send_all(peer), lane))
        for peer, received in self._received.items():
            if received < len(self._plan.receives[peer]):
                parts.append(Part(self._receive_all(peer), self._lanes_from[peer]))
        if parts:
            await self._crew.run(parts, moving_bytes=self._plan.moving_bytes)
        elif not self._received:  # else it has let others run while it received
            await trio.lowlevel.checkpoint()

    async def _run_in_line(self) -> None:
        """Receive in the plan's order, and before each receive send all that may be sent.

        Up to a record that doesn't fit its socket's buffer: then every rank might wait for another
        to receive, and the rest takes a crew.
        """
        for copy in self._plan.copies:
            self._copy(copy, 0, copy.nbytes)
            self._copied += 1
        if not self._post_all():
            return
        for peer in self._plan.in_line:
            for wait in self._receive_one(peer):
                await self._lanes_from[peer].wait_for(wait)
            if not self._post_all():
                return

    def _post_all(self) -> bool:
        """Send what may be sent; False if a socket's buffer is full."""
        for peer, lane in self._lanes_to.items():
            while self._may_send(peer):
                if not lane.idle:
                    return False
                whole = lane.post(*self._record(peer))
                self._sent[peer] += 1
                if not whole:
                    return False
        return True

    def _may_send(self, peer: int) -> bool:
        number, sends = self._sent[peer], self._plan.sends[peer]
        return number < len(sends) and self._has(sends[number].needs)

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

    def _send_all(self, peer: int) -> Steps:
        lane, sends = self._lanes_to[peer], self._plan.sends[peer]
        yield from lane.flushes()
        while self._sent[peer] < len(sends):
            while not self._has(sends[self._sent[peer]].needs):
                yield Wait.PROGRESS
            yield from lane.sends(*self._record(peer))
            self._sent[peer] += 1
            self._crew.note_progress()

    def _record(self, peer: int) -> tuple[RecordHeader, memoryview]:
        number = self._sent[peer]
        send = self._plan.sends[peer][number]
        header = self._header._replace(body_bytes=send.nbytes, segment=number)
        return header, self._regions[send.region][send.offset : send.offset + send.nbytes]

    def _receive_all(self, peer: int) -> Steps:
        for _ in range(self._received[peer], len(self._plan.receives[peer])):
            yield from self._receive_one(peer)

    def _receive_one(self, peer: int) -> Steps:
        number = self._received[peer]
        receive = self._plan.receives[peer][number]
        while not self._has(receive.needs):
            yield Wait.PROGRESS
        expected = self._header._replace(body_bytes=receive.nbytes, segment=number)
        into = self._regions[receive.region][receive.offset : receive.offset + receive.nbytes]
        yield from self._lanes_from[peer].receives(expected, into)
        self._landed(receive)
        self._received[peer] += 1
        self._crew.note_progress()

    def _has(self, needs: Sequence[Need]) -> bool:
        return all(
            (self._sent if need.sent else self._received)[need.peer] >= need.number
            for need in needs
        )
