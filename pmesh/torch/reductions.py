"""torch's `ReduceOp` in the words of pmesh."""

from typing import Any

from pmesh.torch.library import dist

_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_PMESH_OF = {"AVG": "mean", "PRODUCT": "prod"}


def reduction_of(op: Any) -> tuple[str, object]:  # noqa: ANN401 - torch's ReduceOp, which has no types here
    """The name of a reduction, and what to multiply by before (None: nothing).

    Raises:
        ValueError: it is none of `SUM`, `AVG`, `PRODUCT`, `MIN`, `MAX`, `BAND`, `BOR`,
            `BXOR` and `PREMUL_SUM`.
    """
    for name in _NAMES:
        if op == getattr(dist.ReduceOp, name):
            return _PMESH_OF.get(name, name.lower()), None
    if op == dist.ReduceOp.PREMUL_SUM:
        return "sum", op.factor
    raise ValueError(f"the backend 'pmesh' has no reduction {op}")
