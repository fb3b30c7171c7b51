"""Joins a mesh for `torch.distributed`, maps its ranks to those of the mesh, and makes groups."""

import atexit
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet

from pmesh.client.calls.queue import Line
from pmesh.client.connect import connect
from pmesh.client.group import Collectives
from pmesh.client.mesh import Mesh
from pmesh.errors import PmeshError, UsageError
from pmesh.torch.library import TorchStore, dist
from pmesh.torch.options import Options, options_of
from pmesh.torch.process_group import ProcessGroup
from pmesh.torch.rendezvous import place_in_launch
from pmesh.torch.store import MeshStore

T = TypeVar("T")

_JOIN_S = 300.0  # as `pmesh.connect` waits by default


@dataclass(frozen=True, slots=True)
class TorchWorld:
    """The mesh under the default process group."""

    mesh: Mesh
    order: tuple[int, ...]
    """The mesh's rank for each rank of torch."""

    def of(self, ranks: list[int]) -> Collectives:
        """Return the collectives of these ranks of torch; of all ranks if the list is empty."""
        named = [self.order[rank] for rank in ranks or range(len(self.order))]
        if not ranks and named == sorted(named):
            return self.mesh
        group = self.mesh.group(named)
        if group is None:
            raise UsageError(f"this rank is none of the ranks {ranks}")
        return group

    def environment(self, rank: int) -> dict[str, str]:
        """Return variables that torchrun sets; accelerate and transformers read them."""
        hosts = [self.mesh.names[each] for each in self.order]
        here = hosts[rank]
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "LOCAL_RANK": str(hosts[:rank].count(here)),
            "LOCAL_WORLD_SIZE": str(hosts.count(here)),
            "GROUP_RANK": str(list(dict.fromkeys(hosts)).index(here)),
            "MASTER_ADDR": hosts[0],  # of which accelerate wants some on several machines
        }


class BackwardLine(Line):
    """Runs the ops of the backward passes of all models, in order, while the rank computes."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._place = mesh._place  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    def submit(self, run: Callable[[], T]) -> "Future[T]":
        """Run it as `Line.submit` does."""

        def run_beside() -> T:
            try:
                return run()
            finally:
                self._place.end_beside()

        self._place.begin_beside()
        return super().submit(run_beside)


@dataclass(slots=True)
class Elastic:
    """The job of a program whose number of ranks may change."""

    mesh: Mesh
    line: Line
    ranks: int
    """With how many the job begins."""
    models: int = 0
    """The number of wrapped models; each has a number, the same on every rank."""
    synced: "WeakSet[Any]" = field(default_factory=WeakSet[Any])
    """The modules whose weights are the same on all ranks."""

    def number_of_next_model(self) -> int:
        """Count a new model, and return its number."""
        self.models += 1
        return self.models

    def finish_ops(self) -> None:
        """Wait for the ops of a backward pass that was abandoned."""
        self.line.submit(lambda: None).result()

    def end(self) -> None:
        """Leave the job, and end its threads."""
        self.mesh.close()
        self.line.end()
        self.line.join()


class Worlds:
    """The world of this process, from the rendezvous to `destroy_process_group`."""

    def __init__(self) -> None:
        self.current: TorchWorld | None = None
        self.elastic: Elastic | None = None
        self._waiting: TorchWorld | None = None
        self._store: MeshStore | None = None
        """Kept: torch forgets the Python class of an object that only C++ refers to."""
        self._begun = 0
        self._variables: dict[str, str] = {}
        """The environment variables that `begin` has set."""
        atexit.register(self._end_with_the_program)

    def meet(self, options: Options, timeout: timedelta | None) -> tuple[MeshStore, int, int]:
        """Join the job; return the store, this rank and the number of ranks.

        Raises:
            UsageError: the program is elastic, the job runs already, or the ranks differ in their
                number of ranks.
            PmeshError: as for `pmesh.connect`.
        """
        self.check_not_elastic()
        self.end()
        self._begun += 1
        suffix = "" if self._begun == 1 else f".{self._begun}"
        count = options.ranks()
        mesh = _connected(options.job_name() + suffix, count, options, timeout)
        place = place_in_launch() if count == mesh.size else None
        theirs = mesh.all_gather_object([count, -1 if place is None else place])
        counts, places = zip(*theirs, strict=True)
        if set(counts) != {mesh.size}:
            mesh.close()
            raise UsageError(
                f"{mesh.size} ranks have met, which wait for {list(counts)}: PMESH_WAIT_FOR"
            )
        numbered = set(places) != {-1}
        if numbered and len({*places} - {-1}) < mesh.size:
            mesh.close()
            raise UsageError(
                f"the ranks do not fit together: 'pmesh run' has numbered them {list(places)}, "
                "where -1 is one that it has not started; start all of them by one command"
            )
        order = sorted(range(mesh.size), key=places.__getitem__)
        self._waiting = TorchWorld(mesh, tuple(order))
        self._store = MeshStore(mesh.store, "torch/")
        return self._store, self._waiting.order.index(mesh.rank), mesh.size

    def begin(
        self,
        store: TorchStore,
        rank: int,
        size: int,
        options: Options,
        timeout: timedelta | None,
    ) -> TorchWorld:
        """Return the world of a default group, whose ranks come from `meet` or from torch."""
        if self._waiting is not None:
            self.current, self._waiting = self._waiting, None
        else:
            self.check_not_elastic()
            _check_launcher(size)
            self.end()
            self.current = world_of(store, rank, size, options, timeout)
        known = self.current.environment(rank)
        self._variables = {name: known[name] for name in known if name not in os.environ}
        os.environ.update(self._variables)
        return self.current

    def begin_elastic(self, mesh: Mesh, ranks: int) -> None:
        """Begin a job whose number of ranks may change, with so many."""
        self.elastic = Elastic(mesh, BackwardLine(mesh), ranks)

    def check_not_elastic(self) -> None:
        """Raise UsageError in an elastic program, which can have no process group."""
        if self.elastic is not None:
            raise UsageError(
                "this program has called pmesh.torch.init(elastic=True), and a process group has "
                "a fixed number of ranks, as have DistributedDataParallel of torch, FSDP, "
                "DeviceMesh and DTensor. Call mesh.all_reduce and so on, and wrap the model in "
                "pmesh.torch.DistributedDataParallel; or leave pmesh.torch.init out, and a lost "
                "rank ends the training"
            )

    def end(self) -> None:
        """Leave the job, if there is one."""
        if self.elastic is not None:
            self.elastic.end()
        if self._waiting is not None:
            self._waiting.mesh.close()
        if self.current is not None:
            self.current.mesh.close()
        self._waiting = self.current = self.elastic = None
        for name in self._variables:
            os.environ.pop(name, None)  # else the next group would think that a launcher set them
        self._variables = {}

    def _end_with_the_program(self) -> None:
        """Leave the job; if the script ended by an exception, report a crash of its rank."""
        error: BaseException | None = getattr(sys, "last_exc", None) or getattr(
            sys, "last_value", None
        )
        world = self.current or self.elastic
        if world is not None and error is not None:
            world.mesh.__exit__(type(error), error, None)
        self.end()


def _check_launcher(size: int) -> None:
    """Raise UsageError if another launcher knows fewer ranks than wait for each other."""
    ranks = os.environ.get("PMESH_WAIT_FOR", "")
    launched = os.environ.get("WORLD_SIZE")
    if launched == str(size) and ranks.isdecimal() and size < int(ranks):
        raise UsageError(
            f"a launcher such as torchrun has set WORLD_SIZE={launched}, and PMESH_WAIT_FOR is "
            f"{ranks}: the others would be missing; start the script by 'pmesh run' without the "
            "other launcher"
        )


def world_of(
    store: TorchStore, rank: int, size: int, options: Options, timeout: timedelta | None
) -> TorchWorld:
    """Return the world of ranks that torch has numbered, which meet through torch's store.

    Raises:
        UsageError: the ranks do not fit together, or the job runs already.
        PmeshError: as for `pmesh.connect`.
    """
    if rank == 0:
        store.set("pmesh/job", f"{options.job_name()[:32]}.{secrets.token_hex(6)}")
    job = store.get("pmesh/job").decode()
    mesh = _connected(job, size, options, timeout)
    theirs = mesh.all_gather_object([rank, size])
    if sorted(theirs) != [[each, mesh.size] for each in range(mesh.size)]:
        mesh.close()
        raise UsageError(
            f"the ranks do not fit together: they are given as [rank, world_size] {theirs}"
        )
    return TorchWorld(mesh, tuple(theirs.index([each, size]) for each in range(size)))


WORLDS = Worlds()


def _connected(job: str, size: int, options: Options, timeout: timedelta | None) -> Mesh:
    mesh = connect(
        job,
        wait_for=size,
        timeout_s=min(timeout.total_seconds(), _JOIN_S) if timeout else _JOIN_S,
        home=options.home,
        on_loss="raise",
        quorum=options.quorum,
        on_superseded="raise",
    )
    if mesh.rank < 0:
        mesh.close()
        raise UsageError(
            f"the job {job!r} runs already; torch fixes the number of ranks at the start: "
            "end the job's scripts everywhere, then start all of them"
        )
    return mesh


def meet(pg_options: object, timeout: timedelta | None) -> tuple[MeshStore, int, int]:
    """Call `WORLDS.meet`. Raises DistBackendError with the message of pmesh."""
    try:
        return WORLDS.meet(options_of(pg_options), timeout)
    except PmeshError as e:
        raise dist.DistBackendError(f"{type(e).__name__}: {e}") from e


def create(backend_options: Any, pg_options: object) -> ProcessGroup:  # noqa: ANN401 - torch's
    """Return the process group that torch describes; for the default group, join the job first.

    Raises:
        DistBackendError: pmesh raised an error, whose message this has.
    """
    options = options_of(pg_options)
    ranks = list(backend_options.global_ranks_in_group)
    store, timeout = backend_options.store, backend_options.timeout
    rank, size = backend_options.group_rank, backend_options.group_size
    name = backend_options.group_id
    try:
        if not ranks:
            WORLDS.begin(store, rank, size, options, timeout)
        elif WORLDS.current is None:  # the default group has another backend
            world = world_of(store, rank, size, options, timeout)
            return _group_in(world, [], store, rank, timeout=timeout, name=name)
        if WORLDS.current is None:
            raise UsageError("the default process group has ended")
        return _group_in(WORLDS.current, ranks, store, rank, timeout=timeout, name=name)
    except PmeshError as e:
        raise dist.DistBackendError(f"{type(e).__name__}: {e}") from e


def _group_in(
    world: TorchWorld,
    ranks: Sequence[int],
    store: TorchStore,
    rank: int,
    *,
    timeout: timedelta,
    name: str,
) -> ProcessGroup:
    """Return a group of these ranks of the world; without ranks, the group that owns the world."""
    calls = world.of(list(ranks))

    def split(chosen: Sequence[int]) -> ProcessGroup | None:
        if rank not in chosen:
            return None
        named = [ranks[each] if ranks else each for each in chosen]
        prefix = dist.PrefixStore(f"{name}:{named}", store)
        place = list(chosen).index(rank)
        return _group_in(world, named, prefix, place, timeout=timeout, name="")

    end = calls.close
    if not ranks:
        end = WORLDS.end if world is WORLDS.current else world.mesh.close
    return ProcessGroup(
        calls, store, rank, calls.size, timeout=timeout, name=name, split=split, end=end
    )
