"""What a compressed ring all-reduce comes to, hop after hop, without a network: the same bits."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pmesh.compression.arrays import Float32s
from pmesh.compression.codecs import Codec
from pmesh.core.coded_rings import coded_chunks, draw_key, hop_terms


@dataclass(frozen=True, slots=True)
class Coded:
    """One rank's part."""

    own: Float32s
    residual: Float32s | None = None
    residual_out: Float32s | None = None
    """Written."""


def reduce_coded(
    codec: Codec, ranks: Sequence[Coded], *, reduction: str, op: int
) -> tuple[Float32s, list[int]]:
    """The result, the same for all ranks, and how many values each has clipped.

    Args:
        codec: what encodes at every hop.
        ranks: in ring order; of one rank alone nothing is encoded.
        reduction: sum or mean.
        op: its number, for codecs that draw lots.
    """
    size, count = len(ranks), len(ranks[0].own)
    result, clipped = np.empty(count, np.float32), [0] * size
    if size == 1:
        add_residual(ranks[0], result)
        return result, clipped
    for chunk, pieces in enumerate(coded_chunks(size=size, count=count, codec=codec)):
        for piece in pieces:
            values, arrived = slice(piece.begin, piece.begin + piece.length), None
            for hop in range(size):
                rank = (chunk + hop) % size
                mine, outgoing = ranks[rank], np.empty(piece.nbytes, np.uint8)
                terms = hop_terms(codec, reduction, size=size, owner=hop == size - 1)
                clipped[rank] += codec.hop(
                    arrived,
                    mine.own[values],
                    outgoing,
                    own_scale=terms.own_scale,
                    divisor=terms.divisor,
                    residual=None if mine.residual is None else mine.residual[values],
                    residual_out=None if mine.residual_out is None else mine.residual_out[values],
                    draw=draw_key(op=op, rank=rank, begin=piece.begin, codec=codec),
                )
                arrived = outgoing
            assert arrived is not None  # noqa: S101 - there are at least two hops
            codec.decode(arrived, result[values])
    return result, clipped


def add_residual(alone: Coded, result: Float32s) -> None:
    """What a rank that is alone gets: nothing is encoded, and nothing is owed any more."""
    np.add(alone.own, 0 if alone.residual is None else alone.residual, out=result)
    if alone.residual_out is not None:
        alone.residual_out.fill(0)
