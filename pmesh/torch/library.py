"""torch; the only file of the backend that imports it.

It is optional and may not be installed where this is checked, so it has no types here.
"""

from importlib import import_module
from typing import Any, TypeAlias

torch: Any = import_module("torch")
dist: Any = import_module("torch.distributed")

Tensor: TypeAlias = Any
"""A torch.Tensor."""
Store: TypeAlias = Any
"""A torch.distributed.Store."""
TorchFuture: TypeAlias = Any
"""A torch.futures.Future."""
TorchOptions: TypeAlias = Any
"""What says how an op is to run: torch.distributed.AllreduceOptions and so on."""
