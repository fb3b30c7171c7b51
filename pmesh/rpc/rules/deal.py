"""How `mesh.rpc.map` deals its items to machines that are unequal and may be lost."""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from pmesh.ids import TrainerId

AHEAD = 2  # items that a rank has at a time: the next one has arrived when one is done


class Dealt(NamedTuple):
    """An item for a rank."""

    rank: TrainerId
    item: int


class Deal:
    """Bookkeeping without I/O. The result of each item is used once.

    A rank gets an item when it has returned one, so each gets work as fast as it takes it. Once the
    items run short, a rank gets one at a time, lest the last ones wait at a slow rank.
    """

    def __init__(self, items: int) -> None:
        self._left = list(range(items))  # sorted, and so a heap
        self._of: dict[TrainerId, set[int]] = {}
        self._lost: set[TrainerId] = set()
        self._full: set[TrainerId] = set()
        self._missing = items

    @property
    def is_done(self) -> bool:
        """True if each item has a result."""
        return not self._missing

    @property
    def ranks(self) -> tuple[TrainerId, ...]:
        """The ranks that are left."""
        return tuple(self._of)

    @property
    def under_way(self) -> int:
        """The number of items that ranks have now."""
        return sum(map(len, self._of.values()))

    def join(self, ranks: Iterable[TrainerId]) -> None:
        """Give items to these ranks too, except to those that were lost."""
        for rank in ranks:
            if rank not in self._lost:
                self._of.setdefault(rank, set())

    def deal(self) -> list[Dealt]:
        """Give items to the ranks that have fewest."""
        dealt: list[Dealt] = []
        while self._left:
            open_ = [rank for rank in self._of if rank not in self._full]
            rank = min(open_, key=lambda each: len(self._of[each]), default=None)
            most = AHEAD if len(self._left) > len(self._of) else 1
            if rank is None or len(self._of[rank]) >= most:
                break
            item = heapq.heappop(self._left)
            self._of[rank].add(item)
            dealt.append(Dealt(rank, item))
        return dealt

    def done(self, rank: TrainerId, item: int) -> bool:
        """Note a result; return False if it is not to be used."""
        self._full.clear()
        if item not in self._of.get(rank, ()):
            return False
        self._of[rank].remove(item)
        self._missing -= 1
        return True

    def refused(self, rank: TrainerId, item: int) -> None:
        """Take an item back from a rank that is full; it gets no other before `retry` or `done`."""
        if item in self._of.get(rank, ()):
            self._of[rank].remove(item)
            heapq.heappush(self._left, item)
            self._full.add(rank)

    def retry(self) -> None:
        """Give items to ranks that were full."""
        self._full.clear()

    def lose(self, rank: TrainerId) -> None:
        """Give the items of a lost rank to others."""
        for item in self._of.pop(rank, set()):
            heapq.heappush(self._left, item)
        self._full.discard(rank)
        self._lost.add(rank)
