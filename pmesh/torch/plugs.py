"""Extends modules of other libraries when a program imports them; it never imports them itself.

`import torch` imports this module wherever pmesh is installed, so it imports nothing slow.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any

_PLUGS = MappingProxyType(
    {
        "accelerate.state": "pmesh.torch.accelerate",
        "lightning.fabric.strategies": "pmesh.torch.lightning",
        "lightning.pytorch.strategies": "pmesh.torch.lightning",
        "lightning_fabric.strategies": "pmesh.torch.lightning",  # each is a package of its own, too
        "pytorch_lightning.strategies": "pmesh.torch.lightning",
    }
)
"""For each module of another library the module of ours whose `extend` is called with it."""


def install(plugs: Mapping[str, str] = _PLUGS) -> None:
    """Extend these modules: those that are imported now, the others when they are."""
    later: dict[str, str] = {}
    for theirs, ours in plugs.items():
        if theirs in sys.modules:
            _extend(sys.modules[theirs], ours)
        else:
            later[theirs] = ours
    sys.meta_path.insert(0, _PlugFinder(later))


class _PlugFinder(MetaPathFinder):
    """Finds each module as without it, and extends it when it has run."""

    def __init__(self, plugs: dict[str, str]) -> None:
        self._plugs = plugs

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        ours = self._plugs.pop(fullname, None)
        if ours is None:
            return None
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = _then_extend(loader.exec_module, ours)
        return spec


def _then_extend(execute: Callable[[ModuleType], None], ours: str) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        execute(module)
        _extend(module, ours)

    return exec_module


def _extend(module: ModuleType, ours: str) -> None:
    extension: Any = import_module(ours)
    extension.extend(module)
