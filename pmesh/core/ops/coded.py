"""The ring all-reduce with a codec at every hop: who sends and receives what, when, and what it is.

Steps and chunks are those of `pmesh.core.ops.all_reduce`. In the scatter phase a rank adds its own
values to the partial sum that arrives, and encodes the sum for the next (`Codec.hop`). The last to
add owns the chunk: what it encodes is the result, decoded alike by all, itself too. In the gather
phase these bytes are forwarded as they are. So each rank encodes each value exactly once, and what
it rounds away in an op is one array of the tensor's size.

    step         0 ... n-2 (scatter)                n-1 ... 2n-3 (gather)
    receives     a partial sum: a hop               finished values: to decode, and to forward
"""

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, cast

from pmesh.compression.codecs import Codec
from pmesh.core.ops.schedule import SEGMENT_BYTES, SMALL_BYTES, chunk_bounds

PIECE_VALUES = 128 * 1024
"""In one record, at most: it keeps a worker thread busy for 0.5 ms, ten times what it takes to get
it there, and the next rank can begin while the rest of a chunk is on its way."""


class CodedPiece(NamedTuple):
    """The part of the tensor that one record carries."""

    step: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedPlan:
    """What one rank sends and receives in one op.

    Send `own + i` is what receive `i` has become: the first `own` sends are this rank's own values,
    and those up to `encoded` are what its hops have encoded, the rest is forwarded.
    """

    size: int
    sends: tuple[CodedPiece, ...]
    receives: tuple[CodedPiece, ...]
    own: int
    encoded: int
    decoded: int
    """Pieces of the tensor: this rank decodes each once."""
    small: bool
    """One piece a step, and each at most SMALL_BYTES."""

    @property
    def steps(self) -> int:
        """How many times this rank waits for the network in a row."""
        return 1 + max((piece.step for piece in self.sends + self.receives), default=-1)

    @property
    def bytes_sent(self) -> int:
        """Encoded bytes that this rank sends, without the records' headers."""
        return sum(piece.nbytes for piece in self.sends)

    @property
    def moving_bytes(self) -> int:
        """Encoded bytes that this rank sends or receives."""
        return self.bytes_sent + sum(piece.nbytes for piece in self.receives)

    @property
    def largest(self) -> int:
        """Bytes of the largest piece."""
        return max((piece.nbytes for piece in self.sends + self.receives), default=0)


def plan_coded_ring(*, rank: int, size: int, count: int, codec: Codec) -> CodedPlan:
    """The plan of one rank.

    Costs 2(size-1) steps and, but for rounding to whole blocks, sends 2(size-1)/size of the encoded
    tensor.

    Args:
        rank: whose plan.
        size: how many ranks; 1 sends nothing.
        count: values of the tensor.
        codec: what encodes them.
    """
    return _plan_coded_ring(rank, size, count, cast("Hashable", codec))  # as every object is


@lru_cache(maxsize=16)  # a training step repeats a few shapes
def _plan_coded_ring(rank: int, size: int, count: int, codec: Codec) -> CodedPlan:
    chunks = coded_chunks(size=size, count=count, codec=codec)

    def at(number: int, step: int) -> list[CodedPiece]:
        return [piece._replace(step=step) for piece in chunks[number % size]]

    steps = range(2 * (size - 1))
    receives = tuple(piece for step in steps for piece in at(rank - step - 1, step))
    own = len(chunks[rank]) if size > 1 else 0
    return CodedPlan(
        size=size,
        sends=tuple(piece for step in steps for piece in at(rank - step, step)),
        receives=receives,
        own=own,
        decoded=sum(map(len, chunks)) if size > 1 else 0,
        encoded=own + sum(piece.step < size - 1 for piece in receives),
        small=all(len(chunk) == 1 and chunk[0].nbytes <= SMALL_BYTES for chunk in chunks),
    )


def coded_chunks(*, size: int, count: int, codec: Codec) -> list[list[CodedPiece]]:
    """The pieces of each chunk, of step 0; as equal as whole blocks allow.

    Chunk c begins at rank c and is owned by rank c - 1. Each has at least one piece, if need be an
    empty one.
    """
    return [
        [
            CodedPiece(0, begin, end - begin, codec.wire_bytes(end - begin))
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
    the same ranks draws the same lots.
    """
    return (op << 34 | rank << 24 | begin // codec.block) % 2**64


def ring_codec_name(compression: str) -> str:
    """The codec which a ring is to use for a `Call.compression`; empty: the values go as they are.

    A name with parentheses, as in `topk(0.01)`, is that of a scheme which the trainers compute for
    themselves, around ops on what it has left: it is there so that all ranks use the same.
    """
    return "" if "(" in compression else compression
