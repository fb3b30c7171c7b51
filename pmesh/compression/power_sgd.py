"""PowerSGD: each matrix of a bucket as a product of two thin ones (Vogels et al. 2019).

For a matrix M, the mean over all ranks, one step of a power iteration gives P and Q of rank r with
M ≈ P Q^T (their algorithm 1). The error of each rank's own matrix stays in its residual (their
algorithm 2). No rank has M: both products are linear in it, so two ordinary all-reduces suffice.

    own + residual ──▶ compress ──▶ p ──▶ all-reduce, mean ──▶ orthogonalize, in place
          │                                                                │
          └──▶ residual_out, for now own + residual ──▶ project ◀──────────┤
                                                           │               │
                                   all-reduce, mean ◀── q ─┘               │
                                           │                               │
             warm_up, for the next step ◀──┴──▶ decompress ◀───────────────┘
                                                    └──▶ out, residual_out

p holds the P's of all matrices, each as (rank, rows), one after another, and then all uncompressed
values; q holds the Q's, each as (rank, columns). Every rank computes `orthogonalize`, `decompress`
and `warm_up` from the same sums, so these use elementwise IEEE arithmetic in a fixed order and no
BLAS: their bits are the same on every machine. `compress` and `project` compute this rank's own
part of a sum, and use BLAS.

If ranks start with different Q's (one is new), or leave between the two all-reduces, the result is
still P P^T M, for one P and the M of the ranks in the second: the residuals account for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from pmesh.compression.blocks import PART, Float32s, FloatRows, add_residual, drop_not_finite, parts
from pmesh.compression.compiled import kernels
from pmesh.compression.draws import draw_words


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
        """The index after its last value."""
        return self.start + self.rows * self.columns

    def of(self, values: Float32s) -> FloatRows:
        """Return float32[rows, columns], a view of the bucket's values."""
        return values[self.start : self.end].reshape(self.rows, self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGDPlan:
    """How a bucket is compressed; the same on all ranks."""

    count: int
    """The number of values of the bucket."""
    rank: int
    """The number of columns of each P and Q."""
    matrices: tuple[Matrix, ...]
    rest: tuple[tuple[int, int], ...]
    """The uncompressed values: runs as (start, end)."""
    rest_start: int
    """The start of the uncompressed values in the first all-reduce, after all P's."""
    p_count: int
    """The number of values in the first all-reduce."""
    q_count: int
    """The number of values in the second all-reduce, all Q's; 0 if there is none."""

    def p_of(self, matrix: Matrix, p: Float32s) -> FloatRows:
        """Return float32[rank, rows], a view: one row for each column of P."""
        end = matrix.p_start + self.rank * matrix.rows
        return p[matrix.p_start : end].reshape(self.rank, matrix.rows)

    def q_of(self, matrix: Matrix, q: Float32s) -> FloatRows:
        """Return float32[rank, columns], a view: one row for each column of Q."""
        end = matrix.q_start + self.rank * matrix.columns
        return q[matrix.q_start : end].reshape(self.rank, matrix.columns)

    def copy_rest(self, values: Float32s, p: Float32s) -> None:
        """Copy the uncompressed values to `p`, after the P's."""
        done = self.rest_start
        for start, end in self.rest:
            p[done : done + end - start] = values[start:end]
            done += end - start

    def restore_rest(self, p: Float32s, values: Float32s) -> None:
        """Copy the uncompressed values back to their place in `values`."""
        done = self.rest_start
        for start, end in self.rest:
            values[start:end] = p[done : done + end - start]
            done += end - start


def plan_matrices(
    shapes: Sequence[tuple[int, ...]], *, rank: int, min_rate: float = 2.0
) -> PowerSGDPlan:
    """Plan which arrays of a bucket are compressed, and their layout.

    Compressed are those with (rows + columns) * rank * min_rate <= rows * columns. More than two
    dimensions are folded to two where rows + columns is least. Vectors and scalars are the rest.

    Args:
        shapes: The shapes of the arrays, in their order in the bucket.
        rank: The rank of P and Q; at least 1.
        min_rate: The factor by which P and Q together must be smaller; at least 1.

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
    return PowerSGDPlan(
        count=start,
        rank=rank,
        matrices=tuple(matrices),
        rest=tuple(rest),
        rest_start=p_count,
        p_count=p_count + sum(end - first for first, end in rest),
        q_count=q_count,
    )


def _fold(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns; one row if there are fewer than two dimensions."""
    folds = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(folds, key=sum, default=(1, math.prod(shape)))


__all__ = [
    "PowerSGDPlan",
    "compress",
    "decompress",
    "orthogonalize",
    "plan_matrices",
    "project",
    "warm_up",
]

Float64s: TypeAlias = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]

_DEPENDENT = 2.0**-60  # of a column's squared length; less is only noise in float64
_LOW_BITS = np.uint64(40)  # dropped from a random word: the other 24 are as many as fp32 holds


def warm_up(plan: PowerSGDPlan, q: Float32s, *, key: int) -> None:
    """Turn the Q's of a step into those with which the next begins, in place.

    Each column is scaled by a power of two so that its largest magnitude is in [1, 2): then P has
    the magnitude of M, not of its square. A column that is zero or not finite is replaced by
    random values from [-1, 1): the first Q is `warm_up` of zeros, and neither zeros nor NaN stay.

    Args:
        plan: The plan of the bucket.
        q: float32[q_count].
        key: The 64-bit seed of drawn columns; the same on all ranks.
    """
    for matrix in plan.matrices:
        for i, column in enumerate(plan.q_of(matrix, q)):
            largest = np.abs(column).max()
            if largest > 0 and np.isfinite(largest):
                np.ldexp(column, 1 - np.frexp(largest)[1], out=column)
            else:
                first = matrix.q_start + i * matrix.columns
                drawn = draw_words(key, first, matrix.columns) >> _LOW_BITS
                column[:] = drawn.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)


def compress(
    plan: PowerSGDPlan,
    own: Float32s,
    q: Float32s,
    p: Float32s,
    *,
    residual: Float32s | None = None,
    residual_out: Float32s | None = None,
) -> None:
    """Compute P = (own + residual) Q for each matrix, and copy the rest.

    Args:
        plan: The plan of the bucket.
        own: float32[count]; only read.
        q: float32[q_count], from `warm_up`; only read.
        p: float32[p_count], written, for an all-reduce to the mean.
        residual: float32[count], from an earlier call, only read; None for zeros.
        residual_out: float32[count], written: own + residual. May be `residual` itself. None for
            no feedback; then `residual` is None, too.
    """
    # Infinity and NaN are valid results; Accelerate's products also set flags without a cause.
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


def orthogonalize(plan: PowerSGDPlan, p: Float32s) -> None:
    """Make the columns of each P in float32[p_count], the mean, orthonormal in place.

    Modified Gram-Schmidt in float64, columns from first to last. A column that depends on those
    before it (to 2^-30 of its length) becomes zero. Values of P that are not finite become NaN,
    and others may.
    """
    with np.errstate(all="ignore"):
        for matrix in plan.matrices:
            thin = plan.p_of(matrix, p)
            columns = thin.astype(np.float64)
            lengths = _ordered_sums(columns * columns)
            for i, column in enumerate(columns):
                length = _ordered_sums(column * column)
                depends = length <= lengths[i] * _DEPENDENT
                # Either factor turns infinity into NaN.
                np.multiply(column, 0 if depends else 1 / np.sqrt(length), out=column)
                others = columns[i + 1 :]
                others -= _ordered_sums(others * column)[:, None] * column
            thin[:] = columns


def project(plan: PowerSGDPlan, values: Float32s, p: Float32s, q: Float32s) -> None:
    """Compute Q = M^T P for each matrix.

    Args:
        plan: The plan of the bucket.
        values: float32[count]: `residual_out` of `compress`, or `own` without feedback; only read.
        p: float32[p_count], from `orthogonalize`; only read.
        q: float32[q_count], written, for an all-reduce to the mean.
    """
    with np.errstate(all="ignore"):
        for matrix in plan.matrices:
            np.matmul(plan.p_of(matrix, p), matrix.of(values), out=plan.q_of(matrix, q))


def decompress(
    plan: PowerSGDPlan,
    p: Float32s,
    q: Float32s,
    out: Float32s,
    *,
    residual_out: Float32s | None = None,
) -> None:
    """Write the mean, P Q^T for each matrix and the rest unchanged, and keep the residual.

    A matrix in which some rank has a NaN or an infinity becomes NaN.

    Args:
        plan: The plan of the bucket.
        p: float32[p_count], from `orthogonalize`; only read.
        q: float32[q_count], the mean; only read.
        out: float32[count], written.
        residual_out: float32[count], from `compress`; `out` is subtracted from it. It becomes 0
            where that is not finite, and in the rest. None for no feedback.
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
    """Return how many rows fit in a cache, at least one."""
    return min(rows, max(1, PART // columns))


def _ordered_sums(terms: Float64s) -> Float64s:
    """Sum the last axis from first to last: the order of np.sum depends on the machine."""
    sums: Float64s = np.add.accumulate(terms, axis=-1)[..., -1]
    return sums


def _multiply(thin_p: FloatRows, thin_q: FloatRows, out: Float32s, left: Float32s | None) -> None:
    """Set `out` to P Q^T, adding up the columns from first to last.

    Args:
        thin_p: float32[rank, rows].
        thin_q: float32[rank, columns].
        out: float32[rows * columns], written.
        left: float32[rows * columns], from which P Q^T is subtracted in place, or None.
    """
    if (compiled := kernels()) is not None:
        compiled.multiply(thin_p.reshape(-1), thin_q.reshape(-1), len(thin_p), out, left)
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
