"""Ranks in one process with a lane between any two of them that need one, over real sockets."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import trio
from numpy.typing import NDArray

from pmesh.core.plans import RankPlan
from pmesh.core.records import OVERHEAD_BYTES, RecordHeader
from pmesh.net.lane_opening import local_lanes
from pmesh.net.lanes import Lane
from pmesh.net.transfers import run_plan
from tests.net.rings import offer_between, shrink

Bytes = NDArray[np.uint8]


@dataclass
class Web:
    """All lanes, by sender and receiver: the ends of each."""

    roster: int = 1
    buffer_bytes: int | None = None
    sending: dict[tuple[int, int], Lane] = field(default_factory=dict)
    receiving: dict[tuple[int, int], Lane] = field(default_factory=dict)

    def open(self, plans: Sequence[RankPlan]) -> None:
        """Whatever these plans need and there isn't yet."""
        for rank, plan in enumerate(plans):
            for peer in plan.peers_to:
                if (rank, peer) not in self.sending:
                    self._open(rank, peer)

    def _open(self, rank: int, peer: int) -> None:
        offer = offer_between(rank, peer, number=1)
        lanes = local_lanes(offer, peers=(f"mac-{peer}", f"mac-{rank}"))
        for lane in lanes:
            if self.buffer_bytes is not None:
                shrink(lane, self.buffer_bytes)
        self.sending[rank, peer], self.receiving[rank, peer] = lanes

    def lanes_of(self, rank: int) -> Iterable[Lane]:
        """All ends of one rank."""
        yield from (lane for (a, _), lane in self.sending.items() if a == rank)
        yield from (lane for (_, b), lane in self.receiving.items() if b == rank)

    def bytes_sent(self, rank: int) -> int:
        """By that rank on all of its lanes."""
        return sum(lane.bytes_sent for (a, _), lane in self.sending.items() if a == rank)

    def close(self) -> None:
        for lane in [*self.sending.values(), *self.receiving.values()]:
            lane.close()


@contextmanager
def web(*, buffer_bytes: int | None = None) -> Iterator[Web]:
    """No lane yet; `buffer_bytes` makes the network slow."""
    lanes = Web(buffer_bytes=buffer_bytes)
    try:
        yield lanes
    finally:
        lanes.close()


@dataclass(kw_only=True)
class Collective:
    """An op at all ranks: their plans, sources, and how many bytes each result has."""

    plans: Sequence[RankPlan]
    sources: Sequence[Bytes]
    results: Sequence[int]
    dtype: str = ""
    reduction: str = ""
    op: int = 0
    fingerprints: Sequence[int] | None = None

    async def at(self, rank: int, lanes: Web) -> Bytes:
        """One rank's part; its result begins as garbage, its source is read-only (I8)."""
        source, result = self.sources[rank], np.full(self.results[rank], 0xEE, np.uint8)
        before = source.tobytes()
        await self.run(rank, lanes, result)
        assert source.tobytes() == before
        return result

    async def run(self, rank: int, lanes: Web, result: Bytes) -> None:
        """The same, without a byte of its own."""
        lanes.open(self.plans)
        mark = self.fingerprints[rank] if self.fingerprints else 9
        await run_plan(
            self.plans[rank],
            {b: lane for (a, b), lane in lanes.sending.items() if a == rank},
            {a: lane for (a, b), lane in lanes.receiving.items() if b == rank},
            RecordHeader(0, lanes.roster, self.op, 0, mark, completed=self.op - 1),
            source=self.sources[rank].data.toreadonly(),
            result=result.data,
            dtype=self.dtype,
            reduction=self.reduction,
        )

    async def everywhere(self, lanes: Web) -> list[Bytes]:
        """All ranks' results."""
        results: list[Bytes] = [np.empty(0, np.uint8)] * len(self.plans)

        async def call(rank: int) -> None:
            results[rank] = await self.at(rank, lanes)

        async with trio.open_nursery() as nursery:
            for rank in range(len(self.plans)):
                nursery.start_soon(call, rank)
        return results


def bytes_on_the_wire(plan: RankPlan) -> int:
    """What the plan's records take, with their headers."""
    return plan.bytes_sent + OVERHEAD_BYTES * sum(map(len, plan.sends.values()))
