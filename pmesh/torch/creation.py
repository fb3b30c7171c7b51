"""Makes process groups of the backend `pmesh`; torch calls `create`."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pmesh.errors import PmeshError, UsageError
from pmesh.torch.library import Store, dist
from pmesh.torch.options import options_of
from pmesh.torch.process_group import ProcessGroup
from pmesh.torch.ranks import WORLDS, World, world_of


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
    world: World, ranks: Sequence[int], store: Store, rank: int, *, timeout: timedelta, name: str
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
