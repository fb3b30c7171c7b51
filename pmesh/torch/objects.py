"""Sends objects between ranks as data; torch's own functions unpickle, which can run code."""

from typing import Any

from pmesh.torch.library import dist
from pmesh.torch.process_group import pmesh_group


def all_gather_object(obj: object, group: object = None) -> list[Any]:
    """Return the objects of all ranks, in the order of ranks.

    `torch.distributed.all_gather_object` unpickles what it receives, so any rank can run code in
    all trainers. This function sends only MessagePack, like `mesh.all_gather_object`.

    Args:
        obj: None, bool, int (64 bits), float, str, bytes, and lists, tuples and dicts of these.
        group: a group of the backend `pmesh`; None is the default group.

    Raises:
        UsageError: the group has another backend.
        DistBackendError: the object holds something else, or the op fails.
    """
    return pmesh_group(group, "all_gather_object").all_gather_object(obj)


def broadcast_object(obj: object = None, src: int = 0, group: object = None) -> Any:  # noqa: ANN401
    """Return the object of rank `src` on every rank; see `all_gather_object`.

    Args:
        obj: the object; ignored on all ranks but `src`.
        src: a rank of the default group, as in torch.
        group: a group of the backend `pmesh`; None is the default group.

    Raises:
        UsageError: as for `all_gather_object`.
        DistBackendError: as for `all_gather_object`.
    """
    used = pmesh_group(group, "broadcast_object")
    root = src if group is None else dist.get_group_rank(group, src)
    return used.broadcast_object(obj, root)
