"""A batch sampler for torch's DataLoader that deals rows by the measured speed of the ranks."""

from collections.abc import Iterator, Sized
from typing import Self

import numpy as np

from pmesh.client.connect import DealsShares, wish_of
from pmesh.client.mesh import order_of
from pmesh.core.jobs.batches import BatchShares
from pmesh.core.jobs.shares import Pace, Standing, deal_rows
from pmesh.errors import UsageError
from pmesh.torch.library import torch
from pmesh.torch.process_group import pmesh_group
from pmesh.torch.ranks import WORLDS


class DistributedBatchSampler(torch.utils.data.Sampler):  # type: ignore[misc] # torch has no types here
    """Deals each batch of all ranks by their measured speed: a fast rank takes more of its rows.

    For a process group of the backend `pmesh`, and torch's own DistributedDataParallel or what
    stands on it. `DataLoader` takes it as `batch_sampler`. Call `begin_step` once for each batch,
    and multiply the loss of the batch, a mean over its rows, by what that returns:

        sampler = pmesh.torch.DistributedBatchSampler(dataset, 96)  # rows for all ranks together
        for x, y in DataLoader(dataset, batch_sampler=sampler):
            scale = sampler.begin_step(len(x))
            loss = cross_entropy(ddp(x), y)
            (loss * scale).backward()

    DDP averages over the ranks, so their gradient is the mean over all rows of the batch, however
    these are dealt. Each pass over the batches is an epoch with an order of its own.

    Each rank measures how long it computes from one `begin_step` to the next, of which the median
    counts, and in `begin_step` the ranks tell each other, in one small op. New shares hold from the
    first batch on that no data loader has asked for.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        shares: DealsShares | None = None,
        max_rows: int | None = None,
        group: object = None,
    ) -> None:
        """Agree with the other ranks, each of which must make the same sampler.

        Args:
            dataset: the samples; only their number counts.
            batch_size: how many samples all ranks take together; at least one for each rank.
            shuffle: True for another order in each epoch, False for that of the dataset.
            seed: each seed gives other orders.
            drop_last: True to leave out the last batch if it is smaller. It is left out anyway if
                it has fewer samples than there are ranks.
            shares: "measured", or "even", as for `pmesh.connect`.
            max_rows: the most rows of a batch that fit the memory of this rank.
            group: the group of the model; None is the default group.

        Raises:
            UsageError: an argument is invalid or not the same on all ranks, the ranks take fewer
                rows than a batch has, or the group has another backend than `pmesh`.
        """
        if WORLDS.elastic is not None:
            raise UsageError(
                "DistributedBatchSampler needs a fixed number of ranks: after "
                "pmesh.torch.init(elastic=True) take mesh.batch, and model.gradient_weight"
            )
        self._group = pmesh_group(group, "DistributedBatchSampler")
        self._rank: int = self._group.rank()
        self._size: int = self._group.size()
        self._wish = wish_of(shares, max_rows)
        self._batch_size, self._dataset_len = batch_size, len(dataset)
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._epoch = self._passes = 0
        self._batches = BatchShares(self._rank, self._size)
        self._pace = Pace()
        self._rows = self._steps = 0
        self._began_s: float | None = None
        self._check()
        self._agree(0)
        latest = self._batches.latest
        deal_rows(batch_size, latest.weights, latest.most_rows)  # it raises what a pass would

    @property
    def sampler(self) -> Self:
        """This sampler: Lightning calls `set_epoch` of what has this name in a batch sampler."""
        return self

    @property
    def batch_sampler(self) -> Self:
        """This sampler: Transformers calls `set_epoch` of what has this name in a batch sampler."""
        return self

    @property
    def batch_size(self) -> int:
        """Raise UsageError: a library that asks for it would deal the batches out once more."""
        raise UsageError(
            "the batches of a DistributedBatchSampler are this rank's already: leave its data "
            "loader out of accelerator.prepare; with Lightning, write "
            "Trainer(use_distributed_sampler=False)"
        )

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of this epoch, from 0 on; without it, passes count epochs."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same on all ranks."""
        whole, left = divmod(self._dataset_len, self._batch_size)
        return whole + (left >= self._size and not self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's samples of each batch."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        self._batches.next_batch = self._passes * len(self)
        self._passes += 1
        rows = self._dataset_len
        order = order_of(rows, epoch=epoch, seed=self._seed) if self._shuffle else np.arange(rows)
        for number in range(len(self)):
            batch = order[number * self._batch_size :][: self._batch_size]
            yield batch[self._batches.deal(len(batch))].tolist()

    def begin_step(self, rows: int) -> float:
        """Agree with the other ranks on their shares of later batches; every rank must call it.

        Args:
            rows: how many rows this rank has of the batch that it begins.

        Returns:
            By what to multiply the mean loss of these rows: `rows * ranks / rows of all ranks`.

        Raises:
            UsageError: there are no rows.
            DistBackendError: a rank is lost.
        """
        if rows < 1:
            raise UsageError(f"a step has at least one row on each rank, not {rows}")
        if self._began_s is not None:
            self._pace.note(self._group.computed_s - self._began_s, self._rows)
        total = self._agree(rows)
        self._steps += 1
        weights = self._batches.latest.weights
        self._group.show_step(self._steps, round(100 * weights[self._rank] / sum(weights)))
        self._rows, self._began_s = rows, self._group.computed_s
        return rows * self._size / total

    def _agree(self, rows: int) -> int:
        """Tell the others how fast this rank is, and its rows; return the rows of all ranks."""
        standing = self._wish._replace(
            ns_per_row=self._pace.ns_per_row,
            uncertainty_ppm=self._pace.uncertainty_ppm,
            weight=self._batches.latest.weights[self._rank],
        )
        mine = torch.tensor([self._batches.next_batch, rows, *standing])
        theirs = torch.empty(self._size * len(mine), dtype=mine.dtype)
        self._group.all_gather_single(theirs, mine).wait()
        table: list[list[int]] = theirs.view(self._size, -1).tolist()
        standings = [Standing(*standing) for _, _, *standing in table]
        if self._batches.agree(standings, [row[0] for row in table]):
            self._pace.forget()
        return sum(row[1] for row in table)

    def _check(self) -> None:
        """Raise UsageError on all ranks, if one of them has made another sampler."""
        mine = [self._dataset_len, self._batch_size, self._shuffle, self._seed, self._drop_last]
        theirs = self._group.all_gather_object(mine)
        if any(other != mine for other in theirs):
            ranks = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(theirs))
            raise UsageError(
                "the ranks have made different samplers, as [samples, batch_size, shuffle, seed, "
                f"drop_last]: {ranks}; give the same on all machines"
            )
        if not self._size <= self._batch_size < 2**31:
            raise UsageError(
                f"batch_size is that of all ranks together: at least {self._size}, one row for "
                f"each, not {self._batch_size}"
            )
