"""The arguments of ops: torch passes them in several forms, and tensors on any device."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from pmesh.torch.library import Tensor, TensorList, TorchOptions, dist, torch

_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_PMESH_OF = {"AVG": "mean", "PRODUCT": "prod"}

_DIVIDED = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Integer dtypes that torch can divide."""


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


def list_of(tensors: Tensor | TensorList) -> list[Tensor]:
    """Return a list of the tensors, of which there may be a single one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def one_of(tensors: Tensor | TensorList, what: str) -> Tensor:
    """Return the only tensor. Raises ValueError unless there is exactly one."""
    found = list_of(tensors)
    if len(found) != 1:
        raise ValueError(f"{what} takes one tensor at a time, not {len(found)}")
    return found[0]


def list_in(lists: Sequence[Any]) -> list[Tensor]:
    """Return the list of tensors of a call for one tensor; C++ passes it in another list."""
    inner: Any = lists[0] if lists else []
    return [*lists] if isinstance(inner, torch.Tensor) else [*inner]


def check_dtype(outs: TensorList, x: Tensor, what: str) -> None:
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


# --- reductions


class TorchReduction(NamedTuple):
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


def reduction_of(op: Any, xs: Sequence[Tensor]) -> TorchReduction:  # noqa: ANN401 - torch's ReduceOp, which has no types here
    """Return how to reduce these tensors.

    The average of integers is rounded towards zero, as in NCCL.

    Raises:
        ValueError: `op` is none of `SUM`, `AVG`, `PRODUCT`, `MIN`, `MAX`, `BAND`, `BOR`,
            `BXOR` and `PREMUL_SUM`.
    """
    if op == dist.ReduceOp.AVG and all(x.dtype in _DIVIDED for x in xs):
        return TorchReduction("sum", is_divided=True)
    for name in _NAMES:
        if op == getattr(dist.ReduceOp, name):
            return TorchReduction(_PMESH_OF.get(name, name.lower()))
    if op == dist.ReduceOp.PREMUL_SUM:
        return TorchReduction("sum", op.factor)
    raise ValueError(f"the backend 'pmesh' has no reduction {op}")


# --- devices and strides: pmesh takes contiguous memory of the CPU


def given(x: Tensor) -> Tensor:
    """Return the values without autograd; a view if the tensor is contiguous on the CPU."""
    check(x)
    return x.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def check(x: Tensor) -> None:
    """Raise ValueError for a tensor that is not dense, is quantized or has no data."""
    if x.layout != torch.strided:
        raise ValueError(f"the backend 'pmesh' takes dense tensors, not {x.layout}")
    if x.is_quantized or x.device.type == "meta":
        what = "quantized" if x.is_quantized else "of the device 'meta', without data"
        raise ValueError(f"the backend 'pmesh' can't move a tensor that is {what}")


class StagedTensor:
    """A tensor to be written, and the memory that pmesh writes: the tensor's, or a CPU copy."""

    def __init__(self, x: Tensor, *, filled: bool = False) -> None:
        """If `filled`, the memory starts with the tensor's values."""
        check(x)
        self._tensor = x.detach()
        plain = not (x.is_conj() or x.is_neg()) and x.is_contiguous()
        if x.device.type == "cpu" and plain:
            self.memory = self._tensor
        elif filled:
            self.memory = given(x)
        else:
            self.memory = torch.empty(x.shape, dtype=x.dtype)

    def write(self) -> None:
        """Copy the memory to the tensor, unless it is the tensor's own."""
        if self.memory.data_ptr() != self._tensor.data_ptr() or self._tensor.device.type != "cpu":
            self._tensor.copy_(self.memory)


def targets(xs: Sequence[Tensor]) -> list[StagedTensor]:
    """Return a target for each tensor."""
    return [StagedTensor(x) for x in xs]


def pieces(x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return consecutive views of a contiguous tensor, with these numbers of values."""
    flat = x.reshape(-1)
    found: list[Tensor] = []
    begin = 0
    for count in counts:
        found.append(flat[begin : begin + count])
        begin += count
    return found
