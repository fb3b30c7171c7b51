"""The groups of the drop-in: what MLX's `Group` is, over a mesh or over a group of it."""

import atexit
import logging
import os
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import mlx.core as mx

from pmesh.client.calls.queue import Handle
from pmesh.client.group import Collectives, ranks_by_color
from pmesh.client.launched import Launch
from pmesh.client.mesh import Mesh
from pmesh.errors import PmeshError, RankLost, UsageError
from pmesh.ids import TrainerId

_logger = logging.getLogger("pmesh")

# As MLX has them, whatever takes their place later.
NativeGroup: TypeAlias = mx.distributed.Group
_native_init = mx.distributed.init
_native_is_available = mx.distributed.is_available

_PATIENCE_S = 60.0  # a receiver that is in the middle of a step comes within that
_OURS = ("any", "pmesh")  # what MLX would choose itself is ours to choose


class Group:
    """Some ranks, numbered from 0; `Group(mesh)` are all of a mesh.

    Its numbers are those of the start: they stay when a rank is lost, as a program that was not
    written for that expects. Sums then go over the ranks that are left.
    """

    def __init__(
        self, mesh: Collectives | None, *, whole: Mesh | None = None, compression: str = ""
    ) -> None:
        """A group of all ranks of `mesh`; None: of this process alone.

        Args:
            mesh: what its calls go through.
            whole: of which mesh it is a part; None: it is no part.
            compression: for `average_gradients`; empty: what the agent was started with.
        """
        self._mesh = mesh
        self._whole = mesh if whole is None and isinstance(mesh, Mesh) else whole
        self._rank = 0 if mesh is None else int(mesh.rank)
        self._trainers: tuple[TrainerId, ...] = () if mesh is None else mesh.trainers
        self._names = ("this machine",) if mesh is None else mesh.names
        self._sending: list[Handle[None]] = []
        self._warned = False
        self.compression = compression or None
        self.functions: dict[str, Callable[..., Any]] = {}
        """The differentiable functions of this group, each made when it is first called."""

    def __repr__(self) -> str:
        return f"<pmesh.mlx.Group, rank {self.rank()} of {self.size()}>"

    def rank(self) -> int:
        """The number of this process, the same until it ends."""
        return self._rank

    def size(self) -> int:
        """How many processes the group had when it was made."""
        return max(1, len(self._trainers))

    def split(self, color: int, key: int = -1) -> "Group":
        """The group of all ranks of this one that pass the same color; all of them must call it.

        Args:
            color: any whole number.
            key: the new group counts its ranks by this; below 0: as this group does.

        Raises:
            RankLost: a rank of this group is lost.
            PmeshError: what `Mesh.group` raises.
        """
        whole = self._whole
        if self._mesh is None or whole is None:
            return Group(None, compression=self.compression or "")
        self.check_complete("split")
        wish = [color, self._rank if key < 0 else key]
        choices = self.run(lambda mesh: mesh.all_gather_object(wish))
        mine = ranks_by_color(choices, color)
        made = whole.group([whole.trainers.index(self._trainers[rank]) for rank in mine])
        return Group(made, whole=whole, compression=self.compression or "")

    def run(self, call: "Callable[[Collectives], Any]") -> Any:  # noqa: ANN401 - what the call returns
        """Call the mesh, and warn if the rank that saves has been lost."""
        if self._mesh is None:
            raise UsageError("this process is alone: it has nobody to call")
        try:
            return call(self._mesh)
        finally:
            self._note_losses()

    def check_complete(self, what: str) -> None:
        """Raises RankLost if a call that needs the values of all ranks can't have them any more."""
        for rank, trainer in enumerate(self._trainers):
            if self._mesh is not None and trainer not in self._mesh.trainers:
                raise RankLost(
                    f"{what} needs all {self.size()} ranks that the program began with, and rank "
                    f"{rank} ({self._names[rank]}) is lost: start the program again"
                )

    def place_of(self, rank: int) -> int:
        """The number that the mesh has for a rank now; raises RankLost if it has none."""
        if self._mesh is None or self._trainers[rank] not in self._mesh.trainers:
            raise RankLost(f"rank {rank} ({self._names[rank]}) is lost")
        return self._mesh.trainers.index(self._trainers[rank])

    def note_sending(self, handle: Handle[None]) -> None:
        """Remember a message, for `close`; raises the error of one that has failed meanwhile."""
        done = [each for each in self._sending if each.done()]
        self._sending = [each for each in self._sending if each not in done]
        self._sending.append(handle)
        for each in done:
            each.result()

    def close(self, *, crashed: BaseException | None = None) -> None:
        """Leave the mesh once all messages have arrived, or in a minute; at once if `crashed`."""
        if self._mesh is None:
            return
        if crashed is not None and isinstance(self._mesh, Mesh):
            self._mesh.__exit__(type(crashed), crashed, crashed.__traceback__)
            return
        until = time.monotonic() + _PATIENCE_S
        for handle in self._sending:
            try:
                handle.wait(max(0.0, until - time.monotonic()))
            except PmeshError as e:
                _logger.warning("a message was not received: %s", e)
        self._mesh.close()

    def _note_losses(self) -> None:
        mesh = self._whole
        if mesh is None or mesh is not self._mesh or self._warned:
            return
        if self._trainers[0] not in mesh.trainers:
            self._warned = True
            _logger.warning(
                "rank 0 (%s) of this program is lost. The other ranks go on, but in a program for "
                "MLX mostly rank 0 alone saves: if this one does so too, nobody will save",
                self._names[0],
            )


_world: list[Group | NativeGroup] = []
"""The global group, once there is one."""


def init(
    strict: bool = False,  # noqa: FBT001, FBT002 - as MLX has it
    backend: str = "any",
    *,
    all_gather_factory: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
) -> Group | NativeGroup:
    """The global group: of the job that `pmesh mlx` names, else of this process alone.

    Args:
        strict: for a backend of MLX; a mesh that can't be joined is an error in any case.
        backend: "any" or "pmesh"; with another name MLX makes the group, and MLX alone serves it.
        all_gather_factory: for MLX's jaccl.
        mesh: becomes the global group, if there is none yet.

    Raises:
        AgentNotRunning: start one with `pmesh up`.
        PmeshError: what else `pmesh.connect` raises.
    """
    if backend not in _OURS:
        more = {} if all_gather_factory is None else {"all_gather_factory": all_gather_factory}
        native = _native_init(strict, backend, **more)
        if not _world and native.size() > 1:
            _world.append(native)  # as in MLX: the first that was made
        return native
    if not _world:
        _world.append(_launched() if mesh is None else Group(mesh))
    return _world[0]


def is_shared() -> bool:
    """Whether the global group has several ranks, or will have once it is made."""
    if _world:
        return isinstance(_world[0], Group) and _world[0].size() > 1
    launch = Launch.of(os.environ)
    return launch is not None and launch.wait_for > 1


def is_available(backend: str = "any") -> bool:
    """Whether `init` knows such a backend here."""
    return backend in _OURS or _native_is_available(backend)


def leave(*, crashed: BaseException | None = None) -> None:
    """Leave the job that `init` has joined, if it has; a program that ends does so by itself."""
    if _world and isinstance(_world[0], Group):
        _world[0].close(crashed=crashed)


def _launched() -> Group:
    launch = Launch.of(os.environ)
    if launch is None or launch.wait_for == 1:
        return Group(None)
    group = Group(launch.join(), compression=launch.compression)
    atexit.register(leave)
    return group
