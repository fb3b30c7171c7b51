"""The request of an op, checked: no trainer must be able to end its agent.

A training makes the same few calls again and again. What holds for all requests that differ only in
their op's number and in where their values lie is found once, for one world.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from pmesh.compression.codecs import codec_of
from pmesh.core.jobs.attempt import roles_in
from pmesh.core.jobs.rank import RankState
from pmesh.core.ops.cost import Edges
from pmesh.core.ops.kinds import KINDS, Extent, OpKind, extent_of, ring_codec_name
from pmesh.core.ops.plan import RankPlan
from pmesh.core.ops.reductions import check_reduction
from pmesh.core.values import Roster
from pmesh.core.wire.trainer import StartOp
from pmesh.errors import ProtocolError
from pmesh.ids import TrainerId

_CODED_DTYPE = "float32"
_MOST_SHAPES = 64


@dataclass(slots=True, kw_only=True)
class Shape:
    """What a request means for one rank, among the ranks that its trainer knows."""

    kind: OpKind
    extent: Extent
    root: TrainerId | None
    receivers: tuple[TrainerId, ...]
    planned_for: tuple[Roster, Edges | None] | None = None
    """For which roster, with which costs of edges, `plan` was made."""
    plan: RankPlan | None = None


class Shapes:
    """The shapes of a rank's requests that were found to be right, in its current world."""

    def __init__(self) -> None:
        self._world: tuple[TrainerId, ...] = ()
        self._known: dict[Hashable, Shape] = {}

    def of(self, rank: RankState[Any], request: StartOp) -> Shape:
        """Return the shape of a request.

        Raises:
            ProtocolError: no pmesh client sends it.
        """
        if rank.world is not self._world:
            self._world, self._known = rank.world, {}
        call = request.call
        if call.compression or request.residual >= 0 or request.residual_out >= 0:
            return _shape_of(rank, request)  # what is checked are its arenas, too
        key = call, request.wire_dtype, request.count, request.parts, request.parts_in
        shape = self._known.get(key)
        if shape is None:
            shape = _shape_of(rank, request)
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            self._known[key] = shape
        return shape


def _shape_of(rank: RankState[Any], request: StartOp) -> Shape:
    extent = check_request(rank, request)
    root, receivers = roles_in(rank, request.call)
    kind = KINDS[request.call.kind]
    return Shape(kind=kind, extent=extent, root=root, receivers=receivers)


def check_request(rank: RankState[Any], request: StartOp) -> Extent:
    """Refuse a request that no pmesh client sends: a trainer must not be able to end its agent.

    Returns what the rank gives and gets.

    Raises:
        ProtocolError: it is such a request.
    """
    call, world = request.call, rank.world
    if not _fits(rank, request):
        raise ProtocolError(f"op {request.op} is {call}")
    if not (call.kind == "sync" or world):  # O6: a trainer that has just entered begins with it
        raise ProtocolError(f"op {request.op} is {call}, before the sync")
    try:
        place = world.index(rank.id) if rank.id in world else -1
        extent = extent_of(request, rank=place, size=max(len(world), 1))
        if KINDS[call.kind].reduces:
            check_reduction(call.reduction or "sum", request.wire_dtype)
        _check_coding(request)
    except ValueError as e:
        raise ProtocolError(f"op {request.op} is {call}: {e}") from e
    return extent


def _fits(rank: RankState[Any], request: StartOp) -> bool:
    call, ranks, kind = request.call, range(len(rank.world)), KINDS.get(request.call.kind)
    return (
        kind is not None
        and (not kind.rooted or call.root in ranks)
        and all(map(ranks.__contains__, call.receivers))
        and len(set(call.receivers)) == len(call.receivers)  # views report calls: they stay small
        and (kind.row is None or kind.row.fits(request))
    )


def _check_coding(request: StartOp) -> None:
    """Raise ValueError if the request does not fit the ring's codec, or the lack of one."""
    call, name = request.call, ring_codec_name(request.call.compression)
    if request.residual >= 0 or request.residual_out >= 0:
        arenas = [a for a in (request.arena, request.residual, request.residual_out) if a >= 0]
        if len(set(arenas)) < len(arenas):
            raise ValueError("values and residuals in one arena")
        if not name:
            raise ValueError("residuals of what is not compressed")
    if not name:
        return
    codec_of(name)
    if call.kind != "all_reduce" or request.wire_dtype != _CODED_DTYPE:
        raise ValueError(f"{name} is for an all_reduce of {_CODED_DTYPE}")
    if call.reduction not in {"sum", "mean"}:
        raise ValueError(f"{name} is for a sum or a mean")
    if call.strategy not in {"", "ring"}:
        raise ValueError(f"{name} is for the ring")
