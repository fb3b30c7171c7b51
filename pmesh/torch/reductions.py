"""Translates torch's `ReduceOp` into reductions of pmesh."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pmesh.torch.library import Tensor, dist, torch

_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_PMESH_OF = {"AVG": "mean", "PRODUCT": "prod"}

_DIVIDED = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Integer dtypes that torch can divide."""


class Reduction(NamedTuple):
    """How pmesh computes one of torch's reductions."""

    name: str
    """The reduction's name in `Mesh.all_reduce`."""
    factor: object = None
    """The values are multiplied by this first, unless it is None."""
    is_divided: bool = False
    """True if the result must be divided by the number of ranks."""

    def finish(self, result: Tensor, ranks: int) -> None:
        """Divide the result by the number of ranks in place, if `is_divided`."""
        if self.is_divided:
            result.copy_(torch.div(result, ranks, rounding_mode="trunc"))


def reduction_of(op: Any, xs: Sequence[Tensor]) -> Reduction:  # noqa: ANN401 - torch's ReduceOp, which has no types here
    """Return how to reduce these tensors.

    The average of integers is rounded towards zero, as in NCCL.

    Raises:
        ValueError: `op` is none of `SUM`, `AVG`, `PRODUCT`, `MIN`, `MAX`, `BAND`, `BOR`,
            `BXOR` and `PREMUL_SUM`.
    """
    if op == dist.ReduceOp.AVG and all(x.dtype in _DIVIDED for x in xs):
        return Reduction("sum", is_divided=True)
    for name in _NAMES:
        if op == getattr(dist.ReduceOp, name):
            return Reduction(_PMESH_OF.get(name, name.lower()))
    if op == dist.ReduceOp.PREMUL_SUM:
        return Reduction("sum", op.factor)
    raise ValueError(f"the backend 'pmesh' has no reduction {op}")
