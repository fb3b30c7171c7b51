"""The ring all-reduce with a codec at every hop, as the plan of one rank.

Steps and chunks are those of `pmesh.core.ops.reducing`. In the scatter phase a rank adds its own
values to the partial sum that arrives, and encodes the sum for the next rank (`Codec.hop`). The
last rank to add owns the chunk: what it encodes is the result, which all ranks decode, the owner
too. In the gather phase these bytes are forwarded unchanged. So each rank encodes each value
exactly once, and what it rounds away in an op is one array of the tensor's size.

    step         0 ... n-2 (scatter)                n-1 ... 2n-3 (gather)
    receives     a partial sum: a hop               finished values: to decode, and to forward
"""

import itertools
from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple, cast

from pmesh.compression.codecs import Codec
from pmesh.core.ops.plan import (
    SEGMENT_BYTES,
    SMALL_BYTES,
    CodecWork,
    Need,
    PlanEvent,
    PlanMaker,
    RankPlan,
    Receive,
    Region,
    SendRecord,
    chunk_bounds,
)

PIECE_VALUES = 128 * 1024
"""The most values in one record. They keep a worker thread busy for 0.5 ms, ten times what it takes
to hand them over, and the next rank can begin while the rest of a chunk is on its way."""

SLOTS = 3  # one piece arrives, another is worked on, and a third waits
_VALUE_BYTES = 4
_HOPS, _SENT, _LAST = 0, 1, 2  # queues


class CodedPiece(NamedTuple):
    """The part of the tensor that one record carries."""

    begin: int
    """Its first value, counted from the tensor's beginning; a multiple of the codec's block."""
    length: int
    """The number of its values."""
    nbytes: int
    """Its encoded bytes on the wire."""


class HopTerms(NamedTuple):
    """The factor and the divisor that `Codec.hop` applies."""

    own_scale: float
    divisor: int


def plan_coded_ring(*, rank: int, size: int, count: int, codec: Codec) -> RankPlan:
    """Return the plan of one rank.

    It takes 2(size-1) steps and sends 2(size-1)/size of the encoded tensor, rounded to whole
    blocks. Partial sums arrive in a few places that are reused. An encoded piece that will be sent
    lies in the result, where its values will be, since it needs less room. It is decoded once it
    has been sent.

    Args:
        rank: the rank whose plan it is.
        size: the number of ranks; a single one sends nothing.
        count: how many values the tensor has.
        codec: encodes the values.
    """
    return _plan_coded_ring(rank, size, count, cast("Hashable", codec))  # as every object is


@lru_cache(maxsize=16)  # a training step repeats a few shapes
def _plan_coded_ring(rank: int, size: int, count: int, codec: Codec) -> RankPlan:
    maker = PlanMaker(size=size)
    if size == 1:
        return maker.plan()
    chunks = coded_chunks(size=size, count=count, codec=codec)
    small = all(len(chunk) == 1 and chunk[0].nbytes <= SMALL_BYTES for chunk in chunks)
    places = _Places(chunks, rank, apart=small)
    following, previous = (rank + 1) % size, (rank - 1) % size
    arrived: list[tuple[int, Need]] = []
    for step in range(2 * (size - 1)):
        number = (rank - step) % size
        before, arrived = arrived, []
        for i, piece in enumerate(chunks[number]):
            place = places.of(number, piece)
            work = CodecWork(piece.begin, piece.length, *place, piece.nbytes, ())
            needs: tuple[Need, ...] = (before[i][1],) if step else ()
            if step < size:
                at = before[i][0] if step else -1
                hop = work._replace(needs=needs, arrived=at, divides=step == size - 1)
                needs = (maker.work(_HOPS, hop),)
            gone = maker.send(following, SendRecord(step, *place, piece.nbytes, needs))
            if step >= size - 1:
                maker.work(_SENT, work._replace(needs=(gone,), decodes=True))
        number = (number - 1) % size
        for piece in chunks[number]:
            forwards = size - 1 <= step < 2 * size - 3
            place, needs = (places.of(number, piece), ()) if forwards else places.take()
            landed = maker.receive(previous, Receive(step, *place, piece.nbytes, needs))
            arrived.append((place[1], landed))
            if step == 2 * size - 3:
                last = CodecWork(
                    piece.begin, piece.length, *place, piece.nbytes, (landed,), decodes=True
                )
                maker.work(_LAST, last)
    return maker.plan(small=small)


class _Places:
    """Says where encoded pieces lie."""

    def __init__(self, chunks: list[list[CodedPiece]], rank: int, *, apart: bool) -> None:
        self._largest = max(piece.nbytes for chunk in chunks for piece in chunk)
        self._apart = apart
        self._taken = 0
        self._own = len(chunks[rank])
        self._partial = sum(map(len, chunks)) - self._own

    def of(self, chunk: int, piece: CodedPiece) -> tuple[Region, int]:
        """Return the place, a multiple of 4, of a piece that is sent.

        Small pieces of int8 may take more bytes than their values, so they lie in the scratch.
        """
        if self._apart:
            return Region.SCRATCH, (SLOTS + chunk) * self._largest
        return Region.RESULT, piece.begin * _VALUE_BYTES

    def take(self) -> tuple[tuple[Region, int], tuple[Need, ...]]:
        """Return a place for a piece that only arrives, and what to wait for before writing it."""
        number, earlier = self._taken, self._taken - SLOTS
        self._taken += 1
        place = Region.SCRATCH, number % SLOTS * self._largest
        if earlier < 0:
            return place, ()
        if earlier < self._partial:
            return place, (Need(_HOPS, self._own + earlier + 1, PlanEvent.COMPUTED),)
        return place, (Need(_LAST, earlier - self._partial + 1, PlanEvent.COMPUTED),)


def coded_chunks(*, size: int, count: int, codec: Codec) -> list[list[CodedPiece]]:
    """Return the pieces of each chunk. The chunks are as equal as whole blocks allow.

    Chunk c begins at rank c and is owned by rank c - 1. It has at least one piece, maybe empty.
    """
    return [
        [
            CodedPiece(begin, end - begin, codec.wire_bytes(end - begin))
            for begin, end in itertools.pairwise(_cut(chunk, count, codec))
        ]
        for chunk in itertools.pairwise(chunk_bounds(-(-count // codec.block), size))
    ]


def _cut(chunk: tuple[int, int], count: int, codec: Codec) -> list[int]:
    """Return the values at which the pieces of a chunk, given in blocks, begin, and its end."""
    first, blocks = chunk[0], chunk[1] - chunk[0]
    most = max(PIECE_VALUES // codec.block, 1)
    while most > 1 and codec.wire_bytes(most * codec.block) > SEGMENT_BYTES:
        most //= 2
    bounds = chunk_bounds(blocks, max(-(-blocks // most), 1))
    return [min((first + bound) * codec.block, count) for bound in bounds]


def hop_terms(codec: Codec, reduction: str, *, size: int, owner: bool) -> HopTerms:
    """Return the terms of a hop: the owner of a chunk divides, unless every rank divides first.

    Args:
        codec: encodes the values.
        reduction: sum or mean.
        size: the number of ranks.
        owner: whether this rank is the last to add to the chunk.
    """
    if reduction != "mean":
        return HopTerms(1.0, 1)
    if codec.divides_first:
        return HopTerms(1.0 / size, 1)
    return HopTerms(1.0, size if owner else 1)


def draw_key(*, op: int, rank: int, begin: int, codec: Codec) -> int:
    """Return a 64-bit key for the random numbers of one piece, at one rank, in one op.

    Keys are unique up to 2^30 ops, 1,024 ranks and 2^24 blocks (4 G values of int8). An op that
    runs again among the same ranks draws the same random numbers.
    """
    return (op << 34 | rank << 24 | begin // codec.block) % 2**64
