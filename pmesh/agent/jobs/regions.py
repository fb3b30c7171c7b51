"""An op of one rank with the regions of its values: found before it begins, released at its end."""

from dataclasses import dataclass

from pmesh.agent.jobs.ranks import KeptResult, LocalRank
from pmesh.agent.jobs.requests import Shape
from pmesh.agent.jobs.together import Taking
from pmesh.compression.codecs import Codec, codec_of
from pmesh.core.jobs.attempt import OpState
from pmesh.core.ops.kinds import OpKind, ring_codec_name
from pmesh.core.ops.reductions import WIRE_DTYPES
from pmesh.core.wire.trainer import StartOp
from pmesh.errors import ProtocolError, UsageError
from pmesh.net.lanes.native import LibraryThreads

NOTHING = KeptResult(arena=None, nbytes=0)
_MOST_RANKS = 1024  # as many as a job can wait for; newcomers may make a sync's table longer


@dataclass(slots=True, kw_only=True)
class Op(OpState):
    """An op with its request, and the regions of its values."""

    request: StartOp
    kind: OpKind
    source: KeptResult | None = None
    result: KeptResult
    shared: KeptResult | None = None
    """The result of the last attempt, if another rank's memory has it."""
    codec: Codec | None = None
    """The codec of a compressed all-reduce."""
    residual: KeptResult | None = None
    residual_out: KeptResult | None = None
    clipped: int = 0
    """How many values the codec has clipped in the last attempt."""
    attempts: int = 0
    shape: Shape | None = None
    """None if it is doomed."""
    begun: LibraryThreads | Taking | None = None
    """What is being done for the first attempt already."""

    @property
    def row_bytes(self) -> int:
        """The bytes that each rank gives to a table."""
        return self.request.count * WIRE_DTYPES[self.request.wire_dtype].itemsize

    @property
    def gets(self) -> bool:
        """Whether the result is for this rank at all."""
        return self.call.kind != "reduce" or bool(self.result.nbytes)


async def lay_out(rank: LocalRank, request: StartOp, shape: Shape) -> Op:
    """Find the input region, and a free output region if the op has one.

    Raises:
        ProtocolError: the request names no input where it should, or one where it should not.
        UsageError: there is no room for the output.
        OSError: the system has no memory or descriptor for it.
    """
    call, kind, extent, root = request.call, shape.kind, shape.extent, shape.root
    itemsize = WIRE_DTYPES[request.wire_dtype].itemsize
    if (extent.gives > 0) != (request.arena >= 0) or request.offset % itemsize:
        raise ProtocolError(
            f"op {request.op} comes with arena {request.arena}, from byte {request.offset}"
        )
    op = Op(
        number=request.op,
        call=call,
        timeout_s=request.timeout_s,
        request=request,
        kind=kind,
        result=NOTHING,
        root=root,
        receivers=shape.receivers,
        shape=shape,
    )
    if extent.gives:
        op.source = hold(rank, request.arena, extent.gives * itemsize, request.offset)
    if call.compression and (codec := ring_codec_name(call.compression)):
        op.codec = codec_of(codec)
        if request.residual >= 0:
            op.residual = hold(rank, request.residual, request.count * itemsize)
        if request.residual_out >= 0:
            op.residual_out = hold(rank, request.residual_out, request.count * itemsize)
    if call.kind == "broadcast" and root == rank.id:
        op.result = op.source or NOTHING
    elif extent.gets or kind.row:
        table_bytes = 0
        if kind.row:
            rows = _MOST_RANKS if call.kind == "sync" else len(rank.world)
            table_bytes = rows * op.row_bytes
        try:
            nbytes = max(table_bytes, extent.gets * itemsize)
            arena = await rank.arenas.outputs.acquire(nbytes, follows=request.follows)
        except (UsageError, OSError):
            let_go(rank, op, keep=None)
            raise
        op.result = KeptResult(arena=arena, nbytes=extent.gets * itemsize)
    return op


def hold(rank: LocalRank, number: int, nbytes: int, offset: int = 0) -> KeptResult:
    """Hold a part of an input arena until `LocalRank.let_go`; ProtocolError if it is not there."""
    arena = rank.arenas.inputs.hold(number, nbytes, offset=offset)
    return KeptResult(arena=arena, nbytes=nbytes, is_input=True, offset=offset)


def let_go(rank: LocalRank, op: Op, *, keep: KeptResult | None) -> None:
    """Release the op's regions, except `keep`, which holds its result."""
    regions = [op.result, op.residual, op.residual_out]
    if op.source is not op.result:
        regions.append(op.source)
    for region in regions:
        if region is not None and region is not keep:
            rank.let_go(region)
