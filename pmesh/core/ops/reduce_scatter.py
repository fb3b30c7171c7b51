"""reduce and reduce_scatter, along the ring: each as the plan of one rank.

Records that a rank only passes on use a few places in its scratch, in turn. So they need no room
for a whole tensor, and the values that are added to are still in the cache.
"""

import itertools

from pmesh.core.ops.plan import (
    SEGMENT_BYTES,
    Need,
    PlanMaker,
    RankPlan,
    Receive,
    Region,
    SendRecord,
    Then,
    remembered,
    segments,
)

WINDOW = 4
"""How many records may be on their way through a rank: 2 MiB cover 16 ms at 1 Gbit/s."""


@remembered
def plan_reduce(
    *, rank: int, size: int, root: int, nbytes: int, segment_bytes: int = SEGMENT_BYTES
) -> RankPlan:
    """Plan a reduce: the sum runs along the ring from the rank after the root, record by record.

    `source` is the whole tensor; `result` is, too, at the root, and empty elsewhere. This is no
    barrier: only the root waits for all others.

    Args:
        rank: the rank whose plan it is.
        size: the number of ranks.
        root: the rank that gets the result.
        nbytes: bytes of the tensor.
        segment_bytes: the most bytes in a record, the same at all ranks; whole values.
    """
    maker = PlanMaker(size=size)
    if size == 1:
        maker.copy(source=0, result=0, nbytes=nbytes)
        return maker.plan()
    distance = (rank - root - 1) % size  # from the chain's beginning
    following, previous = (rank + 1) % size, (rank - 1) % size
    window = _Window(nbytes=min(nbytes, segment_bytes), places=WINDOW)
    for offset, length in segments(0, nbytes, segment_bytes=segment_bytes):
        if rank == root:
            maker.receive(previous, _added(distance - 1, offset, length, offset, finishes=True))
        elif distance:
            place, free = window.take()
            passing = _passing(distance - 1, place, length, offset, free)
            landed = maker.receive(previous, passing)
            sent = maker.send(
                following, SendRecord(distance, Region.SCRATCH, place, length, (landed,))
            )
            window.use(sent)
        else:
            maker.send(following, SendRecord(0, Region.SOURCE, offset, length))
    return maker.plan()


@remembered
def plan_reduce_scatter(
    *, rank: int, size: int, nbytes: tuple[int, ...], segment_bytes: int = SEGMENT_BYTES
) -> RankPlan:
    """Plan a reduce_scatter: each rank gets the sum of its own part. It is a barrier.

    This is the first half of the ring all-reduce, one chunk further, so that rank r gets chunk r:

        step         0 ... n-2
        rank r sends     chunk r - step - 1
        and receives     chunk r - step - 2, to add to; in the last step its own

    Large chunks go around a few records at a time, so that what is passed on needs little room.

    Args:
        rank: the rank whose plan it is.
        size: the number of ranks.
        nbytes: bytes of each rank's part, whole values. The source is all parts in the order of
            ranks; the result is the own part.
        segment_bytes: the most bytes in a record, the same at all ranks; whole values too.
    """
    maker = PlanMaker(size=size)
    bounds = [0, *itertools.accumulate(nbytes)]
    if size == 1:
        maker.copy(source=0, result=0, nbytes=bounds[1])
        return maker.plan()
    following, previous = (rank + 1) % size, (rank - 1) % size
    chunks = [segments(bounds[c], bounds[c + 1], segment_bytes=segment_bytes) for c in range(size)]
    # A rank passes on a record of a batch only once it has sent its own of that batch: with fewer
    # places than two batches all ranks might wait for each other.
    window = _Window(nbytes=min(max(nbytes), segment_bytes), places=2 * WINDOW)
    for begin in range(0, max(map(len, chunks)), WINDOW):
        batch = slice(begin, begin + WINDOW)
        passing: list[tuple[int, Need]] = []
        for step in range(size - 1):
            arrived, passing = passing, []
            for i, (offset, length) in enumerate(chunks[(rank - step - 1) % size][batch]):
                if step:
                    place, landed = arrived[i]
                    onward = SendRecord(step, Region.SCRATCH, place, length, (landed,))
                    window.use(maker.send(following, onward))
                else:
                    maker.send(following, SendRecord(step, Region.SOURCE, offset, length))
            for offset, length in chunks[(rank - step - 2) % size][batch]:
                if step == size - 2:
                    own = _added(step, offset - bounds[rank], length, offset, finishes=True)
                    maker.receive(previous, own)
                else:
                    place, free = window.take()
                    receive = _passing(step, place, length, offset, free)
                    passing.append((place, maker.receive(previous, receive)))
    return maker.plan()


class _Window:
    """Places in the scratch, taken in turn."""

    def __init__(self, *, nbytes: int, places: int) -> None:
        self._nbytes = nbytes
        self._places = places
        self._taken = 0
        self._sent: list[Need] = []

    def take(self) -> tuple[int, tuple[Need, ...]]:
        """Return the next place, and what to wait for until its last record has been sent on."""
        number = self._taken
        self._taken += 1
        earlier = number - self._places
        needs = (self._sent[earlier],) if earlier >= 0 else ()
        return number % self._places * self._nbytes, needs

    def use(self, sent: Need) -> None:
        """Note the send that frees a place, in the order of `take`."""
        self._sent.append(sent)


def _added(step: int, offset: int, nbytes: int, source: int, *, finishes: bool) -> Receive:
    return Receive(
        step,
        Region.RESULT,
        offset,
        nbytes,
        then=Then.ADD_SOURCE,
        other=source,
        finishes=finishes,
    )


def _passing(step: int, place: int, nbytes: int, source: int, needs: tuple[Need, ...]) -> Receive:
    return Receive(step, Region.SCRATCH, place, nbytes, needs, Then.ADD_SOURCE, source)
