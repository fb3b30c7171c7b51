"""`torch.distributed` over pmesh: `torch.distributed.init_process_group("pmesh")`.

Importing this module registers the backend for cpu, cuda and mps. From torch 2.5 on, `import torch`
imports it wherever pmesh is installed (autoload), so a script changes one word. Since it runs in
every program with torch, it imports no library but torch, reads no file, and never fails.
"""

import logging
import os
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pmesh.torch.batch_norm import SyncBatchNorm
    from pmesh.torch.data_parallel import DistributedDataParallel, compression_hook
    from pmesh.torch.elastic import init, sync
    from pmesh.torch.elastic_trainer import ElasticTrainer
    from pmesh.torch.objects import all_gather_object, broadcast_object
    from pmesh.torch.options import Options
    from pmesh.torch.process_group import ProcessGroup
    from pmesh.torch.reports import report
    from pmesh.torch.sampler import DistributedBatchSampler

__all__ = [
    "DistributedBatchSampler",
    "DistributedDataParallel",
    "ElasticTrainer",
    "Options",
    "SyncBatchNorm",
    "all_gather_object",
    "broadcast_object",
    "compression_hook",
    "init",
    "register",
    "report",
    "sync",
]

_DEVICES = ["cpu", "cuda", "mps"]
_LATER = MappingProxyType(
    {
        "DistributedBatchSampler": "pmesh.torch.sampler",
        "DistributedDataParallel": "pmesh.torch.data_parallel",
        "ElasticTrainer": "pmesh.torch.elastic_trainer",
        "Options": "pmesh.torch.options",
        "SyncBatchNorm": "pmesh.torch.batch_norm",
        "all_gather_object": "pmesh.torch.objects",
        "broadcast_object": "pmesh.torch.objects",
        "compression_hook": "pmesh.torch.data_parallel",
        "init": "pmesh.torch.elastic",
        "report": "pmesh.torch.reports",
        "sync": "pmesh.torch.elastic",
    }
)


_failures: list[Exception] = []


def register() -> None:
    """Register the backend, once. Importing this module does it, and so does torch's autoload.

    An error is only logged as a warning: raised, it would end `import torch` in programs that never
    use pmesh. `warnings.warn` would not do, since it raises under `python -W error`.
    """
    import_module("torch")  # completely, before our modules: its autoload calls this too
    try:
        _register()
    except Exception as e:  # noqa: BLE001 - whatever it is, it is reported once
        if not _failures:
            logging.getLogger("pmesh").warning(
                "torch.distributed has no backend 'pmesh' in this program: %s: %s; install pmesh "
                "again, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0",
                type(e).__name__,
                e,
            )
        _failures.append(e)


def _register() -> None:
    from pmesh.torch.library import dist  # noqa: PLC0415 - `Options` alone needs no torch

    if not dist.is_available() or "PMESH" in dist.Backend._plugins:  # noqa: SLF001
        return
    from pmesh.torch import plugs, rendezvous  # noqa: PLC0415 - need torch.distributed

    dist.Backend.register_backend("pmesh", _create, extended_api=True, devices=_DEVICES)
    rendezvous.install()
    plugs.install()
    if os.environ.get("PMESH_BACKEND") == "pmesh":
        from pmesh.torch.backends import answer_for_others  # noqa: PLC0415 - few programs ask for it

        answer_for_others()


def _create(backend_options: Any, pg_options: object) -> "ProcessGroup":  # noqa: ANN401 - torch's
    from pmesh.torch.ranks import create  # noqa: PLC0415 - imported when it is used

    return create(backend_options, pg_options)


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


register()
