"""The plans of all ranks, run in memory in any order that they allow."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pmesh.core.ops.plan import Need, PlanEvent, RankPlan, Receive, Region, SendRecord, Then
from pmesh.core.ops.reductions import Values, accumulate, finish

Bytes = NDArray[np.uint8]
GARBAGE = 0xEE
"""What a place holds from when something may land there until it has."""


class Deadlock(AssertionError):  # noqa: N818 - what it is
    """Something is left to do, and nothing can be done."""


@dataclass(slots=True)
class _LaneState:
    """One direction between two ranks."""

    sender: int
    receiver: int
    sent: int = 0
    received: int = 0
    sending: bool = False
    receiving: bool = False
    landing: Literal["not yet", "partly", "wholly"] = "not yet"
    records: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOrder:
    """Who goes first, where several may."""

    seed: int
    room: int
    """Records that fit between two ranks; none: a send ends only when its receiver waits."""
    in_line: bool = False
    """Each rank receives in the order of its plan's `in_line`."""


class PlanWorld:
    """Every rank with its regions. A send may read its place at any time until it ends, a record
    spoil the place where it lands as soon as it is on its way there; it is added some time later.
    """

    def __init__(
        self, plans: Sequence[RankPlan], sources: Sequence[Values], *, reduction: str = "sum"
    ) -> None:
        self.plans = plans
        self.reduction = reduction
        self.dtype = sources[0].dtype
        self.sources = [source.view(np.uint8) for source in sources]
        self.lanes = {
            (rank, peer): _LaneState(rank, peer)
            for rank, plan in enumerate(plans)
            for peer in plan.sends
        }

    def run(self, order: TurnOrder, results: Sequence[int | Bytes]) -> list[Bytes]:
        """Do it all; returns each rank's result, of so many bytes, or which has these before."""
        self._order, self._dice = order, Random(order.seed)  # noqa: S311 - no secret
        self._regions: list[Mapping[Region, Bytes]] = [
            {
                Region.SOURCE: source,
                Region.RESULT: np.full(result, GARBAGE, np.uint8)
                if isinstance(result, int)
                else result.copy(),
                Region.SCRATCH: np.full(plan.scratch_bytes, GARBAGE, np.uint8),
            }
            for plan, source, result in zip(self.plans, self.sources, results, strict=True)
        ]
        before = [source.tobytes() for source in self.sources]
        lanes = list(self.lanes.values())
        while any(self._advance(lane, half) for lane, half in self._in_some_order(lanes)):
            pass
        self._copy()
        for lane in lanes:
            if lane.sent < len(self._sends(lane)) or lane.received < len(self._receives(lane)):
                raise Deadlock(lane)
            assert not lane.records
        assert [source.tobytes() for source in self.sources] == before  # I8
        return [regions[Region.RESULT] for regions in self._regions]

    def _in_some_order(self, lanes: list[_LaneState]) -> Iterator[tuple[_LaneState, bool]]:
        """Now and then others become the favourites, so that some run far ahead."""
        if self._dice.random() < 1 / (1 + 2 * len(lanes)):
            self._dice.shuffle(lanes)
        halves = [(lane, half) for lane in lanes for half in (False, True)]
        if self._dice.random() < 1 / 4:
            self._dice.shuffle(halves)
        return iter(halves)

    def _advance(self, lane: _LaneState, receiving: bool) -> bool:  # noqa: FBT001 - one of two halves
        return self._advance_receive(lane) if receiving else self._advance_send(lane)

    def _advance_send(self, lane: _LaneState) -> bool:
        sends = self._sends(lane)
        if lane.sent == len(sends):
            return False
        send = sends[lane.sent]
        if not lane.sending:
            lane.sending = self._has(lane.sender, send.needs)
            return lane.sending
        if len(lane.records) >= (self._order.room or lane.receiving):
            return False
        lane.records.append(self._place(lane.sender, send).tobytes())
        lane.sent += 1
        lane.sending = False
        return True

    def _advance_receive(self, lane: _LaneState) -> bool:
        receives = self._receives(lane)
        if lane.received == len(receives):
            return False
        receive = receives[lane.received]
        place = self._place(lane.receiver, receive)
        if not lane.receiving:
            lane.receiving = self._has(lane.receiver, receive.needs) and self._is_next(lane)
            return lane.receiving
        if not lane.records:
            return False
        if lane.landing == "not yet":
            place[:] = GARBAGE
            lane.landing = "partly"
        elif lane.landing == "partly":
            place[:] = np.frombuffer(lane.records[0], np.uint8)
            lane.landing = "wholly"
        else:
            lane.records.pop(0)
            self._add(lane.receiver, receive)
            lane.received += 1
            lane.receiving, lane.landing = False, "not yet"
        return True

    def _is_next(self, lane: _LaneState) -> bool:
        if not self._order.in_line:
            return True
        plan = self.plans[lane.receiver]
        received = sum(self.lanes[peer, lane.receiver].received for peer in plan.receives)
        return plan.in_line[received] == lane.sender

    def _add(self, rank: int, receive: Receive) -> None:
        regions = self._regions[rank]
        if receive.then is Then.KEEP:
            return
        landed = self._place(rank, receive).view(self.dtype)
        region = Region.SOURCE if receive.then is Then.ADD_SOURCE else Region.RESULT
        other = regions[region][receive.other : receive.other + receive.nbytes].view(self.dtype)
        into, added = (landed, other) if region is Region.SOURCE else (other, landed)
        accumulate(self.reduction, into, added)
        if receive.finishes:
            finish(self.reduction, into, self.plans[rank].size)

    def _copy(self) -> None:
        """Last: nothing waits for it."""
        for plan, regions in zip(self.plans, self._regions, strict=True):
            for copy in plan.copies:
                regions[Region.RESULT][copy.result : copy.result + copy.nbytes] = regions[
                    Region.SOURCE
                ][copy.source : copy.source + copy.nbytes]

    def _has(self, rank: int, needs: Sequence[Need]) -> bool:
        return all(
            self.lanes[rank, need.peer].sent >= need.number
            if need.event is PlanEvent.SENT
            else self.lanes[need.peer, rank].received >= need.number
            for need in needs
        )

    def _place(self, rank: int, transfer: SendRecord | Receive) -> Bytes:
        place = self._regions[rank][transfer.region]
        assert 0 <= transfer.offset <= transfer.offset + transfer.nbytes <= len(place)
        return place[transfer.offset : transfer.offset + transfer.nbytes]

    def _sends(self, lane: _LaneState) -> Sequence[SendRecord]:
        return self.plans[lane.sender].sends[lane.receiver]

    def _receives(self, lane: _LaneState) -> Sequence[Receive]:
        return self.plans[lane.receiver].receives[lane.sender]


def check_shape(plans: Sequence[RankPlan], *, segment_bytes: int) -> None:
    """What holds for the plans of every collective, before any is run."""
    for rank, plan in enumerate(plans):
        assert all(rank in plans[peer].sends for peer in plan.receives)
        assert rank not in plan.sends
        for peer, sends in plan.sends.items():
            receives = plans[peer].receives[rank]
            assert [(s.step, s.nbytes) for s in sends] == [(r.step, r.nbytes) for r in receives]
            assert all(0 <= send.nbytes <= segment_bytes for send in sends)
            for send in sends:
                for need in send.needs:
                    assert need.event or plan.receives[need.peer][need.number - 1].step < send.step
        count = sum(map(len, plan.receives.values()))
        assert len(plan.in_line) == (count if plan.small else 0)


def values_of(size: int, count: int, dtype: str, *, seed: int) -> list[Values]:
    """Whole numbers, so that sums are exact in any order, or else any."""
    dice = np.random.default_rng(seed)
    rows: list[NDArray[Any]] = [dice.integers(-9, 10, count) for _ in range(size)]
    if dtype == "float32":
        rows = [row * dice.random(count) for row in rows]
    return [row.astype(dtype) for row in rows]
