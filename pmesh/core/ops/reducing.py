"""all_reduce by each strategy, as the plan of one rank.

For all_reduce `source` and `result` are whole tensors. Every strategy is a barrier, even without
values: each rank sends at least one record in each step, which may be empty, and no rank ends
before all have started. Steps and bytes stand in docs/explanation/algorithms.md.

ring          Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
              workstations" (2009).
tree          Recursive halving, then recursive doubling: Thakur, Rabenseifner and Gropp,
              "Optimization of collective communication operations in MPICH" (2005). There, ranks
              beyond a power of two are folded into others, which then send up to 3 B. Here the
              halves are those of a circulant graph (Träff, "Optimal, non-pipelined reduce-scatter
              and allreduce algorithms", 2024): as few steps, and 2 B at most, for any number.
centralized   Each rank sends its tensor to rank 0, which sends the sum back.
hierarchical  A chain inside each island to its first rank, a ring of these, and the chain back: so
              a slow edge carries no more than in a ring with one rank for each island.
chain         The sum travels along a line of ranks to its first one, and the result back: the edge
              between the line's ends is not used.
direct        Each rank sends every chunk directly to the rank that adds it up, which sends the sum
              to all: the "pairwise" reduce_scatter of Thakur et al. and its all_gather, all
              exchanges of each at once.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pmesh.core.ops.plan import (
    IN_LINE_BYTES,
    LARGE_CHUNK_BYTES,
    LARGE_SEGMENT_BYTES,
    SEGMENT_BYTES,
    SHORT_SEGMENT_BYTES,
    SMALL_BYTES,
    Need,
    PlanMaker,
    RankPlan,
    Receive,
    Region,
    SendRecord,
    Then,
    chain_segment_bytes,
    chunk_bounds,
    halvings,
    remembered,
    segments,
)
from pmesh.core.ops.reductions import WIRE_DTYPES, is_exact

_Needs = tuple[Need, ...]


class _Record(NamedTuple):
    """A part of the tensor that travels as one record."""

    chunk: int
    """The number of its chunk: several chunks may be empty at the same offset."""
    offset: int
    nbytes: int


@remembered
def plan_ring(
    *, rank: int, size: int, count: int, itemsize: int, segment_bytes: int | None = None
) -> RankPlan:
    """Plan the ring all-reduce of `count` values of `itemsize` bytes.

    It takes 2(size-1) steps and sends 2(size-1)/size of the tensor, rounded to whole values.

    Args:
        rank: the rank whose plan it is.
        size: the number of ranks.
        count: how many values the tensor has.
        itemsize: bytes of a value.
        segment_bytes: the most bytes in a record, the same at all ranks; a multiple of `itemsize`.
            None: larger records for a large chunk.
    """
    chunk_bytes = -(-count // size) * itemsize
    if segment_bytes is None:
        large = chunk_bytes >= LARGE_CHUNK_BYTES
        segment_bytes = LARGE_SEGMENT_BYTES if large else SEGMENT_BYTES
    bounds = [value * itemsize for value in chunk_bounds(count, size)]
    islands = tuple((member,) for member in range(size))
    maker = _plan_islands(rank, size, islands, bounds, segment_bytes)
    return maker.plan(small=chunk_bytes <= IN_LINE_BYTES)


def plan_along_ring(
    *,
    rank: int,
    size: int,
    count: int,
    dtype: str,
    reduction: str = "sum",
    segment_bytes: int | None = None,
) -> RankPlan:
    """Plan the ring all-reduce of `count` values; two ranks with few values exchange them.

    For `segment_bytes` see `plan_ring`.
    """
    itemsize = WIRE_DTYPES[dtype].itemsize
    is_small = count * itemsize <= SMALL_BYTES
    if size == 2 and is_small and is_exact(reduction, dtype):  # noqa: PLR2004 - as it says
        return plan_exchange(rank=rank, size=2, nbytes=count * itemsize)
    return plan_ring(
        rank=rank, size=size, count=count, itemsize=itemsize, segment_bytes=segment_bytes
    )


@remembered
def plan_exchange(*, rank: int, size: int, nbytes: int) -> RankPlan:
    """Plan an exchange: each rank sends its whole tensor, a small one, to all others in one step.

    Two ranks send as many bytes as along their ring. Each rank adds up all values, beginning with
    its own, so their order must not matter: there are two values, or they are integers.
    """
    maker = PlanMaker(size=size)
    if size == 1:
        return _alone(nbytes)
    peers = _all_others(rank, size)
    for record in (_Record(0, *segment) for segment in segments(0, nbytes)):
        for peer in peers:
            maker.send(peer, _send(0, Region.SOURCE, record))
        _receive_sum(maker, peers, record, places=itertools.repeat(0))
    return maker.plan(added_twice=True)


@remembered
def plan_direct(
    *, rank: int, size: int, count: int, itemsize: int, segment_bytes: int = SHORT_SEGMENT_BYTES
) -> RankPlan:
    """Plan `direct`: each chunk goes to its owner, which adds in ring order and sends it to all.

    It takes two steps, and as many bytes as a ring. For the arguments see `plan_ring`.
    """
    maker = PlanMaker(size=size)
    if size == 1:
        return _alone(count * itemsize)
    bounds = [value * itemsize for value in chunk_bounds(count, size)]
    chunks = [
        [_Record(number, *segment) for segment in segments(*ends, segment_bytes=segment_bytes)]
        for number, ends in enumerate(itertools.pairwise(bounds))
    ]
    peers, own = _all_others(rank, size), chunks[rank]
    for peer in peers:
        for record in chunks[peer]:
            maker.send(peer, _send(0, Region.SOURCE, record))
    for record in own:
        done = _receive_sum(maker, peers, record, places=itertools.count(0, own[0].nbytes))
        for peer in peers:
            maker.send(peer, _send(1, Region.RESULT, record, (done,)))
    for peer in peers:
        for record in chunks[peer]:
            maker.receive(peer, _keep(1, record))
    return maker.plan()


def _all_others(rank: int, size: int) -> list[int]:
    return [(rank + distance) % size for distance in range(1, size)]


def _receive_sum(
    maker: PlanMaker, peers: Sequence[int], record: _Record, *, places: Iterable[int]
) -> Need:
    """Add a record from each peer, in their order, in step 0; return what to wait for.

    `places` are where the records land in the scratch; the first peer's record needs none.
    """
    first, *others = peers
    done = maker.receive(first, _add_source(0, record, finishes=not others))
    for peer, place in zip(others, places, strict=False):
        finishes = peer == others[-1]
        added = _add_to_result(0, record, (done,), slot=place, finishes=finishes)
        done = maker.receive(peer, added)
    return done


@remembered
def plan_centralized(
    *, rank: int, size: int, count: int, itemsize: int, segment_bytes: int = SEGMENT_BYTES
) -> RankPlan:
    """Plan `centralized`: rank 0 adds in the order of ranks. For the arguments see `plan_ring`."""
    maker = PlanMaker(size=size)
    nbytes, furthest = count * itemsize, size - 1
    if size == 1:
        return _alone(nbytes)
    records = [_Record(0, *segment) for segment in segments(0, nbytes, segment_bytes=segment_bytes)]
    for record in records:
        if rank:
            maker.send(0, _send(0, Region.SOURCE, record))
            maker.receive(0, _keep(1, record))
            continue
        last = maker.receive(1, _add_source(0, record, finishes=furthest == 1))
        for peer in range(2, size):
            slot = (peer - 2) * records[0].nbytes
            added = _add_to_result(0, record, (last,), slot=slot, finishes=peer == furthest)
            last = maker.receive(peer, added)
        for peer in range(1, size):
            maker.send(peer, _send(1, Region.RESULT, record, (last,)))
    return maker.plan()


@remembered
def plan_tree(
    *, rank: int, size: int, count: int, itemsize: int, segment_bytes: int = SEGMENT_BYTES
) -> RankPlan:
    """Plan recursive halving and doubling. For the arguments see `plan_ring`.

    A rank counts the blocks from its own. In each halving step it sends the blocks from the
    `half`-th on to the rank `half` further, which is that much closer to their owners, and adds
    what it receives. Doubling takes the same steps back, with finished blocks.
    """
    maker = PlanMaker(size=size)
    if size == 1:
        return _alone(count * itemsize)
    bounds = [value * itemsize for value in chunk_bounds(count, size)]
    blocks = _RankBlocks(bounds, split=size // 2, segment_bytes=segment_bytes)
    ways = tuple(halvings(size))
    for step, (half, below) in enumerate(ways):
        to, from_, before = (rank + half) % size, (rank - half) % size, maker.landed()
        for record in blocks.cut(rank, range(half, below)):
            is_sum = step > 0 and (record.chunk - rank) % size < size // 2
            region = Region.RESULT if is_sum else Region.SOURCE
            maker.send(to, _send(step, region, record, before))
        for record in blocks.cut(from_, range(half, below)):
            finishes = half == 1
            if step:
                added = _add_to_result(step, record, before, finishes=finishes)
            else:
                added = _add_source(step, record, finishes=finishes)
            maker.receive(from_, added)
    for step, (half, below) in enumerate(reversed(ways), start=len(ways)):
        to, from_, before = (rank - half) % size, (rank + half) % size, maker.landed()
        for record in blocks.cut(rank, range(below - half)):
            maker.send(to, _send(step, Region.RESULT, record, before))
        for record in blocks.cut(from_, range(below - half)):
            maker.receive(from_, _keep(step, record))
    return maker.plan()


@remembered
def plan_hierarchical(
    *,
    rank: int,
    size: int,
    count: int,
    itemsize: int,
    islands: tuple[tuple[int, ...], ...],
    segment_bytes: int = SEGMENT_BYTES,
) -> RankPlan:
    """Plan a ring of islands. Its phases run at the same time, record by record.

    Args:
        rank: as for `plan_ring`.
        size: as for `plan_ring`.
        count: as for `plan_ring`.
        itemsize: as for `plan_ring`.
        islands: every rank once; their order is that of the ring, and the order within each that
            of its chain. One island, or islands of one rank each, make an ordinary ring.
        segment_bytes: as for `plan_ring`.
    """
    if len(islands) == 1:
        islands = tuple((member,) for member in islands[0])
    bounds = [value * itemsize for value in chunk_bounds(count, len(islands))]
    return _plan_islands(rank, size, islands, bounds, segment_bytes).plan()


@remembered
def plan_chain(
    *,
    rank: int,
    size: int,
    count: int,
    itemsize: int,
    line: tuple[int, ...],
    segment_bytes: int | None = None,
) -> RankPlan:
    """Plan a chain: partial sums travel to the first rank of a line, and the result travels back.

    Each rank exchanges records only with its neighbours in the line. Both directions are in use at
    the same time, and each edge carries the tensor once in each.

    Args:
        rank: as for `plan_ring`.
        size: as for `plan_ring`.
        count: as for `plan_ring`.
        itemsize: as for `plan_ring`.
        line: every rank once, in the order of the line.
        segment_bytes: as for `plan_ring`. None: as `chain_segment_bytes` says.
    """
    if size == 1:
        return _alone(count * itemsize)
    maker, nbytes = PlanMaker(size=size), count * itemsize
    most = chain_segment_bytes(size, nbytes) if segment_bytes is None else segment_bytes
    cut = segments(0, nbytes, segment_bytes=most)
    chain = _Chain(maker, line, rank, longest=size, finishes=rank == line[0])
    sums = {record: chain.reduce(record) for record in (_Record(0, *part) for part in cut)}
    for record, needs in sums.items():
        chain.spread(record, needs, step=chain.steps)
    return maker.plan()


def _plan_islands(
    rank: int,
    size: int,
    islands: Sequence[Sequence[int]],
    bounds: Sequence[int],
    segment_bytes: int,
) -> PlanMaker:
    """Plan a ring of islands, with one chunk for each; `bounds` are the ends of the chunks."""
    maker = PlanMaker(size=size)
    if size == 1:
        maker.copy(source=0, result=0, nbytes=bounds[-1])
        return maker
    chunks = [
        [_Record(number, *segment) for segment in segments(*ends, segment_bytes=segment_bytes)]
        for number, ends in enumerate(itertools.pairwise(bounds))
    ]
    place = next(place for place, island in enumerate(islands) if rank in island)
    chain = _Chain(maker, islands[place], rank, longest=max(map(len, islands)))
    sums = {record: chain.reduce(record) for record in _backwards(chunks, place)}
    if rank == islands[place][0]:
        heads = [island[0] for island in islands]
        done = _reduce_around(maker, heads, place, chunks, sums, first_step=chain.steps)
    else:
        done = dict.fromkeys(_backwards(chunks, place + 1), ())
    for record, needs in done.items():
        chain.spread(record, needs, step=chain.steps + 2 * (len(islands) - 1))
    return maker


class _Chain:
    """One rank's place in the chain of its island."""

    def __init__(
        self,
        maker: PlanMaker,
        island: Sequence[int],
        rank: int,
        *,
        longest: int,
        finishes: bool = False,
    ) -> None:
        self.steps = longest - 1
        """The steps until the sum of the longest chain has reached its first rank."""
        self._finishes = finishes
        """True if what this rank adds is the sum of all ranks."""
        self._maker = maker
        self._place = island.index(rank)
        self._up = island[self._place - 1] if self._place else None
        self._down = island[self._place + 1] if rank != island[-1] else None
        self._distance = len(island) - 1 - self._place

    def reduce(self, record: _Record) -> _Needs:
        """Add what comes from below and pass it up; return what to wait for until it is there."""
        needs: _Needs = ()
        if self._down is not None:
            added = _add_source(self._distance - 1, record, finishes=self._finishes)
            needs = (self._maker.receive(self._down, added),)
        if self._up is not None:
            region = Region.SOURCE if self._down is None else Region.RESULT
            self._maker.send(self._up, _send(self._distance, region, record, needs))
        return needs

    def spread(self, record: _Record, needs: _Needs, *, step: int) -> None:
        """Pass a finished record down the chain; the first rank has it at `step`."""
        if self._up is not None:
            kept = _keep(step + self._place - 1, record)
            needs = (self._maker.receive(self._up, kept),)
        if self._down is not None:
            passed = _send(step + self._place, Region.RESULT, record, needs)
            self._maker.send(self._down, passed)


def _reduce_around(
    maker: PlanMaker,
    ring: Sequence[int],
    place: int,
    chunks: Sequence[Sequence[_Record]],
    sums: dict[_Record, _Needs],
    *,
    first_step: int,
) -> dict[_Record, _Needs]:
    """Plan the ring all-reduce of records, each of which is ready after its needs in `sums`.

        step         0 ... n-2 (scatter)                n-1 ... 2n-3 (gather)
        rank r sends     chunk r - step                     chunk r - step
        and receives     chunk r - step - 1, to add to      chunk r - step - 1, to keep

    A record without needs lies in the source; a sum lies in the result. Returns what to wait for
    until each record is finished, in the order in which they finish.
    """
    size = len(ring)
    following, previous = ring[(place + 1) % size], ring[place - 1]
    latest, done = dict(sums), dict[_Record, _Needs]()
    for step in range(2 * (size - 1)):
        at = first_step + step
        for record in chunks[(place - step) % size]:
            needs = latest[record]
            region = Region.RESULT if needs else Region.SOURCE
            maker.send(following, _send(at, region, record, needs))
        for record in chunks[(place - step - 1) % size]:
            finishes = step == size - 2
            if step >= size - 1:
                landing = _keep(at, record)
            elif sums[record]:
                landing = _add_to_result(at, record, sums[record], finishes=finishes)
            else:
                landing = _add_source(at, record, finishes=finishes)
            latest[record] = (maker.receive(previous, landing),)
            if step >= size - 2:
                done[record] = latest[record]
    return done


def _backwards(chunks: Sequence[Sequence[_Record]], first: int) -> Iterator[_Record]:
    """Yield the records in the order in which a ring needs or finishes them."""
    for step in range(len(chunks)):
        yield from chunks[(first - step) % len(chunks)]


class _RankBlocks:
    """The tensor, cut into one block for each rank."""

    def __init__(self, bounds: Sequence[int], *, split: int, segment_bytes: int) -> None:
        self._bounds = bounds
        self._split = split
        self._segment_bytes = segment_bytes

    def cut(self, rank: int, distances: range) -> list[_Record]:
        """Return the records for the blocks whose owners are at these distances from `rank`.

        Neighbouring blocks travel together, but not the last with the first, nor those on both
        sides of `split`, which lie in different regions. Without values there is one empty record.
        """
        size = len(self._bounds) - 1
        runs: list[tuple[int, int, int]] = []
        for distance in distances:
            block = (rank + distance) % size
            begin, end = self._bounds[block], self._bounds[block + 1]
            if runs and block and distance != self._split:
                first, run_begin, _ = runs[-1]
                runs[-1] = first, run_begin, end
            else:
                runs.append((block, begin, end))
        runs = [run for run in runs if run[2] > run[1]] or runs[:1]
        return [
            _Record(first, *segment)
            for first, begin, end in runs
            for segment in segments(begin, end, segment_bytes=self._segment_bytes)
        ]


def _alone(nbytes: int) -> RankPlan:
    maker = PlanMaker(size=1)
    maker.copy(source=0, result=0, nbytes=nbytes)
    return maker.plan()


def _send(step: int, region: Region, record: _Record, needs: _Needs = ()) -> SendRecord:
    return SendRecord(step, region, record.offset, record.nbytes, needs)


def _keep(step: int, record: _Record) -> Receive:
    return Receive(step, Region.RESULT, record.offset, record.nbytes)


def _add_source(step: int, record: _Record, *, finishes: bool = False) -> Receive:
    """Receive a record into the result, where nothing is yet, and add the source's values."""
    return Receive(
        step,
        Region.RESULT,
        record.offset,
        record.nbytes,
        then=Then.ADD_SOURCE,
        other=record.offset,
        finishes=finishes,
    )


def _add_to_result(
    step: int, record: _Record, needs: _Needs, *, slot: int = 0, finishes: bool = False
) -> Receive:
    """Receive a record into the scratch, and add it to the sum that is in the result by then."""
    return Receive(
        step,
        Region.SCRATCH,
        slot,
        record.nbytes,
        needs,
        Then.ADD_TO_RESULT,
        record.offset,
        finishes,
    )
