"""Who sends what, when: the plan of a collective along the ring, as seen by one rank.

The ring all-reduce is Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009): the
tensor is cut into one chunk for each rank. In n-1 scatter steps each chunk travels along the ring
and gathers every rank's values; in n-1 gather steps the finished chunk travels once more.

    step         0 ... n-2 (scatter)                n-1 ... 2n-3 (gather)
    rank r sends     chunk r - step                     chunk r - step
    and receives     chunk r - step - 1, to add to      chunk r - step - 1, to keep

Chunks travel in pieces (segments). Every chunk has at least one piece, if need be an empty one, so
that no rank completes an op that another has not started: that is also the barrier.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from pmesh.core.wire.records import MAX_BODY_BYTES

SEGMENT_BYTES = 512 * 1024
LARGE_SEGMENT_BYTES = MAX_BODY_BYTES  # fewer records; to fill the ring with them takes longer
LARGE_CHUNK_BYTES = 12 * LARGE_SEGMENT_BYTES  # so that what it takes longer is little
SMALL_BYTES = 32 * 1024  # fits the socket buffers of every system: no task is needed to send it
IN_LINE_BYTES = SEGMENT_BYTES  # fits those between two agents of one machine, and often others


class Piece(NamedTuple):
    """The part of the tensor that one record carries."""

    step: int
    offset: int
    """In bytes from the tensor's beginning."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one rank sends and receives in one op.

    The first `own` sends wait for nothing. Send `own + i` forwards what receive `i` has brought.
    """

    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    own: int
    in_line: bool
    """One piece a step: to send it and to receive the next in turn is quicker than two tasks."""

    @property
    def steps(self) -> int:
        """How many times this rank waits for the network in a row: the alpha of its cost."""
        return 1 + max((piece.step for piece in self.sends + self.receives), default=-1)

    @property
    def bytes_sent(self) -> int:
        """The tensor's bytes that this rank sends: the beta of its cost."""
        return sum(piece.nbytes for piece in self.sends)

    @property
    def moving_bytes(self) -> int:
        """The tensor's bytes that this rank sends or receives."""
        return self.bytes_sent + sum(piece.nbytes for piece in self.receives)


def chunk_bounds(count: int, chunks: int) -> tuple[int, ...]:
    """Where the chunks of `count` values begin, and the end; as `numpy.array_split` cuts.

    >>> chunk_bounds(7, 3)
    (0, 3, 5, 7)
    """
    size, larger = divmod(count, chunks)
    return tuple(i * size + min(i, larger) for i in range(chunks + 1))


def plan_all_reduce(*, rank: int, size: int, count: int, itemsize: int) -> Plan:
    """The ring all-reduce of `count` values of `itemsize` bytes.

    Costs 2(size-1) steps and, but for rounding to whole values, 2(size-1)/size of the tensor sent.
    """
    return _plan_all_reduce(rank, size, count, itemsize)


@lru_cache(maxsize=16)  # as the ring's
def plan_exchange(nbytes: int) -> Plan:
    """Two ranks send each other all they have: as many bytes as along their ring, in one step.

    Both add, so that must be exact. It takes twice the additions: for small tensors.
    """
    pieces = _cut(0, nbytes, step=0)
    return Plan(sends=pieces, receives=pieces, own=len(pieces), in_line=nbytes <= IN_LINE_BYTES)


def plan_broadcast(*, rank: int, size: int, root: int, nbytes: int) -> Plan:
    """The root's tensor along the ring, each piece forwarded as soon as it has arrived."""
    distance = (rank - root) % size
    pieces = _cut(0, nbytes, step=0)
    receives = tuple(piece._replace(step=distance - 1) for piece in pieces) if distance else ()
    last = distance == size - 1
    sends = () if last else tuple(piece._replace(step=distance) for piece in pieces)
    return Plan(
        sends=sends,
        receives=receives,
        own=0 if distance else len(sends),
        in_line=nbytes <= IN_LINE_BYTES,
    )


@lru_cache(maxsize=16)  # a training step repeats a few shapes; a plan of 1 GiB holds 4,000 pieces
def _plan_all_reduce(rank: int, size: int, count: int, itemsize: int) -> Plan:
    bounds = [value * itemsize for value in chunk_bounds(count, size)]

    large = bounds[1] >= LARGE_CHUNK_BYTES  # the first chunk is the largest
    most = LARGE_SEGMENT_BYTES if large else SEGMENT_BYTES

    def chunk(number: int, step: int) -> tuple[Piece, ...]:
        return _cut(bounds[number % size], bounds[number % size + 1], step=step, most=most)

    steps = range(2 * (size - 1))
    return Plan(
        sends=tuple(piece for step in steps for piece in chunk(rank - step, step)),
        receives=tuple(piece for step in steps for piece in chunk(rank - step - 1, step)),
        own=len(chunk(rank, 0)) if size > 1 else 0,
        in_line=bounds[1] <= IN_LINE_BYTES,
    )


def segments(
    begin: int, end: int, *, segment_bytes: int = SEGMENT_BYTES
) -> tuple[tuple[int, int], ...]:
    """The offset and length of each record that carries the bytes from `begin` to `end`.

    At least one, if need be an empty one.

    >>> segments(0, 10, segment_bytes=4), segments(7, 7)
    (((0, 4), (4, 4), (8, 2)), ((7, 0),))
    """
    offsets = range(begin, end, segment_bytes) or (begin,)
    return tuple((offset, min(segment_bytes, end - offset)) for offset in offsets)


def halvings(size: int) -> Iterator[tuple[int, int]]:
    """The halvings from `size` blocks to one: those from the first number on are given away.

    As many as the logarithm of `size` to base 2, rounded up.

    >>> list(halvings(8)), list(halvings(5))
    ([(4, 8), (2, 4), (1, 2)], [(3, 5), (2, 3), (1, 2)])
    """
    while size > 1:
        half = (size + 1) // 2
        yield half, size
        size = half


def _cut(begin: int, end: int, *, step: int, most: int = SEGMENT_BYTES) -> tuple[Piece, ...]:
    return tuple(Piece(step, *segment) for segment in segments(begin, end, segment_bytes=most))
