"""broadcast, all_gather, gather, scatter and all_to_all, each as the plan of one rank.

Ranks may differ in their counts. Sizes are in bytes, since nothing is computed. An empty block
isn't sent, except in all_gather: that is a barrier, in which every rank waits for all others.
"""

import itertools
from collections.abc import Sequence

from pmesh.core.ops.plan import (
    IN_LINE_BYTES,
    SEGMENT_BYTES,
    Need,
    PlanMaker,
    RankPlan,
    Receive,
    Region,
    SendRecord,
    remembered,
    segments,
)


@remembered
def plan_broadcast(
    *,
    rank: int,
    size: int,
    root: int,
    nbytes: int,
    reach: int | None = None,
    segment_bytes: int = SEGMENT_BYTES,
) -> RankPlan:
    """Plan a broadcast along the ring: a rank passes on each record as soon as it has arrived.

    Args:
        rank: the rank whose plan it is.
        size: the number of ranks.
        root: the rank whose source is the tensor; it becomes the result of the others.
        nbytes: bytes of the tensor. If 0, one empty record goes along the ring.
        reach: how far from the root the tensor goes; None: to all. The ranks beyond get an empty
            record, which tells them that the others have the tensor.
        segment_bytes: the most bytes in a record, the same at all ranks.
    """
    maker = PlanMaker(size=size)
    distance, following, previous = (rank - root) % size, (rank + 1) % size, (rank - 1) % size
    region = Region.RESULT if distance else Region.SOURCE
    tensor, nothing = segments(0, nbytes, segment_bytes=segment_bytes), segments(0, 0)
    reach = size - 1 if reach is None else reach
    needs: tuple[Need, ...] = ()
    for segment in tensor if distance <= reach else nothing:
        if distance:
            needs = (maker.receive(previous, Receive(distance - 1, Region.RESULT, *segment)),)
        if distance < reach:
            maker.send(following, SendRecord(distance, region, *segment, needs))
    if reach <= distance < size - 1:
        maker.send(following, SendRecord(distance, region, *nothing[0], needs))
    return maker.plan(small=nbytes <= IN_LINE_BYTES)


@remembered
def plan_all_gather(
    *,
    rank: int,
    size: int,
    nbytes: tuple[int, ...],
    segment_bytes: int = SEGMENT_BYTES,
    in_place: bool = False,
) -> RankPlan:
    """Plan an all_gather: every block goes once around the ring, unchanged.

    Args:
        rank: the rank whose plan it is. Its source is its own block.
        size: the number of ranks.
        nbytes: bytes of each rank's block; the result is all blocks in the order of ranks.
        segment_bytes: the most bytes in a record, the same at all ranks.
        in_place: whether the rank's own block lies in the result already, and not in its source.
    """
    maker = PlanMaker(size=size)
    bounds = _bounds(nbytes)
    if not in_place:
        maker.copy(source=0, result=bounds[rank], nbytes=nbytes[rank])
    following, previous = (rank + 1) % size, (rank - 1) % size
    arrived: list[Need] = []
    for step in range(size - 1):
        mine, theirs = (rank - step) % size, (rank - step - 1) % size
        block = segments(bounds[mine], bounds[mine + 1], segment_bytes=segment_bytes)
        for i, (offset, length) in enumerate(block):
            if step or in_place:
                needs = (arrived[i],) if step else ()
                maker.send(following, SendRecord(step, Region.RESULT, offset, length, needs))
            else:
                maker.send(
                    following, SendRecord(step, Region.SOURCE, offset - bounds[rank], length)
                )
        block = segments(bounds[theirs], bounds[theirs + 1], segment_bytes=segment_bytes)
        arrived = [
            maker.receive(previous, Receive(step, Region.RESULT, *segment)) for segment in block
        ]
    return maker.plan()


@remembered
def plan_gather(
    *, rank: int, size: int, root: int, nbytes: tuple[int, ...], segment_bytes: int = SEGMENT_BYTES
) -> RankPlan:
    """Plan a gather: every block goes directly to the root.

    Args:
        rank: the rank whose plan it is. Its source is its own block.
        size: the number of ranks.
        root: the rank whose result is all blocks in the order of ranks; the others' is empty.
        nbytes: bytes of each rank's block; ranks other than the root use only their own.
        segment_bytes: the most bytes in a record, the same at all ranks.
    """
    blocks = _Blocks(size, segment_bytes)
    if rank != root:
        blocks.send(root, 0, 0, nbytes[rank])
        return blocks.maker.plan()
    bounds = _bounds(nbytes)
    blocks.maker.copy(source=0, result=bounds[rank], nbytes=nbytes[rank])
    for peer in _others(rank, size):
        blocks.receive(peer, 0, bounds[peer], nbytes[peer])
    return blocks.maker.plan()


@remembered
def plan_scatter(
    *, rank: int, size: int, root: int, nbytes: tuple[int, ...], segment_bytes: int = SEGMENT_BYTES
) -> RankPlan:
    """Plan a scatter: every block comes directly from the root.

    Args:
        rank: the rank whose plan it is. Its result is its own block.
        size: the number of ranks.
        root: the rank whose source is all blocks in the order of ranks; the others' is empty.
        nbytes: bytes of each rank's block; ranks other than the root use only their own.
        segment_bytes: the most bytes in a record, the same at all ranks.
    """
    blocks = _Blocks(size, segment_bytes)
    if rank != root:
        blocks.receive(root, 0, 0, nbytes[rank])
        return blocks.maker.plan()
    bounds = _bounds(nbytes)
    blocks.maker.copy(source=bounds[rank], result=0, nbytes=nbytes[rank])
    for peer in _others(rank, size):
        blocks.send(peer, 0, bounds[peer], nbytes[peer])
    return blocks.maker.plan()


@remembered
def plan_all_to_all(
    *,
    rank: int,
    size: int,
    to: tuple[int, ...],
    from_: tuple[int, ...],
    segment_bytes: int = SEGMENT_BYTES,
) -> RankPlan:
    """Plan an all_to_all: each rank's block for each other rank goes there directly.

    In step i a rank sends to the i-th rank after it, so that no rank gets data from all at once
    (the pairwise exchange of Thakur, Rabenseifner and Gropp 2005). It receives in any order.

    Args:
        rank: the rank whose plan it is.
        size: the number of ranks.
        to: bytes for each rank, in whose order they lie in the source.
        from_: bytes from each rank, in whose order they lie in the result.
        segment_bytes: the most bytes in a record, the same at all ranks.
    """
    blocks = _Blocks(size, segment_bytes)
    sources, results = _bounds(to), _bounds(from_)
    blocks.maker.copy(source=sources[rank], result=results[rank], nbytes=to[rank])
    before: tuple[Need, ...] = ()
    for step, peer in enumerate(_others(rank, size)):
        before = blocks.send(peer, step, sources[peer], to[peer], before) or before
    for step, distance in enumerate(range(1, size)):
        peer = (rank - distance) % size
        blocks.receive(peer, step, results[peer], from_[peer])
    return blocks.maker.plan()


class _Blocks:
    """Plans blocks that go directly to their destination."""

    def __init__(self, size: int, segment_bytes: int) -> None:
        self.maker = PlanMaker(size=size)
        self._segment_bytes = segment_bytes

    def send(
        self, to: int, step: int, offset: int, nbytes: int, needs: tuple[Need, ...] = ()
    ) -> tuple[Need, ...]:
        """Send a block from `offset` of the source; return what to wait for until it is sent."""
        sent: tuple[Need, ...] = ()
        for segment in self._segments(offset, nbytes):
            sent = (self.maker.send(to, SendRecord(step, Region.SOURCE, *segment, needs)),)
        return sent

    def receive(self, from_: int, step: int, offset: int, nbytes: int) -> None:
        """Receive a block at `offset` of the result."""
        for segment in self._segments(offset, nbytes):
            self.maker.receive(from_, Receive(step, Region.RESULT, *segment))

    def _segments(self, offset: int, nbytes: int) -> Sequence[tuple[int, int]]:
        if not nbytes:
            return ()
        return segments(offset, offset + nbytes, segment_bytes=self._segment_bytes)


def _others(rank: int, size: int) -> list[int]:
    """Return the ranks after this one, around the ring to the one before it."""
    return [(rank + distance) % size for distance in range(1, size)]


def _bounds(nbytes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(nbytes, initial=0))
