"""Which arrays of a bucket PowerSGD takes as matrices, and where their P's and Q's lie."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pmesh.compression.arrays import Float32s, Rows


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
