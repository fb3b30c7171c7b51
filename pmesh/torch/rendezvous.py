"""The rendezvous of `init_process_group`: it gets rank, size and store from the mesh.

`import torch` imports this module wherever pmesh is installed, so it imports nothing slow.
"""

import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from types import FrameType, TracebackType
from typing import Any, TypeAlias, cast
from urllib.parse import parse_qsl, urlsplit

RendezvousResult: TypeAlias = Iterator[tuple[Any, int, int]]
"""A store, this rank, and the number of ranks."""

Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]
"""The type of `sys.excepthook`."""

_NO_BACKEND = ("none", "undefined")  # torch's value if the caller names no backend
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
_ALL_OF_LAUNCHERS = (*_OF_LAUNCHERS, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_OF_PMESH = ("PMESH_JOB", "PMESH_WAIT_FOR")


def install() -> None:
    """Let `pmesh://`, and `env://` for the backend `pmesh`, find their ranks in the mesh.

    torch uses `env://` if neither a store nor an init_method is given. If another launcher, such as
    torchrun, has set RANK, WORLD_SIZE or MASTER_ADDR, pmesh uses them too.
    """
    module = import_module("torch.distributed.rendezvous")
    handlers = cast("dict[str, Any]", vars(module)["_rendezvous_handlers"])
    of_torch = handlers["env"]

    def env(url: str, **named: Any) -> RendezvousResult:  # noqa: ANN401 - torch's
        wanted = str(argument_of_init("backend")).lower()
        ours = "pmesh" in wanted or (wanted in _NO_BACKEND and _is_elastic())
        if ours and (_is_of_launch(url) or not _is_given(url)):
            return of_mesh(url, **named)
        if place_in_launch() == 0 and not ours:
            sys.stderr.write(
                f"pmesh: this script asks for torch's backend {wanted!r}, so its data go around "
                "pmesh, not encrypted; with 'pmesh run --backend pmesh' pmesh answers for it\n"
            )
        return _of_torch(cast("RendezvousResult", of_torch(url, **named)))

    handlers["env"] = env
    handlers["pmesh"] = of_mesh
    sys.excepthook = _with_hint(sys.excepthook)


def _is_given(url: str) -> bool:
    """Whether the caller or a launcher says where ranks meet, or what number this one has."""
    return "?" in url or any(os.environ.get(name) for name in _OF_LAUNCHERS)


def _is_of_launch(url: str) -> bool:
    """Whether `pmesh run --on` has numbered the ranks, and the caller asks for no other number."""
    asked = dict(parse_qsl(urlsplit(url).query))
    known = {"rank": os.environ.get("RANK"), "world_size": os.environ.get("WORLD_SIZE")}
    return place_in_launch() is not None and asked in ({}, known)


def _of_torch(found: RendezvousResult) -> RendezvousResult:
    """Run torch's own `env://`, and add a hint to its error about a missing variable."""
    try:
        yield from found
    except ValueError as e:
        name = next((each for each in _ALL_OF_LAUNCHERS if f" {each} " in str(e)), None)
        hint = _hint(name)
        if hint is None:
            raise
        raise ValueError(f"{e}. {hint}") from None


def _with_hint(before: Hook) -> Hook:
    """Return a hook that also hints when a script reads a launcher's variable that is not set."""

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, error, traceback)
        missing = error.args[0] if isinstance(error, KeyError) and error.args else None
        hint = _hint(missing if missing in _ALL_OF_LAUNCHERS else None)
        if hint is not None:
            sys.stderr.write(f"pmesh: {hint}\n")

    return hook


def _hint(missing: str | None) -> str | None:
    """Return what to do about a missing variable; None if the script does not use pmesh."""
    if missing is None or missing in os.environ or not any(map(os.environ.get, _OF_PMESH)):
        return None
    found_by_pmesh = "" if missing.startswith("MASTER_") else " and sets this variable"
    return (
        f"Nothing has set {missing}. init_process_group('pmesh') finds the ranks in the mesh"
        f"{found_by_pmesh}. For a script of another backend, 'pmesh run --on all' "
        "sets RANK, WORLD_SIZE, MASTER_ADDR and so on"
    )


def of_mesh(url: str, timeout: timedelta | None = None, **_: object) -> RendezvousResult:
    """Yield store, rank and size from the mesh. torch calls this for `init_method="pmesh://"`.

    Raises:
        DistBackendError: pmesh raised an error, whose message this has.
    """
    from pmesh.torch.ranks import meet  # noqa: PLC0415 - imported when it is used

    del url
    yield meet(argument_of_init("pg_options"), timeout)


def place_in_launch() -> int | None:
    """Return the rank that `pmesh run --on` has given this process; None outside of it.

    A launcher that was started by ours has replaced the variables by its own.
    """
    of_torch = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    of_pmesh = os.environ.get("PMESH_PLACE"), os.environ.get("PMESH_WAIT_FOR")
    return int(of_torch[0]) if of_torch[0] and of_torch == of_pmesh else None


def _is_elastic() -> bool:
    """True if a process group must be refused; DeviceMesh and FSDP make one without a backend."""
    ranks: Any = sys.modules.get("pmesh.torch.ranks")
    return ranks is not None and ranks.WORLDS.elastic is not None


def argument_of_init(name: str) -> object:
    """Return an argument of the calling `init_process_group`; None outside of one.

    torch does not pass the backend and its options to a rendezvous.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_name != "init_process_group":
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)
