"""Which samples a rank takes: the same order for all, dealt out among those who are there."""

from typing import TypeAlias

import numpy as np

from pmesh.errors import UsageError

Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


def order_of(dataset_len: int, *, epoch: int, seed: int) -> Indices:
    """A permutation of 0 to `dataset_len` - 1, the same on every machine; read-only int64.

    The samples are sorted by random numbers of a counter-based generator (Philox 4x64-10: Salmon et
    al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the key (seed, epoch). Not
    `Generator.permutation`, whose order may change with numpy's version, unlike a bit generator's.
    """
    generator = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    order = np.argsort(generator.random_raw(dataset_len), kind="stable").astype(np.int64)
    order.flags.writeable = False  # it is kept, and what ranks get are views of it
    return order


def deal(order: Indices, *, position: int, rank: int, size: int) -> Indices:
    """A rank's part of what follows `position`: every `size`-th, from the `rank`-th on."""
    return order[position + rank :: size]


def check_shard(dataset_len: int, *, epoch: int, position: int, seed: int) -> None:
    """Raises UsageError unless these can be a data set, an epoch, a position and a seed."""
    numbers = {"dataset_len": dataset_len, "epoch": epoch, "position": position, "seed": seed}
    for name, number in numbers.items():
        if not 0 <= number < 2**63:
            raise UsageError(f"{name} is at least 0 and less than 2**63, not {number}")
