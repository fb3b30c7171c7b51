"""The ring all-reduce with a codec at every hop: who sends and receives what, when, and what it is.

Steps and chunks are those of `pmesh.core.ops.reducing`. In the scatter phase a rank adds its own
values to the partial sum that arrives, and encodes the sum for the next (`Codec.hop`). The last to
add owns the chunk: what it encodes is the result, decoded alike by all, itself too. In the gather
phase these bytes are forwarded as they are. So each rank encodes each value exactly once, and what
it rounds away in an op is one array of the tensor's size.

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
    Event,
    Need,
    PlanMaker,
    RankPlan,
    Receive,
    Region,
    Send,
    Work,
    chunk_bounds,
)

PIECE_VALUES = 128 * 1024
"""In one record, at most: it keeps a worker thread busy for 0.5 ms, ten times what it takes to get
it there, and the next rank can begin while the rest of a chunk is on its way."""


SLOTS = 3  # one is received while another is worked on, and one lies ready
_VALUE_BYTES = 4
_HOPS, _SENT, _LAST = 0, 1, 2  # queues


class CodedPiece(NamedTuple):
    """The part of the tensor that one record carries."""

    begin: int
    """Its first value, counted from the tensor's beginning; a multiple of the codec's block."""
    length: int
    """How many values."""
    nbytes: int
    """On the wire."""


class HopTerms(NamedTuple):
    """What `Codec.hop` is to scale and divide by."""

    own_scale: float
    divisor: int


def plan_coded_ring(*, rank: int, size: int, count: int, codec: Codec) -> RankPlan:
    """The plan of one rank.

    Costs 2(size-1) steps and, but for rounding to whole blocks, sends 2(size-1)/size of the encoded
    tensor. Partial sums arrive in a few places that are used again and again. What is to be sent is
    kept in the result, where its values will be: encoded ones need less room. They are decoded once
    they have been sent on.

    Args:
        rank: whose plan.
        size: how many ranks; 1 sends nothing.
        count: values of the tensor.
        codec: what encodes them.
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
            work = Work(piece.begin, piece.length, *place, piece.nbytes, ())
            needs: tuple[Need, ...] = (before[i][1],) if step else ()
            if step < size:
                at = before[i][0] if step else -1
                hop = work._replace(needs=needs, arrived=at, divides=step == size - 1)
                needs = (maker.work(_HOPS, hop),)
            gone = maker.send(following, Send(step, *place, piece.nbytes, needs))
            if step >= size - 1:
                maker.work(_SENT, work._replace(needs=(gone,), decodes=True))
        number = (number - 1) % size
        for piece in chunks[number]:
            forwards = size - 1 <= step < 2 * size - 3
            place, needs = (places.of(number, piece), ()) if forwards else places.take()
            landed = maker.receive(previous, Receive(step, *place, piece.nbytes, needs))
            arrived.append((place[1], landed))
            if step == 2 * size - 3:
                last = Work(
                    piece.begin, piece.length, *place, piece.nbytes, (landed,), decodes=True
                )
                maker.work(_LAST, last)
    return maker.plan(small=small)


class _Places:
    """Where encoded pieces lie."""

    def __init__(self, chunks: list[list[CodedPiece]], rank: int, *, apart: bool) -> None:
        self._largest = max(piece.nbytes for chunk in chunks for piece in chunk)
        self._apart = apart
        self._taken = 0
        self._own = len(chunks[rank])
        self._partial = sum(map(len, chunks)) - self._own

    def of(self, chunk: int, piece: CodedPiece) -> tuple[Region, int]:
        """Of a piece that is sent, on a multiple of 4.

        Small pieces of int8 may take more bytes than their values, so they have a place apart.
        """
        if self._apart:
            return Region.SCRATCH, (SLOTS + chunk) * self._largest
        return Region.RESULT, piece.begin * _VALUE_BYTES

    def take(self) -> tuple[tuple[Region, int], tuple[Need, ...]]:
        """For one that only arrives: a place, and what to wait for until it may be written."""
        number, earlier = self._taken, self._taken - SLOTS
        self._taken += 1
        place = Region.SCRATCH, number % SLOTS * self._largest
        if earlier < 0:
            return place, ()
        if earlier < self._partial:
            return place, (Need(_HOPS, self._own + earlier + 1, Event.COMPUTED),)
        return place, (Need(_LAST, earlier - self._partial + 1, Event.COMPUTED),)


def coded_chunks(*, size: int, count: int, codec: Codec) -> list[list[CodedPiece]]:
    """The pieces of each chunk; as equal as whole blocks allow.

    Chunk c begins at rank c and is owned by rank c - 1. Each has at least one piece, if need be an
    empty one.
    """
    return [
        [
            CodedPiece(begin, end - begin, codec.wire_bytes(end - begin))
            for begin, end in itertools.pairwise(_cut(chunk, count, codec))
        ]
        for chunk in itertools.pairwise(chunk_bounds(-(-count // codec.block), size))
    ]


def _cut(chunk: tuple[int, int], count: int, codec: Codec) -> list[int]:
    """Where the pieces of a chunk, given in blocks, begin, and the end."""
    first, blocks = chunk[0], chunk[1] - chunk[0]
    most = max(PIECE_VALUES // codec.block, 1)
    while most > 1 and codec.wire_bytes(most * codec.block) > SEGMENT_BYTES:
        most //= 2
    bounds = chunk_bounds(blocks, max(-(-blocks // most), 1))
    return [min((first + bound) * codec.block, count) for bound in bounds]


def hop_terms(codec: Codec, reduction: str, *, size: int, owner: bool) -> HopTerms:
    """The terms of a hop, in which the owner of a chunk divides, unless every rank has done so.

    Args:
        codec: what encodes.
        reduction: sum or mean.
        size: how many ranks.
        owner: whether this rank is the last to add to the chunk.
    """
    if reduction != "mean":
        return HopTerms(1.0, 1)
    if codec.divides_first:
        return HopTerms(1.0 / size, 1)
    return HopTerms(1.0, size if owner else 1)


def draw_key(*, op: int, rank: int, begin: int, codec: Codec) -> int:
    """64 bits for what a rank encodes in one piece of one op: no other has the same.

    (Up to 2^30 ops, 1,024 ranks and 2^24 blocks: 4 G values of int8.) An op that runs again among
    the same ranks draws the same random numbers.
    """
    return (op << 34 | rank << 24 | begin // codec.block) % 2**64
