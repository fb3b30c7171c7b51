"""`pmesh run --backend pmesh`: a script that asks torch for gloo or nccl trains over pmesh."""

import importlib
import os
import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from pmesh.torch.options import Options

_ANSWERED = frozenset({"gloo", "nccl"})
_MODULES = (
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.distributed.device_mesh",
)


def answer_for_others() -> None:
    """Give process groups the backend pmesh where the script leaves it open, or names another."""
    modules = [importlib.import_module(name) for name in _MODULES]
    for name in ("init_process_group", "new_group"):
        ours = _answering(getattr(modules[0], name))
        for module in modules:
            if hasattr(module, name):
                setattr(module, name, ours)


def _answering(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(of_torch)

    @wraps(of_torch)
    def make_group(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - torch's
        bound = parameters.bind(*arguments, **named)
        asked = bound.arguments.get("backend")
        if asked is None or backends_in(asked) <= _ANSWERED:
            bound.arguments["backend"] = "pmesh"
            _tell(asked)
            if not isinstance(bound.arguments.get("pg_options"), Options):
                bound.arguments["pg_options"] = None  # of the other backend
        return of_torch(*bound.args, **bound.kwargs)

    make_group.of_pmesh = True  # type: ignore[attr-defined]
    return make_group


def is_answered(backend: str) -> bool:
    """Whether pmesh answers a script that names this backend, as `--backend pmesh` says."""
    make_group = importlib.import_module("torch.distributed").init_process_group
    return getattr(make_group, "of_pmesh", False) and backends_in(backend) <= _ANSWERED


def backends_in(asked: str) -> frozenset[str]:
    """Return the backends that a script names.

    >>> sorted(backends_in("cpu:gloo,cuda:nccl"))
    ['gloo', 'nccl']
    >>> sorted(backends_in("GLOO"))
    ['gloo']
    """
    return frozenset(part.rpartition(":")[2] for part in asked.lower().split(","))


_told: set[str] = set()


def _tell(asked: str | None) -> None:
    if asked is not None and asked not in _told and os.environ.get("RANK", "0") == "0":
        _told.add(asked)
        sys.stderr.write(f"pmesh: answers for the backend {asked!r}, as --backend pmesh says\n")
