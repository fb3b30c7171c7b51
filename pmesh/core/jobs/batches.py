"""Shares of batches that data loaders deal ahead of the step that trains on them.

In each step the ranks agree on new weights, as in `shares`. By then the data loader of each rank
has asked for later batches already, on some ranks for more of them. So weights hold from the first
batch on that no rank has dealt, and each batch is dealt by the same weights on all ranks.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pmesh.compression.blocks import Indices
from pmesh.core.jobs.shares import WHOLE, Standing, choose_weights, deal_rows


class BatchTerms(NamedTuple):
    """On what the ranks have agreed."""

    first: int
    """The number of the first batch that is dealt so."""
    weights: tuple[int, ...]
    most_rows: tuple[int, ...]


class BatchShares:
    """One rank's shares of batches, which are numbered from 0 on, the same on all ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._terms = deque([BatchTerms(0, (WHOLE,) * size, (0,) * size)])
        self.next_batch = 0
        """The number of the batch that this rank deals next; it never goes back."""

    @property
    def latest(self) -> BatchTerms:
        """On what the ranks have agreed last."""
        return self._terms[-1]

    def agree(self, standings: Sequence[Standing], next_batches: Sequence[int]) -> bool:
        """Take the weights that follow from what all ranks have told; return whether they are new.

        Args:
            standings: of all ranks, in the order of ranks.
            next_batches: their `next_batch`.
        """
        before = self.latest
        weights = choose_weights(standings)
        most_rows = tuple(standing.most_rows for standing in standings)
        if (weights, most_rows) == before[1:]:
            return False
        self._terms.append(BatchTerms(max(next_batches), weights, most_rows))
        return weights != before.weights

    def deal(self, rows: int) -> Indices:
        """Return this rank's rows of the next batch. Raises UsageError as `deal_rows` does."""
        while len(self._terms) > 1 and self._terms[1].first <= self.next_batch:
            self._terms.popleft()
        self.next_batch += 1
        terms = self._terms[0]
        return deal_rows(rows, terms.weights, terms.most_rows)[self._rank]
