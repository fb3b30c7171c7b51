"""Objects between the ranks of a process group: data, never code; torch's own calls unpickle."""

from typing import Any

from pmesh.torch.library import dist
from pmesh.torch.process_group import pmesh_group


def all_gather_object(obj: object, group: object = None) -> list[Any]:
    """Give every rank an object of each, in the order of ranks.

    `torch.distributed.all_gather_object` unpickles what the others have sent, so any rank can run
    code in all trainers. This takes only what MessagePack can say, as `mesh.all_gather_object`.

    Args:
        obj: None, bool, int (64 bits), float, str, bytes, and lists, tuples and dicts of these.
        group: one of the backend `pmesh`; by default the default one.

    Raises:
        UsageError: the group is another backend's.
        DistBackendError: the object holds something else, or as for each op.
    """
    return pmesh_group(group, "all_gather_object").all_gather_object(obj)


def broadcast_object(obj: object = None, src: int = 0, group: object = None) -> Any:  # noqa: ANN401
    """Give every rank the object of rank `src`; see `all_gather_object`.

    Args:
        obj: matters at `src`.
        src: a rank of the default group, as in torch.
        group: one of the backend `pmesh`; by default the default one.

    Raises:
        UsageError: as for `all_gather_object`.
        DistBackendError: as for each op.
    """
    used = pmesh_group(group, "broadcast_object")
    root = src if group is None else dist.get_group_rank(group, src)
    return used.broadcast_object(obj, root)
