"""Chooses the rows that each rank takes in each iteration, and pads them as mlx-lm does.

A batch depends only on the data set, the seed and the iteration. It has `batch_size` rows for any
number of ranks, which share them by `Mesh.share`; so a rank may get no row.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pmesh.client.mesh import order_of
from pmesh.errors import UsageError

PAD_TO = 32  # as mlx-lm: few shapes, so few compilations


class Dataset(Protocol):
    """The interface of mlx-lm's `CacheDataset`."""

    def itemlen(self, idx: int) -> int:
        """Return the length by which mlx-lm sorts rows."""
        ...

    def __getitem__(self, idx: int) -> tuple[Sequence[int], int]:
        """Return the tokens of a row, and the index of the first token that is to be learned."""
        ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """One rank's rows of a batch."""

    tokens: NDArray[np.int32]
    """The tokens in the shape (rows, length), padded with 0."""
    spans: NDArray[np.int32]
    """The first and last target that counts in each row, in the form of mlx-lm's losses."""
    targets: int
    """The number of targets that count in all rows; each row has at least 1."""
    truncated: int
    """The number of rows that were cut to the maximal length."""


class Batches:
    """A data set in batches, whose order differs from epoch to epoch."""

    def __init__(
        self, dataset: Dataset, *, batch_size: int, max_length: int, seed: int, name: str
    ) -> None:
        """Cut the rows into batches, as mlx-lm does. An incomplete last batch is left out.

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
        """Return the number of batches in an epoch."""
        return len(self._batches)

    def rows(self, iteration: int) -> list[int]:
        """Return all rows of an iteration's batch; iterations count from 0."""
        epoch, place = divmod(iteration, len(self._batches))
        if epoch != self._epoch:
            self._order = order_of(len(self._batches), epoch=epoch, seed=self._seed)
            self._epoch = epoch
        return self._batches[int(self._order[place])]

    def share(self, iteration: int, deal: Callable[[int], Iterable[int]]) -> LocalBatch | None:
        """Return a rank's part of the batch; None if it has no target that counts.

        Args:
            iteration: counted from 0.
            deal: returns which rows of a batch of so many the rank takes, as `Mesh.share` does.
        """
        rows = self.rows(iteration)
        samples = [self._dataset[rows[i]] for i in deal(len(rows))]
        return pad(samples, max_length=self._max_length)


def pad(samples: Sequence[tuple[Sequence[int], int]], *, max_length: int) -> LocalBatch | None:
    """Cut and pad rows to one length, without the rows that have no target that counts.

    The masked prompt of such a row fills the whole length. mlx-lm's mean over no targets is NaN.

    Args:
        samples: For each row its tokens, and the index of the first token to be learned.
        max_length: The maximal number of tokens in a row.

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
    return LocalBatch(
        tokens=padded,
        spans=np.array([span for _, *span in kept], np.int32),
        targets=targets,
        truncated=sum(len(tokens) > max_length for tokens, *_ in kept),
    )
