"""The arguments of a process group's methods, which torch passes in several forms."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pmesh.torch.library import Tensor, TorchOptions, dist, torch

Tensors = Sequence[Tensor]


def options_for(
    kind: str,
    opts: object,
    timeout: timedelta | None = None,
    named: "dict[str, object] | None" = None,
    root: str = "",
) -> Any:  # noqa: ANN401 - torch's options, which have no common type
    """Return the options of an op; make them if the caller passed the arguments themselves."""
    wanted = getattr(dist, f"{kind}Options", None) or getattr(
        dist.distributed_c10d, f"{kind}Options"
    )
    given_options = dict(named or {})
    if isinstance(opts, wanted) and not given_options:
        return opts
    made: TorchOptions = opts if isinstance(opts, wanted) else wanted()
    if opts is not None and made is not opts:
        given_options["root" if root and isinstance(opts, int) else "op"] = opts
    if timeout is not None:
        made.timeout = timeout
    for name, value in given_options.items():
        setattr(made, {"op": "reduceOp", "root": "rootRank"}.get(name, name), value)
    return made


def list_of(tensors: Tensor | Tensors) -> list[Tensor]:
    """Return a list of the tensors, of which there may be a single one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def one_of(tensors: Tensor | Tensors, what: str) -> Tensor:
    """Return the only tensor. Raises ValueError unless there is exactly one."""
    found = list_of(tensors)
    if len(found) != 1:
        raise ValueError(f"{what} takes one tensor at a time, not {len(found)}")
    return found[0]


def list_in(lists: Sequence[Any]) -> list[Tensor]:
    """Return the list of tensors of a call for one tensor; C++ passes it in another list."""
    inner: Any = lists[0] if lists else []
    return [*lists] if isinstance(inner, torch.Tensor) else [*inner]


def check_dtype(outs: Tensors, x: Tensor, what: str) -> None:
    """Raise ValueError unless all outputs have the dtype of `x`."""
    for out in outs:
        if out.dtype != x.dtype:
            raise ValueError(f"{what}: {x.dtype} does not fit into {out.dtype}")


def counts_of(x: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the number of values in each rank's part."""
    rows = x.shape[0] if x.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(f"all_to_all: {rows} rows can't be split into {size} equal parts")
        return [x.numel() // size] * size
    if sum(splits) != rows or len(splits) != size:
        raise ValueError(f"all_to_all: the parts {list(splits)} are not those of {rows} rows")
    return [split * (x.numel() // rows if rows else 0) for split in splits]
