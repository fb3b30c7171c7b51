"""`torch.distributed` over pmesh: `torch.distributed.init_process_group("pmesh")`.

Importing this registers the backend for cpu, cuda and mps. Where pmesh is installed, torch imports
it by itself (its autoload, from torch 2.5 on).
"""

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pmesh.torch.options import Options

if TYPE_CHECKING:
    from pmesh.torch.process_group import ProcessGroup

__all__ = ["Options", "register"]

_DEVICES = ["cpu", "cuda", "mps"]


def register() -> None:
    """Register the backend; what importing this, and torch's autoload, do."""
    if not dist.is_available() or "PMESH" in dist.Backend._plugins:  # noqa: SLF001
        return
    from pmesh.torch.ranks import install_rendezvous  # noqa: PLC0415 - it needs torch.distributed

    dist.Backend.register_backend("pmesh", _create, extended_api=True, devices=_DEVICES)
    install_rendezvous()


def _create(backend_options: Any, pg_options: object) -> "ProcessGroup":  # noqa: ANN401 - torch's
    from pmesh.torch.creation import create  # noqa: PLC0415 - only who uses it pays for it

    return create(backend_options, pg_options)


register()
