"""PowerSGD: each matrix of a bucket as a product of two thin ones (Vogels et al. 2019).

Of a matrix M, the mean over all ranks, one step of a power iteration gives P and Q of rank r with
M ≈ P Q^T (their algorithm 1), and what that leaves of each rank's own stays in its residual (their
algorithm 2). M itself is nowhere: both products are linear in it, so two ordinary all-reduces do.

    own + residual ──▶ compress ──▶ p ──▶ all-reduce, mean ──▶ orthogonalize, in place
          │                                                                │
          └──▶ residual_out, for now own + residual ──▶ project ◀──────────┤
                                                           │               │
                                   all-reduce, mean ◀── q ─┘               │
                                           │                               │
             warm_up, for the next step ◀──┴──▶ decompress ◀───────────────┘
                                                    └──▶ out, residual_out

p holds the P's of all matrices, each as (rank, rows), one behind the other, and then all values
that go uncompressed; q the Q's, each as (rank, columns). Every rank computes `orthogonalize`,
`decompress` and `warm_up` for itself from the same sums, so these use elementwise IEEE arithmetic
in a stated order and no BLAS: their bits are the same on every machine. `compress` and `project`
are this rank's own part of a sum, and use BLAS.

If ranks come with different Q's (one is new), or leave between the two all-reduces, the result is
still P P^T M, for one P and the M of those who gave to the second: the residuals account for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from pmesh.compression.blocks import PART, Float32s, Rows, add_residual, drop_not_finite, parts
from pmesh.compression.draws import draw_words
from pmesh.compression.twins import twins


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Consecutive values of a bucket, row by row, and its two thin factors."""

    start: int
    rows: int
    columns: int
    p_start: int
    q_start: int

    @property
    def end(self) -> int:
        """One beyond its last value."""
        return self.start + self.rows * self.columns

    def of(self, values: Float32s) -> Rows:
        """float32[rows, columns], a view of the bucket's values."""
        return values[self.start : self.end].reshape(self.rows, self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a bucket is compressed; the same on all ranks."""

    count: int
    """Values of the bucket."""
    rank: int
    """Columns of each P and Q."""
    matrices: tuple[Matrix, ...]
    rest: tuple[tuple[int, int], ...]
    """What goes uncompressed: runs of values, each from its first to before its last."""
    rest_start: int
    """Where that lies in the first all-reduce: behind all P's."""
    p_count: int
    """Values in the first all-reduce."""
    q_count: int
    """Values in the second: all Q's. 0: there is no second."""

    def p_of(self, matrix: Matrix, p: Float32s) -> Rows:
        """float32[rank, rows], a view: one row for each column of P."""
        end = matrix.p_start + self.rank * matrix.rows
        return p[matrix.p_start : end].reshape(self.rank, matrix.rows)

    def q_of(self, matrix: Matrix, q: Float32s) -> Rows:
        """float32[rank, columns], likewise of Q."""
        end = matrix.q_start + self.rank * matrix.columns
        return q[matrix.q_start : end].reshape(self.rank, matrix.columns)

    def copy_rest(self, values: Float32s, p: Float32s) -> None:
        """Lay the values that go uncompressed behind the P's."""
        done = self.rest_start
        for start, end in self.rest:
            p[done : done + end - start] = values[start:end]
            done += end - start

    def restore_rest(self, p: Float32s, values: Float32s) -> None:
        """Put them back where they belong."""
        done = self.rest_start
        for start, end in self.rest:
            values[start:end] = p[done : done + end - start]
            done += end - start


def plan_matrices(shapes: Sequence[tuple[int, ...]], *, rank: int, min_rate: float = 2.0) -> Plan:
    """Which of the arrays of a bucket are compressed, and how they lie in it.

    Those where it pays: (rows + columns) * rank * min_rate <= rows * columns. More than two
    dimensions are folded to two where rows + columns is least; vectors and scalars are the rest.

    Args:
        shapes: of the arrays, in the order in which they lie in the bucket.
        rank: of P and Q; at least 1.
        min_rate: at least 1; how many times smaller P and Q together have to be.

    >>> plan = plan_matrices([(64, 32, 3, 3), (64,)], rank=2)
    >>> [(m.rows, m.columns) for m in plan.matrices], plan.rest, plan.p_count, plan.q_count
    ([(64, 288)], ((18432, 18496),), 192, 576)
    """
    start = p_count = q_count = 0
    matrices: list[Matrix] = []
    rest: list[tuple[int, int]] = []
    for shape in shapes:
        rows, columns = _fold(shape)
        end = start + rows * columns
        if 0 < (rows + columns) * rank * min_rate <= rows * columns:
            matrices.append(
                Matrix(start=start, rows=rows, columns=columns, p_start=p_count, q_start=q_count)
            )
            p_count += rank * rows
            q_count += rank * columns
        elif rest and rest[-1][1] == start:
            rest[-1] = (rest[-1][0], end)
        else:
            rest.append((start, end))
        start = end
    return Plan(
        count=start,
        rank=rank,
        matrices=tuple(matrices),
        rest=tuple(rest),
        rest_start=p_count,
        p_count=p_count + sum(end - first for first, end in rest),
        q_count=q_count,
    )


def _fold(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns; one row, if there are less than two dimensions."""
    folds = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(folds, key=sum, default=(1, math.prod(shape)))


__all__ = [
    "Plan",
    "compress",
    "decompress",
    "orthogonalize",
    "plan_matrices",
    "project",
    "warm_up",
]

Float64s: TypeAlias = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]

_DEPENDENT = 2.0**-60  # of a column's squared length; beyond it float64 would see only noise
_LOW_BITS = np.uint64(40)  # of a lot; 24 are left, as many as fp32 holds


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
    for matrix in plan.matrices:
        for i, column in enumerate(plan.q_of(matrix, q)):
            largest = np.abs(column).max()
            if largest > 0 and np.isfinite(largest):
                np.ldexp(column, 1 - np.frexp(largest)[1], out=column)
            else:
                first = matrix.q_start + i * matrix.columns
                lots = draw_words(key, first, matrix.columns) >> _LOW_BITS
                column[:] = lots.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)


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
    # What is not finite is a result; Accelerate's products also raise flags of their own.
    with np.errstate(all="ignore"):
        for matrix in plan.matrices:
            thin_p, thin_q = plan.p_of(matrix, p), plan.q_of(matrix, q)
            for rows in parts(matrix.rows, _rows_of_part(matrix.rows, matrix.columns)):
                part = slice(
                    matrix.start + rows.start * matrix.columns,
                    matrix.start + rows.stop * matrix.columns,
                )
                values = add_residual(own, residual, residual_out, part)
                block = values.reshape(-1, matrix.columns)
                np.matmul(thin_q, block.T, out=thin_p[:, rows])
        for start, end in plan.rest:
            add_residual(own, residual, residual_out, slice(start, end))
    plan.copy_rest(own if residual_out is None else residual_out, p)


def orthogonalize(plan: Plan, p: Float32s) -> None:
    """Make the columns of each P orthonormal, in place; the rest stays as it is.

    Modified Gram-Schmidt in float64, columns from first to last. A column that depends on those
    before it (to 2^-30 of its length) becomes zero. A P that is not finite everywhere comes out
    with NaN at least where it was not.

    Args:
        plan: of the bucket.
        p: float32[p_count], the mean.
    """
    with np.errstate(all="ignore"):
        for matrix in plan.matrices:
            thin = plan.p_of(matrix, p)
            columns = thin.astype(np.float64)
            lengths = _ordered_sums(columns * columns)
            for i, column in enumerate(columns):
                length = _ordered_sums(column * column)
                depends = length <= lengths[i] * _DEPENDENT
                # What is infinite becomes NaN, by either.
                np.multiply(column, 0 if depends else 1 / np.sqrt(length), out=column)
                others = columns[i + 1 :]
                others -= _ordered_sums(others * column)[:, None] * column
            thin[:] = columns


def project(plan: Plan, values: Float32s, p: Float32s, q: Float32s) -> None:
    """Q = M^T P for each matrix.

    Args:
        plan: of the bucket.
        values: float32[count]: `residual_out` of `compress`, or `own` without feedback; only read.
        p: float32[p_count], of `orthogonalize`; only read.
        q: float32[q_count], written; to be all-reduced, as a mean.
    """
    with np.errstate(all="ignore"):
        for matrix in plan.matrices:
            np.matmul(plan.p_of(matrix, p), matrix.of(values), out=plan.q_of(matrix, q))


def decompress(
    plan: Plan,
    p: Float32s,
    q: Float32s,
    out: Float32s,
    *,
    residual_out: Float32s | None = None,
) -> None:
    """Write the mean, P Q^T for each matrix and the rest as it is; keep what it leaves of our own.

    A matrix in which some rank has a NaN or an infinity comes out as NaN.

    Args:
        plan: of the bucket.
        p: float32[p_count], of `orthogonalize`; only read.
        q: float32[q_count], the mean; only read.
        out: float32[count], written.
        residual_out: float32[count], of `compress`; becomes itself minus out, and 0 where that is
            not finite, and 0 in the rest. None: no feedback.
    """
    with np.errstate(all="ignore"):
        for matrix in plan.matrices:
            values = slice(matrix.start, matrix.end)
            left = None if residual_out is None else residual_out[values]
            _multiply(plan.p_of(matrix, p), plan.q_of(matrix, q), out[values], left)
    plan.restore_rest(p, out)
    if residual_out is not None:
        for start, end in plan.rest:
            residual_out[start:end] = 0


def _rows_of_part(rows: int, columns: int) -> int:
    """How many rows fit in a cache, at least one."""
    return min(rows, max(1, PART // columns))


def _ordered_sums(terms: Float64s) -> Float64s:
    """Over the last axis, from first to last: np.sum's order depends on the machine."""
    sums: Float64s = np.add.accumulate(terms, axis=-1)[..., -1]
    return sums


def _multiply(thin_p: Rows, thin_q: Rows, out: Float32s, left: Float32s | None) -> None:
    """Set `out` to P Q^T, adding up the columns from first to last.

    Args:
        thin_p: float32[rank, rows].
        thin_q: float32[rank, columns].
        out: float32[rows * columns], written.
        left: float32[rows * columns], from which it is subtracted in place; None: nothing is.
    """
    compiled = twins()
    if compiled is not None:
        kept = np.empty(0, np.float32) if left is None else left
        compiled.multiply(thin_p.reshape(-1), thin_q.reshape(-1), len(thin_p), out, kept)
        return
    columns = thin_q.shape[1]
    scratch = np.empty((_rows_of_part(thin_p.shape[1], columns), columns), np.float32)
    for rows in parts(thin_p.shape[1], len(scratch)):
        part = slice(rows.start * columns, rows.stop * columns)
        whole = out[part].reshape(-1, columns)
        np.multiply(thin_p[0, rows, None], thin_q[0], out=whole)
        for p_column, q_column in zip(thin_p[1:, rows, None], thin_q[1:], strict=True):
            product = np.multiply(p_column, q_column, out=scratch[: len(whole)])
            np.add(whole, product, out=whole)
        if left is not None:
            drop_not_finite(np.subtract(left[part], out[part], out=left[part]))
