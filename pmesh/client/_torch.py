"""torch tensors; the only file that knows torch, imported when the user has one.

torch is optional and not installed where this is checked, so it has no types here.
"""

import importlib
from typing import Any

import numpy as np

from pmesh.client.leaves import Leaf, check_dtype
from pmesh.core.reductions import Values
from pmesh.errors import UnsupportedArray

torch: Any = importlib.import_module("torch")


def describe(x: Any, where: str) -> Leaf:  # noqa: ANN401 - a torch.Tensor
    """A tensor on any device as numpy sees it; on the CPU without a copy.

    The result is a plain tensor on the same device, outside of autograd, also for a Parameter.
    """
    if x.layout != torch.strided or x.is_quantized or x.device.type == "meta":
        raise UnsupportedArray(f"{where}only dense torch tensors with data are supported")
    dtype = str(x.dtype).removeprefix("torch.")
    check_dtype(dtype, where)
    here = x.detach().to("cpu").resolve_neg()
    values = here.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else here.numpy()

    def rebuild(fresh: Values) -> object:
        if dtype == "bfloat16":
            return torch.from_numpy(fresh.view(np.int16)).view(torch.bfloat16).to(x.device)
        return torch.from_numpy(fresh).to(x.device)

    return Leaf(dtype=dtype, values=values, rebuild=rebuild)
