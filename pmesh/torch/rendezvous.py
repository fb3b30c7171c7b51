"""How `init_process_group` finds ranks, size and store of the backend `pmesh`: in the mesh.

`import torch` imports this wherever pmesh is installed, so it imports nothing that takes time.
"""

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from types import FrameType
from typing import Any, TypeAlias, cast

Found: TypeAlias = Iterator[tuple[Any, int, int]]
"""A store, this rank, and how many there are."""

_NO_BACKEND = ("none", "undefined")  # what torch has there if its caller names none
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def install() -> None:
    """Let `pmesh://`, and `env://` for the backend `pmesh`, find their ranks in the mesh.

    `env://` is what torch uses where neither a store nor an init_method is given. Where a launcher
    has set RANK, WORLD_SIZE or MASTER_ADDR, as torchrun does, they hold for pmesh, too.
    """
    module = import_module("torch.distributed.rendezvous")
    handlers = cast("dict[str, Any]", vars(module)["_rendezvous_handlers"])
    of_torch = handlers["env"]

    def env(url: str, **named: Any) -> Found:  # noqa: ANN401 - torch's
        given = "?" in url or any(os.environ.get(name) for name in _OF_LAUNCHERS)
        wanted = str(argument_of_init("backend")).lower()
        if not given and ("pmesh" in wanted or (wanted in _NO_BACKEND and _is_elastic())):
            return of_mesh(url, **named)
        return cast("Found", of_torch(url, **named))

    handlers["env"] = env
    handlers["pmesh"] = of_mesh


def of_mesh(url: str, timeout: timedelta | None = None, **_: object) -> Found:
    """What torch calls for `init_method="pmesh://"`.

    Raises:
        DistBackendError: with the message of pmesh.
    """
    from pmesh.torch.ranks import meet  # noqa: PLC0415 - only who uses it pays for it

    del url
    yield meet(argument_of_init("pg_options"), timeout)


def _is_elastic() -> bool:
    """Whether a process group is to be refused; DeviceMesh and FSDP make one without a backend."""
    ranks: Any = sys.modules.get("pmesh.torch.ranks")
    return ranks is not None and ranks.WORLDS.elastic is not None


def argument_of_init(name: str) -> object:
    """An argument of the `init_process_group` that this is called from; None outside of one.

    torch hands a rendezvous neither the backend nor its options.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_name != "init_process_group":
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)
