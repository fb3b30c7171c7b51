"""One op of one rank as it is laid out: the request, checked, and the regions of its values."""

from dataclasses import dataclass

from pmesh.agent.jobs.ranks import LocalRank, Result
from pmesh.compression.codecs import Codec, codec_of
from pmesh.core.jobs.attempt import OpState, roles_in
from pmesh.core.ops.kinds import KINDS, Extent, extent_of, ring_codec_name
from pmesh.core.ops.reductions import WIRE_DTYPES, check_reduction
from pmesh.core.wire.local import StartOp
from pmesh.errors import ProtocolError, UsageError

NOTHING = Result(arena=None, nbytes=0)

_CODED_DTYPE = "float32"
_MOST_RANKS = 1024  # that a job can wait for: newcomers may make a sync's table longer


@dataclass(slots=True, kw_only=True)
class Op(OpState):
    """An op with its request, and the regions of its values."""

    request: StartOp
    source: Result | None
    result: Result
    codec: Codec | None = None
    """Of a compressed all-reduce."""
    residual: Result | None = None
    residual_out: Result | None = None
    clipped: int = 0
    """By the codec, in the last attempt."""
    attempts: int = 0

    @property
    def kind(self) -> str:
        """What is called."""
        return self.call.kind

    @property
    def is_table(self) -> bool:
        """Whether its result has a row for each rank, however many there are."""
        return KINDS[self.kind].row is not None

    @property
    def row_bytes(self) -> int:
        """Of a table: what each rank gives."""
        return self.request.count * WIRE_DTYPES[self.request.wire_dtype].itemsize

    @property
    def gets(self) -> bool:
        """Whether the result is for this rank at all."""
        return self.kind != "reduce" or bool(self.result.nbytes)


def check_request(rank: LocalRank, request: StartOp) -> None:
    """Refuse what no client of ours sends: a trainer must not be able to end its agent.

    Raises:
        ProtocolError: it is such a request.
    """
    call = request.call
    enters = call.kind == "sync"  # O6: with it begins who has just entered
    if not _fits(rank, request):
        raise ProtocolError(f"op {request.op} is {call}")
    if not (enters or rank.world):
        raise ProtocolError(f"op {request.op} is {call}, before the sync")
    try:
        if not enters:
            _extent(rank, request)
        if KINDS[call.kind].reduces:
            check_reduction(call.reduction or "sum", request.wire_dtype)
        _check_coding(request)
    except ValueError as e:
        raise ProtocolError(f"op {request.op} is {call}: {e}") from e


def _fits(rank: LocalRank, request: StartOp) -> bool:
    call, ranks, kind = request.call, range(len(rank.world)), KINDS.get(request.call.kind)
    return (
        kind is not None
        and (not kind.rooted or call.root in ranks)
        and all(receiver in ranks for receiver in call.receivers)
        and len(set(call.receivers)) == len(call.receivers)  # views report calls: they stay small
        and (kind.row is None or kind.row.fits(request))
    )


def _check_coding(request: StartOp) -> None:
    """Raises ValueError if what is asked of the ring's codec, or without one, has no meaning."""
    call, name = request.call, ring_codec_name(request.call.compression)
    arenas = [a for a in (request.arena, request.residual, request.residual_out) if a >= 0]
    if len(set(arenas)) < len(arenas):
        raise ValueError("values and residuals in one arena")
    if not name:
        if request.residual >= 0 or request.residual_out >= 0:
            raise ValueError("residuals of what is not compressed")
        return
    codec_of(name)
    if call.kind != "all_reduce" or request.wire_dtype != _CODED_DTYPE:
        raise ValueError(f"{name} is for an all_reduce of {_CODED_DTYPE}")
    if call.reduction not in {"sum", "mean"}:
        raise ValueError(f"{name} is for a sum or a mean")
    if call.strategy not in {"", "ring"}:
        raise ValueError(f"{name} is for the ring")


def _extent(rank: LocalRank, request: StartOp) -> Extent:
    place = rank.world.index(rank.id) if rank.id in rank.world else -1
    return extent_of(request, rank=place, size=max(len(rank.world), 1))


async def lay_out(rank: LocalRank, request: StartOp) -> Op:
    """Find the input region, and a free output region where the op has one.

    Raises:
        ProtocolError: the request names no input where it should, or one where it should not.
        UsageError: there is no room for the output.
        OSError: likewise.
    """
    kind, call = request.call.kind, request.call
    root, receivers = roles_in(rank, call)
    extent, itemsize = _extent(rank, request), WIRE_DTYPES[request.wire_dtype].itemsize
    needs_input = extent.gives > 0
    if needs_input != (request.arena >= 0) or request.offset % itemsize:
        raise ProtocolError(
            f"op {request.op} comes with arena {request.arena}, from byte {request.offset}"
        )
    codec = ring_codec_name(call.compression)
    op = Op(
        number=request.op,
        call=call,
        timeout_s=request.timeout_s,
        request=request,
        source=_hold(rank, request.arena, extent.gives * itemsize, request.offset),
        result=NOTHING,
        codec=codec_of(codec) if codec else None,
        residual=_hold(rank, request.residual, request.count * itemsize),
        residual_out=_hold(rank, request.residual_out, request.count * itemsize),
        root=root,
        receivers=receivers,
    )
    if kind == "broadcast" and root == rank.id:
        op.result = op.source or NOTHING
    elif extent.gets or op.is_table:
        rows = (_MOST_RANKS if kind == "sync" else len(rank.world)) if op.is_table else 0
        try:
            arena = await rank.arenas.outputs.acquire(
                max(rows * op.row_bytes, extent.gets * itemsize)
            )
        except (UsageError, OSError):
            let_go(rank, op, keep=None)
            raise
        op.result = Result(arena=arena, nbytes=extent.gets * itemsize)
    return op


def _hold(rank: LocalRank, number: int, nbytes: int, offset: int = 0) -> Result | None:
    """An input region; None if the request names none."""
    if number < 0:
        return None
    arena = rank.arenas.inputs.hold(number, nbytes, offset=offset)
    return Result(arena=arena, nbytes=nbytes, is_input=True, offset=offset)


def let_go(rank: LocalRank, op: Op, *, keep: Result | None) -> None:
    """Give the op's regions back, but for the one that holds its result."""
    regions = [op.result, op.residual, op.residual_out]
    if op.source is not op.result:
        regions.append(op.source)
    for region in regions:
        if region is not None and region is not keep:
            rank.let_go(region)
