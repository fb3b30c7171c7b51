"""Where the ranks of a job are, if machines have several of them: towards the network each is one.

The ranks of a machine fold their values in its memory, its first rank carries out the plan of the
op among the first ranks of all machines, and the others take its result. So a plan is made for as
many places as there are machines, and a mean is divided by the number of ranks. In a broadcast
nothing is folded, and the machine of the root has the root's place. In an all_gather the blocks of
a machine are one, since its ranks are side by side in the ring.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Final

from pmesh.core.ops.plan import RankPlan
from pmesh.core.ops.together import Fold, Together, ValuesAt

BY_MACHINES: Final = frozenset({"all_reduce", "barrier", "broadcast", "all_gather"})
"""The kinds of ops, without a codec in the ring, in which machines take part, not ranks."""

Machines = tuple[tuple[int, ...], ...]
"""The ranks of each machine, in ring order, as the machines are by their first ranks."""


def machines_of(hosts: Sequence[Hashable]) -> Machines:
    """Return the ranks of each machine, from the machine of each rank.

    It is empty if the ranks are all at one machine, or each at one of its own.

    >>> machines_of("abab"), machines_of("aab"), machines_of("aa"), machines_of("ab")
    (((0, 2), (1, 3)), ((0, 1), (2,)), (), ())
    """
    ranks = dict[Hashable, list[int]]()
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    if not 1 < len(ranks) < len(hosts):
        return ()
    return tuple(map(tuple, ranks.values()))


def place_of(machines: Machines, rank: int) -> int:
    """Return the number of a rank's machine."""
    return next(at for at, ranks in enumerate(machines) if rank in ranks)


def for_ranks(plan: RankPlan, count: int) -> RankPlan:
    """Return the plan of a machine, in which a mean is one of so many ranks."""
    return dataclasses.replace(plan, size=count)


def of_machine(reduction: str) -> str:
    """Return how the ranks of one machine reduce: the plan among the machines divides a mean."""
    return "sum" if reduction == "mean" else reduction


@lru_cache(maxsize=16)
def plan_fold(nbytes: int, size: int, *, into: int = 1) -> Together:
    """Plan the fold of a machine with at least two ranks, into the result of its second one.

    The first one's result can't take it: the plan among the machines writes there while it still
    reads what it folds. `nbytes` are those of one rank's values, and `into` is another rank.
    """
    takes = tuple(ValuesAt(rank, 0) for rank in range(size))
    folds = (Fold(takes, (ValuesAt(into, 0),), nbytes),) if nbytes else ()
    return Together(size, folds, reduces=True, makes_nan_equal=False)


@lru_cache(maxsize=16)
def plan_block(nbytes: tuple[int, ...], ranks: tuple[int, ...]) -> Together:
    """Plan how the blocks of a machine's ranks come into the result of its first one.

    `nbytes` are those of the block of each rank of the job.
    """
    begins = list(itertools.accumulate(nbytes, initial=0))
    folds = tuple(
        Fold((ValuesAt(at, 0),), (ValuesAt(0, begins[rank]),), nbytes[rank])
        for at, rank in enumerate(ranks)
        if nbytes[rank]
    )
    return Together(len(ranks), folds, reduces=False, makes_nan_equal=False)
