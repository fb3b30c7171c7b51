"""torch tensors. Only this module uses torch; it is imported when the user has a tensor.

torch is optional and may not be installed where types are checked, so it has no types here.
"""

import importlib
from typing import Any

import numpy as np

from pmesh.client.trees.arrays import Leaf, check_dtype
from pmesh.client.trees.raw import RawArray, check_size
from pmesh.core.ops.reductions import Values
from pmesh.errors import ProtocolError, UnsupportedArray

torch: Any = importlib.import_module("torch")


def describe(x: Any, where: str) -> Leaf:  # noqa: ANN401 - a torch.Tensor
    """Return a tensor on any device as numpy sees it; on the CPU without a copy.

    `rebuild` makes a plain tensor on the same device, outside of autograd, also for a Parameter.
    """
    _check_dense(x, where)
    dtype = str(x.dtype).removeprefix("torch.")
    check_dtype(dtype, where)
    here = x.detach()
    if not x.is_cpu or x.is_neg() or x.is_conj():
        here = here.to("cpu").resolve_neg().resolve_conj()
    values = np.asarray(_Memory(here, np.dtype("uint16" if dtype == "bfloat16" else dtype)))

    def rebuild(fresh: Values) -> object:
        if dtype == "bfloat16":
            return torch.from_numpy(fresh.view(np.int16)).view(torch.bfloat16).to(x.device)
        return torch.from_numpy(fresh).to(x.device)

    return Leaf(dtype=dtype, values=values, rebuild=rebuild)


def to_raw(x: Any, where: str) -> RawArray:  # noqa: ANN401 - a torch.Tensor
    """Return the bytes of a tensor on any device."""
    _check_dense(x, where)
    dense = x.detach().to("cpu").resolve_neg().resolve_conj().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # a single value may have any stride
    return RawArray(
        library="torch",
        dtype=str(x.dtype).removeprefix("torch."),
        shape=tuple(x.shape),
        data=np.asarray(_Memory(flat.view(torch.uint8), np.dtype("uint8"))),
    )


def from_raw(dtype: str, shape: tuple[int, ...], data: Values, like: Any) -> object:  # noqa: ANN401
    """Return a tensor on the device of `like`, if that is one; on the CPU its memory is `data`.

    Read-only data are copied, as torch has no such tensors. Raises ProtocolError if torch has no
    such dtype, or the sizes do not fit.
    """
    found: Any = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ProtocolError(f"no torch tensor has the dtype {dtype!r}")
    check_size(data, found.itemsize, shape)
    if data.size:
        writable = data if data.flags.writeable else data.copy()
        fresh = torch.from_numpy(writable).view(found).reshape(shape)
    else:
        fresh = torch.empty(shape, dtype=found)
    return fresh.to(like.device) if isinstance(like, torch.Tensor) else fresh


class _Memory:
    """The memory of a tensor on the CPU, for numpy; it keeps the tensor alive.

    `Tensor.numpy` would fix the size of the storage forever, but FSDP resizes it.
    """

    def __init__(self, tensor: Any, dtype: "np.dtype[Any]") -> None:  # noqa: ANN401 - a torch.Tensor
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": dtype.str,
            "data": (tensor.data_ptr(), False),
            "strides": tuple(dtype.itemsize * stride for stride in tensor.stride()),
        }


def _check_dense(x: Any, where: str) -> None:  # noqa: ANN401 - a torch.Tensor
    if x.layout != torch.strided or x.is_quantized or x.device.type == "meta":
        raise UnsupportedArray(f"{where}only dense torch tensors with data are supported")
