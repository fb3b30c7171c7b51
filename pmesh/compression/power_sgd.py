"""PowerSGD: each matrix of a bucket as a product of two thin ones (Vogels et al. 2019).

Of a matrix M, the mean over all ranks, one step of a power iteration gives P and Q of rank r with
M ≈ P Q^T (their algorithm 1), and what that leaves of each rank's own stays in its residual (their
algorithm 2). M itself is nowhere: both products are linear in it, so two ordinary all-reduces do.

    own + residual ──▶ compress ──▶ p ──▶ all-reduce (mean) ──▶ orthogonalize, in place
          │                                                        │
          └─────▶ residual_out, for now own + residual ──▶ project ─┴─▶ q ──▶ all-reduce (mean)
                                                                                  │
          warm_up, for the next step ◀── decompress ──▶ out, residual_out  ◀───────┘

p holds the P's of all matrices, each (rows, rank), one behind the other, and then all values that
go uncompressed; q the Q's, each (columns, rank). Every rank computes `orthogonalize`, `decompress`
and `warm_up` for itself from the same sums, so these use elementwise IEEE arithmetic in a stated
order and no BLAS: their bits are the same on every machine. `compress` and `project` are this
rank's own part of a sum, and use BLAS.

If ranks come with different Q's (one is new) or leave between the two all-reduces, the result is
still P P^T M of one P and of the M of those who gave their Q part, so residuals account for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Float32s: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Consecutive values of a bucket that are compressed as a matrix, row by row."""

    start: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a bucket is compressed; the same on all ranks."""

    count: int
    """Values of the bucket."""
    rank: int
    matrices: tuple[Matrix, ...]
    rest: tuple[tuple[int, int], ...]
    """What goes uncompressed: runs of values, each from its first to before its last."""
    p_count: int
    """Values in the first all-reduce: all P's, then the rest."""
    q_count: int
    """Values in the second: all Q's. 0: there is no second."""


def plan(shapes: Sequence[tuple[int, ...]], *, rank: int, min_rate: float = 2.0) -> Plan:
    """Which of the arrays of a bucket are compressed, and how they lie in it.

    Those where it pays: (rows + columns) * rank * min_rate <= rows * columns. More than two
    dimensions are folded to two where rows + columns is least; vectors and scalars are the rest.

    Args:
        shapes: of the arrays, in the order in which they lie in the bucket.
        rank: of P and Q; at least 1.
        min_rate: at least 1; how many times smaller P and Q together are to be.
    """
    raise NotImplementedError


def warm_up(plan: Plan, q: Float32s, *, key: int) -> None:
    """Make the Q's of a step those that the next begins with, in place.

    Each column is scaled by a power of two so that its largest magnitude is in [1, 2): P has the
    magnitude of M then, not of its square. A column that is zero or not finite is drawn anew,
    uniformly from [-1, 1): so a first Q is `warm_up` of zeros, and neither zeros nor a NaN stay.

    Args:
        plan: of the bucket.
        q: float32[q_count].
        key: 64 bits of which columns are drawn; the same on all ranks.
    """
    raise NotImplementedError


def compress(
    plan: Plan,
    own: Float32s,
    q: Float32s,
    p: Float32s,
    *,
    residual: Float32s | None = None,
    residual_out: Float32s | None = None,
) -> None:
    """P = (own + residual) Q for each matrix, and the rest as it is.

    Args:
        plan: of the bucket.
        own: float32[count]; only read.
        q: float32[q_count], of `warm_up`; only read.
        p: float32[p_count], written; to be all-reduced, as a mean.
        residual: float32[count], as an earlier call left it, only read; None for zeros.
        residual_out: float32[count], written: own + residual. May be `residual` itself. None: no
            feedback; then `residual` is None, too.
    """
    raise NotImplementedError


def orthogonalize(plan: Plan, p: Float32s) -> None:
    """Make the columns of each P orthonormal, in place; the rest stays as it is.

    Modified Gram-Schmidt in float64, columns from first to last. A column that depends on those
    before it (to 2**-30) becomes zero. A P with a value that is not finite becomes NaN, at least
    where that was.

    Args:
        plan: of the bucket.
        p: float32[p_count], the mean.
    """
    raise NotImplementedError


def project(plan: Plan, values: Float32s, p: Float32s, q: Float32s) -> None:
    """Q = M^T P for each matrix.

    Args:
        plan: of the bucket.
        values: float32[count]: `residual_out` of `compress`, or `own` without feedback; only read.
        p: float32[p_count], of `orthogonalize`; only read.
        q: float32[q_count], written; to be all-reduced, as a mean.
    """
    raise NotImplementedError


def decompress(
    plan: Plan,
    p: Float32s,
    q: Float32s,
    out: Float32s,
    *,
    residual_out: Float32s | None = None,
) -> None:
    """Write the mean, P Q^T for each matrix and the rest as it is; keep what it leaves of our own.

    A matrix that some rank gave a NaN or an infinity in comes out as NaN or infinity at least there.

    Args:
        plan: of the bucket.
        p: float32[p_count], of `orthogonalize`; only read.
        q: float32[q_count], the mean; only read.
        out: float32[count], written.
        residual_out: float32[count], of `compress`; becomes itself minus out, and 0 where that is
            not finite, and 0 in the rest. None: no feedback.
    """
    raise NotImplementedError
