"""Which blocks of a model each stage has: by memory and speed."""

import math
from collections.abc import Sequence
from itertools import accumulate

from pmesh.errors import UsageError


def check_counts(counts: Sequence[int], blocks: int, stages: int) -> None:
    """Raise UsageError unless these numbers of blocks, one for each stage, add up to all blocks."""
    if len(counts) != stages:
        raise UsageError(f"by={list(counts)} is for {len(counts)} stages, and there are {stages}")
    if min(counts) < 1 or sum(counts) != blocks:
        raise UsageError(
            f"by={list(counts)} adds up to {sum(counts)} layers, and the model has {blocks}: each "
            "layer belongs to one stage, and each stage has at least one"
        )


def plan_split(
    work: Sequence[float],
    nbytes: Sequence[int],
    speeds: Sequence[float],
    memory: Sequence[float],
) -> list[int]:
    """Return how many blocks each stage gets, so that the slowest one takes as little as it can.

    Args:
        work: of each block, in any unit.
        nbytes: the memory that each block needs.
        speeds: of each stage: work per second.
        memory: of each stage, in bytes.

    Raises:
        UsageError: there are fewer blocks than stages, or the blocks do not fit.

    >>> plan_split([1] * 8, [1] * 8, speeds=[1, 3], memory=[9, 9])
    [2, 6]
    >>> plan_split([1] * 8, [1] * 8, speeds=[1, 3], memory=[9, 5])
    [3, 5]
    """
    blocks, stages = len(work), len(speeds)
    if blocks < stages:
        raise UsageError(f"the model has {blocks} layers, too few for {stages} stages")
    done, used = [0.0, *accumulate(work)], [0, *accumulate(nbytes)]
    best = [0.0] + [math.inf] * blocks  # the slowest stage's time if the first i blocks are given
    begins: list[list[int]] = []
    for speed, room in zip(speeds, memory, strict=True):
        before, best, begin_of = best, [math.inf] * (blocks + 1), [0] * (blocks + 1)
        for end in range(1, blocks + 1):
            for begin in range(end):
                if used[end] - used[begin] <= room:
                    slowest = max(before[begin], (done[end] - done[begin]) / speed)
                    if slowest < best[end]:
                        best[end], begin_of[end] = slowest, begin
        begins.append(begin_of)
    if math.isinf(best[blocks]):
        rooms = ", ".join(f"{room / 1e9:.1f}" for room in memory)
        raise UsageError(
            f"the model does not fit: training it takes {used[-1] / 1e9:.1f} GB beside "
            f"activations, and the stages have {rooms} GB; "
            "take more machines, or train adapters (LoRA)"
        )
    counts, end = list[int](), blocks
    for begin_of in reversed(begins):
        counts.append(end - begin_of[end])
        end = begin_of[end]
    return counts[::-1]
