"""The groups of the drop-in: MLX's `Group` over a mesh, or over a group of a mesh."""

import atexit
import logging
import os
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import mlx.core as mx

from pmesh.client.calls.queue import Handle
from pmesh.client.group import Collectives, ranks_by_color
from pmesh.client.mesh import Mesh
from pmesh.errors import PmeshError, RankLost, UsageError
from pmesh.ids import TrainerId
from pmesh.launches.client.launched import MLXLaunch

_logger = logging.getLogger("pmesh")

# MLX's own functions, which `program` replaces later.
NativeGroup: TypeAlias = mx.distributed.Group
_native_init = mx.distributed.init
_native_is_available = mx.distributed.is_available

_PATIENCE_S = 60.0  # a receiver that is in the middle of a step receives within this time
_OURS = ("any", "pmesh")  # where MLX would choose a backend, we choose pmesh


class Group:
    """Some ranks, numbered from 0; `Group(mesh)` has all ranks of a mesh.

    The numbers never change, not even when a rank is lost: programs for MLX expect that. Sums then
    are over the remaining ranks.
    """

    def __init__(
        self, mesh: Collectives | None, *, whole: Mesh | None = None, compression: str = ""
    ) -> None:
        """Make a group of all ranks of `mesh`, or of this process alone if it is None.

        Args:
            mesh: the mesh, or the group of a mesh, that runs the calls.
            whole: the mesh that `mesh` is a group of; None if it is not a group.
            compression: the scheme for `average_gradients`; if empty, the agent's.
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
        """This group's differentiable functions, each made at its first call."""

    def __repr__(self) -> str:
        return f"<pmesh.mlx.Group, rank {self.rank()} of {self.size()}>"

    def rank(self) -> int:
        """Return the number of this process, which never changes."""
        return self._rank

    def size(self) -> int:
        """Return the number of processes that the group had when it was made."""
        return max(1, len(self._trainers))

    def split(self, color: int, key: int = -1) -> "Group":
        """Return a group of the ranks that pass the same color; all ranks of this group must call.

        Args:
            color: any whole number.
            key: ranks of the new group are ordered by this; if negative, as in this group.

        Raises:
            RankLost: a rank of this group is lost.
            PmeshError: as for `Mesh.group`.
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
        """Run `call` with the mesh, and warn once if rank 0 is lost."""
        if self._mesh is None:
            raise UsageError("this process is alone: it has nobody to call")
        try:
            return call(self._mesh)
        finally:
            self._note_losses()

    def check_complete(self, what: str) -> None:
        """Raise RankLost if a rank is lost: the call `what` needs the values of all ranks."""
        for rank, trainer in enumerate(self._trainers):
            if self._mesh is not None and trainer not in self._mesh.trainers:
                raise RankLost(
                    f"{what} needs all {self.size()} ranks that the program began with, and rank "
                    f"{rank} ({self._names[rank]}) is lost: start the program again"
                )

    def place_of(self, rank: int) -> int:
        """Return the mesh's present number of a rank. Raises RankLost if the rank is lost."""
        if self._mesh is None or self._trainers[rank] not in self._mesh.trainers:
            raise RankLost(f"rank {rank} ({self._names[rank]}) is lost")
        return self._mesh.trainers.index(self._trainers[rank])

    def note_sending(self, handle: Handle[None]) -> None:
        """Keep a message's handle for `close`. Raises the error of an earlier message."""
        done = [each for each in self._sending if each.done()]
        self._sending = [each for each in self._sending if each not in done]
        self._sending.append(handle)
        for each in done:
            each.result()

    def close(self, *, crashed: BaseException | None = None) -> None:
        """Leave once all messages have arrived, after a minute at most; at once if `crashed`."""
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
"""The global group, if it has been made."""


def init(
    strict: bool = False,  # noqa: FBT001, FBT002 - as MLX has it
    backend: str = "any",
    *,
    all_gather_factory: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
) -> Group | NativeGroup:
    """Return the global group: of the job that `pmesh mlx` names, or else of this process alone.

    Args:
        strict: passed on to MLX's backends; a mesh that can't be joined is always an error.
        backend: "any" or "pmesh"; with another name MLX makes the group and runs its calls.
        all_gather_factory: passed on to MLX's backend jaccl.
        mesh: becomes the global group, if there is none yet.

    Raises:
        AgentNotRunning: there is no agent; start one with `pmesh up`.
        PmeshError: as for `pmesh.connect`.
    """
    if backend not in _OURS:
        more = {} if all_gather_factory is None else {"all_gather_factory": all_gather_factory}
        native = _native_init(strict, backend, **more)
        if not _world and native.size() > 1:
            _world.append(native)  # as in MLX, the first group is the global one
        return native
    if not _world:
        _world.append(_launched() if mesh is None else Group(mesh))
    return _world[0]


def is_shared() -> bool:
    """Return True if the global group has several ranks, or will have them once it is made."""
    if _world:
        return isinstance(_world[0], Group) and _world[0].size() > 1
    launch = MLXLaunch.of(os.environ)
    return launch is not None and launch.wait_for > 1


def is_available(backend: str = "any") -> bool:
    """Return True if `init` can use this backend here."""
    return backend in _OURS or _native_is_available(backend)


def leave(*, crashed: BaseException | None = None) -> None:
    """Leave the job if `init` has joined one. This also runs when the program ends."""
    if _world and isinstance(_world[0], Group):
        _world[0].close(crashed=crashed)


def _launched() -> Group:
    launch = MLXLaunch.of(os.environ)
    if launch is None or launch.wait_for == 1:
        return Group(None)
    group = Group(launch.join(), compression=launch.compression)
    atexit.register(leave)
    return group
