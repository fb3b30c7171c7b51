"""A ring of ranks in one process: what the codecs make of one all-reduce."""

import numpy as np

from pmesh.compression.blocks import Float32s
from pmesh.compression.codecs import Codec


def all_reduce(
    codec: Codec,
    ranks: list[Float32s],
    *,
    mean: bool = False,
    residuals: list[Float32s] | None = None,
    op: int = 0,
) -> Float32s:
    """The sum (mean) of the ranks' values as every rank decodes it.

    One chunk for each rank, and chunk c begins its way at rank c + 1, as in the agent's ring.

    Args:
        codec: which.
        ranks: float32[count] of each.
        mean: divide.
        residuals: float32[count] of each rank; replaced by what the op leaves.
        op: its number, for the random numbers.
    """
    size, count = len(ranks), len(ranks[0])
    result = np.empty(count, np.float32)
    bounds = [min(c * -(-count // size // codec.block) * codec.block, count) for c in range(size)]
    for chunk, start in enumerate(bounds):
        end = bounds[chunk + 1] if chunk + 1 < size else count
        wire = None
        for step in range(size):
            rank = (chunk + 1 + step) % size
            outgoing = np.full(codec.wire_bytes(end - start), 0xEE, np.uint8)
            residual = None if residuals is None else residuals[rank][start:end]
            codec.hop(
                wire,
                ranks[rank][start:end],
                outgoing,
                own_scale=1 / size if mean and codec.divides_first else 1.0,
                divisor=size if mean and not codec.divides_first and step == size - 1 else 1,
                residual=residual,
                residual_out=residual,
                draw=hash((op, chunk, step)) % 2**64,
            )
            wire = outgoing
        assert wire is not None
        codec.decode(wire, result[start:end])
    return result


def relative_error(codec: Codec, ranks: list[Float32s]) -> float:
    """The L2 norm of an all-reduce's error, against that of the sum."""
    exact = np.sum(np.array(ranks, np.float64), axis=0)
    return float(np.linalg.norm(all_reduce(codec, ranks) - exact) / np.linalg.norm(exact))
