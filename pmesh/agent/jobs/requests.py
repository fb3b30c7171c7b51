"""The request of an op, checked: no trainer must be able to end its agent."""

from pmesh.agent.jobs.ranks import LocalRank
from pmesh.compression.codecs import codec_of
from pmesh.core.ops.kinds import KINDS, Extent, extent_of, ring_codec_name
from pmesh.core.ops.reductions import check_reduction
from pmesh.core.wire.trainer import StartOp
from pmesh.errors import ProtocolError

_CODED_DTYPE = "float32"


def check_request(rank: LocalRank, request: StartOp) -> Extent:
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


def _fits(rank: LocalRank, request: StartOp) -> bool:
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
