"""What a rank calls in each step, to average its gradients with those of entrenar's workers.

    blocks, (head, norm, embedding) = average_blocks(mesh, blocks, (head, norm, embedding))

`pmesh bridge entrenar` is one rank of the job, and makes the same calls for its workers.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from pmesh.bridge.rules import (
    COMPONENTS,
    Announcement,
    BlockLayout,
    Layout,
    WholeLayout,
    read_announcements,
)
from pmesh.bridge.wire import Floats
from pmesh.client.mesh import Mesh
from pmesh.errors import RosterChanged, UsageError

Arrays: TypeAlias = Sequence[ArrayLike]


def average_blocks(
    mesh: Mesh, blocks: Sequence[Arrays], others: Arrays, *, weight: float = 1.0
) -> tuple[list[list[Floats]], list[Floats]]:
    """Average the gradients of one step with all ranks and all workers, block by block.

    Call it on all ranks, once in each step. Each worker counts as a rank with weight 1.

    Args:
        mesh: the job that `pmesh bridge entrenar --job` names, which makes no other calls.
        blocks: the arrays of each block, from the first block to the last. Within a block they have
            entrenar's order: q, k, v, o, gate, up, down, input norm, norm after attention.
        others: the gradients of head, final norm and embedding.
        weight: how many workers this rank counts for, such as its rows over those of a worker.

    Returns:
        The means, as float32 arrays of the same shapes. Every rank and worker gets the same bits.

    Raises:
        UsageError: a value is not finite, there are no three others, or another rank has arrays of
            other sizes.
        PmeshError: as for `mesh.average_gradients`.
    """
    if len(others) != len(COMPONENTS):
        raise UsageError(f"others are head, final norm and embedding, not {len(others)} arrays")
    flat_blocks = [_JoinedArrays(block, f"block {index}") for index, block in enumerate(blocks)]
    flat_others = [_JoinedArrays([x], name) for x, name in zip(others, COMPONENTS, strict=True)]
    head, norm, embedding = (sum(each.sizes) for each in flat_others)
    announce(mesh, BlockLayout(tuple(each.sizes for each in flat_blocks), (head, norm, embedding)))
    for each in (*reversed(flat_blocks), *flat_others):
        each.average(mesh, weight)
    return [each.arrays() for each in flat_blocks], [each.arrays()[0] for each in flat_others]


def average_whole(
    mesh: Mesh, gradients: Arrays, *, loss: float, rows: int, weight: float = 1.0
) -> tuple[list[Floats], float]:
    """Average the gradients of one step with workers that fine-tune and send theirs as a whole.

    Args:
        mesh: as for `average_blocks`; the bridge needs `--rows`.
        gradients: the arrays, in the workers' order.
        loss: the mean of this rank's rows.
        rows: how many those are.
        weight: as for `average_blocks`.

    Returns:
        The means, as float32 arrays of the same shapes; and the mean loss of all rows.

    Raises:
        PmeshError: as for `average_blocks`.
    """
    flat = _JoinedArrays(gradients, "the gradient")
    announce(mesh, WholeLayout(sum(flat.sizes)))
    flat.average(mesh, weight)
    return flat.arrays(), mean_loss(mesh, loss, rows)


def announce(mesh: Mesh, layout: Layout | None) -> Layout | None:
    """Begin a step: return the layout of all ranks; None if only the bridge is left.

    Args:
        mesh: the job.
        layout: this rank's; None for the bridge.

    Raises:
        UsageError: the layouts of two ranks differ.
        PmeshError: as for `mesh.all_gather_object`.
    """
    own = msgspec.to_builtins(Announcement(layout))
    while True:
        try:
            return read_announcements(mesh.all_gather_object(own))
        except RosterChanged:  # all that are left announce again
            continue


def mean_loss(mesh: Mesh, loss: float, rows: int) -> float:
    """Return the mean loss of the rows of all ranks; 0 if there are none."""
    total, count = mesh.all_reduce(np.array([loss * rows, rows], np.float64))
    return float(total / count) if count else 0.0


class _JoinedArrays:
    """Arrays as one array, which is averaged in one call."""

    def __init__(self, arrays: Arrays, name: str) -> None:
        found = [np.asarray(x, np.float32) for x in arrays]
        self._shapes = [x.shape for x in found]
        self.sizes = tuple(x.size for x in found)
        self._values = np.concatenate([x.ravel() for x in found] or [np.empty(0, np.float32)])
        if not np.isfinite(self._values).all():
            raise UsageError(f"a value of {name} is not finite; skip this step on all ranks")

    def average(self, mesh: Mesh, weight: float) -> None:
        self._values = mesh.average_gradients(self._values, weight)

    def arrays(self) -> list[Floats]:
        ends = accumulate(self.sizes)
        return [
            self._values[end - size : end].reshape(shape)
            for end, size, shape in zip(ends, self.sizes, self._shapes, strict=True)
        ]
