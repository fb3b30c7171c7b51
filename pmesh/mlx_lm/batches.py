"""Which rows of the data each rank takes at each iteration, padded as mlx-lm pads them.

A batch depends on the data set, the seed and the iteration alone, and has `batch_size` rows however
many ranks there are. Rank r of n takes every n-th row, from the r-th on; so n need not divide the
batch, and a rank may get no row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pmesh.client.mesh import order_of
from pmesh.errors import UsageError

PAD_TO = 32  # as mlx-lm: few shapes, so few compilations


class Dataset(Protocol):
    """What mlx-lm's `CacheDataset` offers."""

    def itemlen(self, idx: int) -> int:
        """Return what mlx-lm sorts rows by."""
        ...

    def __getitem__(self, idx: int) -> tuple[Sequence[int], int]:
        """Return the tokens of a row, and where those begin that are to be learned."""
        ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's rows of a batch."""

    tokens: NDArray[np.int32]
    """Rows by length, padded with 0."""
    spans: NDArray[np.int32]
    """For each row the first and last target that counts, as mlx-lm's losses take them."""
    targets: int
    """How many targets count in all rows; at least 1 in each."""
    truncated: int
    """How many rows were longer than the longest that is allowed."""


class Batches:
    """A data set cut into batches, in another order in each epoch."""

    def __init__(
        self, dataset: Dataset, *, batch_size: int, max_length: int, seed: int, name: str
    ) -> None:
        """Cut the rows into batches, as mlx-lm does: the rest of the division is left out.

        Raises:
            UsageError: There are fewer rows than one batch has.
        """
        if not 0 < batch_size <= len(dataset):
            raise UsageError(
                f"the {name} set has {len(dataset)} rows, and --batch-size {batch_size} asks for "
                "more: give a smaller --batch-size, or more data in --data"
            )
        rows = sorted(range(len(dataset)), key=dataset.itemlen)
        ends = range(batch_size, len(rows) + 1, batch_size)
        self._batches: list[list[int]] = [rows[end - batch_size : end] for end in ends]
        self._dataset = dataset
        self._max_length = max_length
        self._seed = seed
        self._epoch, self._order = -1, order_of(0, epoch=0, seed=0)

    def __len__(self) -> int:
        """Return how many batches an epoch has."""
        return len(self._batches)

    def rows(self, iteration: int) -> list[int]:
        """Return the rows of the batch of an iteration, counted from 0, over all ranks."""
        epoch, place = divmod(iteration, len(self._batches))
        if epoch != self._epoch:
            self._order = order_of(len(self._batches), epoch=epoch, seed=self._seed)
            self._epoch = epoch
        return self._batches[int(self._order[place])]

    def share(self, iteration: int, *, rank: int, size: int) -> Share | None:
        """Return this rank's part of the batch; None if it has nothing to learn from."""
        samples = [self._dataset[row] for row in self.rows(iteration)[rank::size]]
        return pad(samples, max_length=self._max_length)


def pad(samples: Sequence[tuple[Sequence[int], int]], *, max_length: int) -> Share | None:
    """Cut and pad rows to one length; rows without a target that counts are left out.

    Such a row is one whose prompt, which is masked, fills the length. mlx-lm's mean over no targets
    would be not a number.

    Args:
        samples: For each row its tokens, and where those begin that are to be learned.
        max_length: The most tokens that a row may have.

    >>> share = pad([([5, 6, 7], 0), ([8], 0)], max_length=8)
    >>> share.tokens.tolist()
    [[5, 6, 7, 0, 0, 0, 0, 0], [8, 0, 0, 0, 0, 0, 0, 0]]
    >>> share.spans.tolist(), share.targets
    ([[0, 3], [0, 1]], 4)
    """
    longest = max((len(tokens) for tokens, _ in samples), default=0)
    length = min(1 + PAD_TO * -(-longest // PAD_TO), max_length)
    kept: list[tuple[Sequence[int], int, int]] = []
    targets = 0
    for tokens, offset in samples:
        end = min(len(tokens), max_length)
        count = min(end, length - 1) - max(offset, 1) + 1
        if count > 0:
            kept.append((tokens, offset, end))
            targets += count
    if not kept:
        return None
    padded = np.zeros((len(kept), length), np.int32)
    for row, (tokens, _, end) in zip(padded, kept, strict=True):
        row[:end] = tokens[:end]
    return Share(
        tokens=padded,
        spans=np.array([span for _, *span in kept], np.int32),
        targets=targets,
        truncated=sum(len(tokens) > max_length for tokens, *_ in kept),
    )
