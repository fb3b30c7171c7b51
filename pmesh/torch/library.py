"""The only file of the backend that imports torch.

torch is optional and may be missing where the types are checked, so it has no types here.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeAlias

torch: Any = import_module("torch")
dist: Any = import_module("torch.distributed")

Tensor: TypeAlias = Any
"""A torch.Tensor."""
TensorList: TypeAlias = Sequence[Tensor]
TorchStore: TypeAlias = Any
"""A torch.distributed.Store."""
TorchFuture: TypeAlias = Any
"""A torch.futures.Future."""
TorchOptions: TypeAlias = Any
"""The options of an op: torch.distributed.AllreduceOptions and so on."""
