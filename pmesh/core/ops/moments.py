"""Means and variances of several ranks' values, merged into those of all values."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.floating[Any]]
Doubles: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Moments:
    """The number, means and squared deviations of values in C channels."""

    count: int
    """Of each channel."""
    mean: Doubles
    """[C]; zeros if there are no values."""
    deviation: Doubles
    """[C], the sum of the squared distances from the mean."""

    @classmethod
    def of_none(cls, channels: int) -> "Moments":
        """Return the moments of no values."""
        return cls(0, np.zeros(channels), np.zeros(channels))

    @classmethod
    def of_row(cls, row: Doubles) -> "Moments":
        """Return the moments that `row` has made."""
        channels = len(row) // 2
        return cls(int(row[0]), row[1 : channels + 1], row[channels + 1 :])

    @property
    def row(self) -> Doubles:
        """All three as one row, [1 + 2 * C] float64, to be gathered."""
        return np.concatenate([[float(self.count)], self.mean, self.deviation])

    @property
    def variance(self) -> Doubles:
        """The mean of the squared distances, by which values are normalized."""
        return self.deviation / self.count

    @property
    def sample_variance(self) -> Doubles:
        """The unbiased estimate, which running statistics have."""
        return self.deviation / (self.count - 1)


def merge(parts: Iterable[Moments]) -> Moments:
    """Return the moments of all values together; at least one part.

    No large numbers are subtracted from each other, so that values of 1e6 ± 1 keep their variance:
    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances" (1979), equation 2.1. All operations are elementwise and in the order of the parts,
    so all machines get the same bits.
    """
    first, *others = parts
    whole = first
    for part in others:
        if not part.count:
            continue
        count = whole.count + part.count
        apart = part.mean - whole.mean
        between = apart * apart * (whole.count * part.count / count)
        whole = Moments(
            count,
            whole.mean + apart * (part.count / count),
            whole.deviation + part.deviation + between,
        )
    return whole


def cut_in_two(mean: Doubles, dtype: npt.DTypeLike) -> tuple[Floats, Floats]:
    """Return means as `high + low` of a narrower dtype, so that `(x - high) - low` is exact.

    >>> high, low = cut_in_two(np.array([1e6 + 0.01]), np.float32)
    >>> float(high[0]), round(float(low[0]), 6)
    (1000000.0, 0.01)
    """
    high: Floats = mean.astype(dtype)
    low: Floats = (mean - high).astype(dtype)
    return high, low
