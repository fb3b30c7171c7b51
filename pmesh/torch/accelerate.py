"""Accelerate over pmesh: which ranks there are, and on which device each of them computes.

Transformers' Trainer and TRL ask Accelerate, which derives the backend from the device. It knows no
other backend, and on MPS, or on a CPU that it was not told to use, it makes every process train
alone, without a word. It has no public seam for this, so one private method is replaced:
`PartialState._prepare_backend`, accelerate 1.15.0, `state.py`, line 755.
"""

import os
import sys
from datetime import timedelta
from functools import wraps
from importlib.metadata import version
from typing import Any

from pmesh.errors import UsageError
from pmesh.torch import plugs

TRIED = "1.15"
"""The minor version of accelerate in which the method is as it is here."""


def extend(module: Any) -> None:  # noqa: ANN401 - of accelerate
    """Replace the method that chooses the backend, in `accelerate.state`."""
    of_accelerate = module.PartialState._prepare_backend  # noqa: SLF001 - see above
    if getattr(of_accelerate, "of_pmesh", False):
        return

    @wraps(of_accelerate)
    def prepare_backend(
        state: Any,  # noqa: ANN401 - of accelerate
        cpu: bool = False,  # noqa: FBT001, FBT002 - as there
        sagemaker_dp: bool = False,  # noqa: FBT001, FBT002 - as there
        backend: str | None = None,
    ) -> Any:  # noqa: ANN401 - of accelerate
        if _is_elastic(backend):
            check_version(version("accelerate"))
            os.environ.pop("LOCAL_RANK", None)  # for which Accelerate begins a process group
            return None, module.DistributedType.NO
        if not _is_ours(backend):
            theirs = of_accelerate(state, cpu, sagemaker_dp, backend)
            if theirs[1] == module.DistributedType.NO:
                _check_alone(backend)
            return theirs
        check_version(version("accelerate"))
        backend = backend or "pmesh"  # Accelerate insists on the one that it was asked for
        frame = sys._getframe(1)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        # `PartialState.__init__` passes it on too late, when the process group is there.
        _begin(backend, frame.f_locals.get("kwargs", {}).get("timeout"))
        return backend, _kind_of_job(state, module.DistributedType, cpu=cpu)

    prepare_backend.of_pmesh = True  # type: ignore[attr-defined]
    module.PartialState._prepare_backend = prepare_backend  # noqa: SLF001 - see above


def _is_elastic(backend: str | None) -> bool:
    """Whether an ElasticTrainer of this program is to see one process, and does the rest."""
    return backend is None and "pmesh.torch.elastic_trainer" in sys.modules


def _is_ours(backend: str | None) -> bool:
    """Whether the caller asks for pmesh, or leaves it open in a program that several ranks run.

    With `pmesh run --backend pmesh` it asks for pmesh also by another name.
    """
    from pmesh.torch.backends import is_answered  # noqa: PLC0415 - after torch
    from pmesh.torch.library import dist  # noqa: PLC0415 - after torch

    if backend is not None:
        return "pmesh" in backend or is_answered(backend)
    return "pmesh" in dist.get_backend() if dist.is_initialized() else _has_others()


def _has_others() -> bool:
    return os.environ.get("PMESH_WAIT_FOR", "1") != "1"


def _check_alone(backend: str | None) -> None:
    """Raise UsageError if Accelerate would train alone on each of several ranks."""
    from pmesh.torch.library import dist  # noqa: PLC0415 - after torch

    if _has_others() or (dist.is_initialized() and "pmesh" in dist.get_backend()):
        raise UsageError(
            f"this is one of several ranks, and over {backend or dist.get_backend()!r} Accelerate "
            "would train on each of them alone: name no backend, or start the script by "
            "'pmesh run --backend pmesh'"
        )


def check_version(found: str) -> None:
    """Raise UsageError for an accelerate whose method was never compared with ours.

    >>> check_version("1.15.3")
    """
    if found.split(".")[:2] != TRIED.split("."):
        raise UsageError(
            f"pmesh has never been tried with accelerate {found}, of which it replaces a private "
            f"method, and without it each machine would train alone: pip install "
            f"'accelerate=={TRIED}.*'"
        )


def _begin(backend: str, timeout: timedelta | None) -> None:
    """Begin the default process group, if the program has not."""
    from pmesh.torch.library import dist  # noqa: PLC0415 - after torch

    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timeout)


def _kind_of_job(state: Any, kinds: Any, *, cpu: bool) -> object:  # noqa: ANN401 - of accelerate
    """Set the device, and return Accelerate's kind of job.

    MULTI_CPU wraps a model in DistributedDataParallel without device numbers, as MPS needs it, too.
    """
    from pmesh.torch.library import torch  # noqa: PLC0415 - after torch

    # Not when torch is imported: this module imports torch, and has not run to its end then.
    plugs.install({"transformers.trainer": "pmesh.torch.transformers"})
    if torch.cuda.is_available() and not cpu:
        return kinds.MULTI_GPU
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise UsageError(
            "Accelerate shards a model (FSDP) on CUDA only, and would keep all of it on each rank "
            "here: leave FSDP out, or shard it by fully_shard of torch"
        )
    if state.device is None:
        state.device = torch.device("cpu") if cpu else state.default_device
    return kinds.MULTI_CPU
