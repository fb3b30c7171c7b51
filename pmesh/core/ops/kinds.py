"""How many values a rank gives to an op and gets of it: its trainer and its agent see it alike."""

from typing import NamedTuple

from pmesh.core.views.outcomes import BOUND_KINDS
from pmesh.core.wire.local import TABLE_KINDS, StartOp


class Extent(NamedTuple):
    """Values of one rank's input and output."""

    gives: int
    gets: int


def extent_of(request: StartOp, *, rank: int, size: int) -> Extent:
    """What a rank of so many gives and gets; a rank that gives nothing needs no arena.

    Raises:
        ValueError: the request does not say how much is for whom.
    """
    _check_parts(request, size)
    kind, count, parts = request.call.kind, request.count, request.parts
    is_root = request.call.root == rank
    whole = sum(parts)
    match kind:
        case "broadcast":
            extent = Extent(count if is_root else 0, count)
        case "reduce":
            extent = Extent(count, count if is_root else 0)
        case "all_gather":
            extent = Extent(parts[rank], whole)
        case "gather":
            extent = Extent(parts[rank], whole if is_root else 0)
        case "scatter":
            extent = Extent(whole if is_root else 0, parts[rank])
        case "reduce_scatter":
            extent = Extent(whole, parts[rank])
        case "all_to_all":
            extent = Extent(whole, sum(request.parts_in))
        case _ if kind in TABLE_KINDS:
            extent = Extent(count, count * size)
        case _:
            extent = Extent(count, count)
    return extent


def _check_parts(request: StartOp, size: int) -> None:
    kind = request.call.kind
    if kind in BOUND_KINDS and len(request.parts) != size:
        raise ValueError(f"{len(request.parts)} parts for {size} ranks")
    if kind == "all_to_all" and len(request.parts_in) != size:
        raise ValueError(f"{len(request.parts_in)} parts from {size} ranks")
