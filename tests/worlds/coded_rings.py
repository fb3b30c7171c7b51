"""Compressed all-reduces of all ranks in one process, and what they are to come to."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import trio

from pmesh.compression.blocks import Bytes, Float32s
from pmesh.compression.codecs import Codec
from pmesh.core.ops.coded import coded_chunks, draw_key, hop_terms
from pmesh.net.lanes.ring import RingPosition, Tensors, all_reduce_coded


class Plain:
    """A codec that loses nothing: fp32 itself, in blocks of 4 with a word that tells their sum.

    It shows which bytes go where, and that nobody reads beyond a piece, or at an odd address.
    """

    name = "plain"
    block = 4
    divides_first = False

    def prepare(self) -> bool:
        return False

    def wire_bytes(self, count: int) -> int:
        return 4 * count

    def hop(
        self,
        incoming: Bytes | None,
        own: Float32s,
        outgoing: Bytes,
        *,
        own_scale: float = 1.0,
        divisor: int = 1,
        residual: Float32s | None = None,
        residual_out: Float32s | None = None,
        draw: int = 0,
    ) -> int:
        del draw
        values = own if residual is None else own + residual
        values = values * np.float32(own_scale)
        if incoming is not None:
            values = incoming.view(np.float32) + values
        outgoing.view(np.float32)[:] = values / np.float32(divisor)
        if residual_out is not None:
            residual_out.fill(0)
        return 0

    def decode(self, wire: Bytes, out: Float32s) -> None:
        out[:] = wire.view(np.float32)


def noise(size: int, count: int, *, seed: int = 1) -> list[Float32s]:
    dice = np.random.default_rng(seed)
    return [dice.standard_normal(count).astype(np.float32) for _ in range(size)]


async def reduce_coded_all(
    ring: Sequence[RingPosition],
    tensors: Sequence[Tensors],
    codec: Codec,
    *,
    reduction: str = "sum",
    op: int = 0,
    fingerprints: Sequence[int] | None = None,
) -> list[int]:
    """How many values each rank has clipped. What is only to be read goes in read-only."""
    clipped = [0] * len(ring)

    async def call(position: RingPosition) -> None:
        rank = position.rank
        clipped[rank] = await all_reduce_coded(
            position,
            op=op,
            fingerprint=fingerprints[rank] if fingerprints else 9,
            completed=op - 1,
            tensors=tensors[rank],
            codec=codec,
            reduction=reduction,
        )

    async with trio.open_nursery() as nursery:
        for position in ring:
            nursery.start_soon(partial(call, position))
    return clipped


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
        op: its number, for codecs that draw random numbers.
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
            assert arrived is not None
            codec.decode(arrived, result[values])
    return result, clipped


def add_residual(alone: Coded, result: Float32s) -> None:
    """What a rank that is alone gets: nothing is encoded, and nothing is owed any more."""
    np.add(alone.own, 0 if alone.residual is None else alone.residual, out=result)
    if alone.residual_out is not None:
        alone.residual_out.fill(0)
