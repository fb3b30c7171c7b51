"""What torch calls to make a process group of the backend `pmesh`."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from pmesh.errors import PmeshError
from pmesh.torch.library import Store, dist
from pmesh.torch.options import options_of
from pmesh.torch.process_group import ProcessGroup
from pmesh.torch.ranks import WORLDS


def create(backend_options: Any, pg_options: object) -> ProcessGroup:  # noqa: ANN401 - torch's
    """A process group, as torch describes it; for the default one this joins the job.

    Raises:
        DistBackendError: with the message of pmesh.
    """
    options = options_of(pg_options)
    ranks = list(backend_options.global_ranks_in_group)
    store, timeout = backend_options.store, backend_options.timeout
    rank, size = backend_options.group_rank, backend_options.group_size
    name = backend_options.group_id
    try:
        if not ranks:
            WORLDS.begin(store, rank, size, options, timeout)
        return _group_of(ranks, store, rank, size, timeout=timeout, name=name)
    except PmeshError as e:
        raise dist.DistBackendError(f"{type(e).__name__}: {e}") from e


def _group_of(
    ranks: Sequence[int],
    store: Store,
    rank: int,
    size: int,
    *,
    timeout: timedelta,
    name: str,
) -> ProcessGroup:
    world = WORLDS.current
    if world is None:
        raise dist.DistBackendError("the default process group of pmesh has ended")
    calls = world.of(list(ranks))

    def split(chosen: Sequence[int]) -> ProcessGroup | None:
        if rank not in chosen:
            return None
        named = [ranks[each] if ranks else each for each in chosen]
        prefix = dist.PrefixStore(f"{name}:{named}", store)
        place = list(chosen).index(rank)
        return _group_of(named, prefix, place, len(named), timeout=timeout, name="")

    end: Callable[[], None] = calls.close if ranks else partial(WORLDS.end)
    return ProcessGroup(calls, store, rank, size, timeout=timeout, name=name, split=split, end=end)
