"""`torch.distributed` over pmesh: `torch.distributed.init_process_group("pmesh")`.

Importing this registers the backend for cpu, cuda and mps. Where pmesh is installed, `import torch`
imports it by itself (torch's autoload, from torch 2.5 on), so a script changes one word. So it runs
in every program with torch: it imports no library but torch, reads no file, and never fails.
"""

import logging
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pmesh.torch.compression import compression_hook
    from pmesh.torch.data_parallel import DistributedDataParallel
    from pmesh.torch.elastic import init, sync
    from pmesh.torch.objects import all_gather_object, broadcast_object
    from pmesh.torch.options import Options
    from pmesh.torch.process_group import ProcessGroup

__all__ = [
    "DistributedDataParallel",
    "Options",
    "all_gather_object",
    "broadcast_object",
    "compression_hook",
    "init",
    "register",
    "sync",
]

_DEVICES = ["cpu", "cuda", "mps"]
_LATER = MappingProxyType(
    {
        "DistributedDataParallel": "pmesh.torch.data_parallel",
        "Options": "pmesh.torch.options",
        "all_gather_object": "pmesh.torch.objects",
        "broadcast_object": "pmesh.torch.objects",
        "compression_hook": "pmesh.torch.compression",
        "init": "pmesh.torch.elastic",
        "sync": "pmesh.torch.elastic",
    }
)


_failures: list[Exception] = []


def register() -> None:
    """Register the backend, once; what importing this, and torch's autoload, do.

    An error is a warning, as it would end `import torch` in programs that never use pmesh. The
    logger says it: a warning of Python's is an error under `python -W error`.
    """
    import_module("torch")  # the whole of it, before a module of ours: its autoload calls this too
    try:
        _register()
    except Exception as e:  # noqa: BLE001 - whatever it is, and once
        if not _failures:
            logging.getLogger("pmesh").warning(
                "torch.distributed has no backend 'pmesh' in this program: %s: %s; install pmesh "
                "again, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0",
                type(e).__name__,
                e,
            )
        _failures.append(e)


def _register() -> None:
    from pmesh.torch.library import dist  # noqa: PLC0415 - who only wants options needs no torch

    if not dist.is_available() or "PMESH" in dist.Backend._plugins:  # noqa: SLF001
        return
    from pmesh.torch.rendezvous import install  # noqa: PLC0415 - where torch has been built with it

    dist.Backend.register_backend("pmesh", _create, extended_api=True, devices=_DEVICES)
    install()


def _create(backend_options: Any, pg_options: object) -> "ProcessGroup":  # noqa: ANN401 - torch's
    from pmesh.torch.creation import create  # noqa: PLC0415 - only who uses it pays for it

    return create(backend_options, pg_options)


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


register()
