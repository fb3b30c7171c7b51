"""The group of gloo that pmesh's is compared with."""

from typing import Any

import torch.distributed as dist

_kept: list[Any] = []


def begin_gloo(folder: str, rank: int, size: int) -> None:
    """Begin the default group with gloo, over a file of this folder; it lives as long as its rank.

    Where DDP is the last to hold it, after `destroy_process_group`, its destructor waits with the
    interpreter's lock for its threads, and one of them may wait for the lock (torch 2.13).
    """
    file = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=size)
    _kept.append(dist.group.WORLD)
