"""One op of one rank as it is laid out: the request, checked, and the regions of its values."""

from dataclasses import dataclass

from pmesh.agent.ranks import LocalRank, Result
from pmesh.core.extents import Extent, extent_of
from pmesh.core.op_outcomes import BOUND_KINDS
from pmesh.core.reductions import WIRE_DTYPES, check_reduction
from pmesh.core.session import MAX_ROW_VALUES, SYNC_VALUES, TABLE_KINDS, StartOp
from pmesh.core.views import Verdict
from pmesh.errors import ProtocolError, UsageError
from pmesh.ids import OpNumber, TrainerId

REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
KINDS = REDUCING | ROOTED | BOUND_KINDS | TABLE_KINDS | {"barrier"}
_ADDING = REDUCING | TABLE_KINDS | {"barrier"}
NOTHING = Result(arena=None, nbytes=0)

_TABLE_DTYPE = "int64"
_MOST_RANKS = 1024  # that a job can wait for: newcomers may make a sync's table longer


@dataclass(slots=True, kw_only=True)
class Op:
    """A request, its regions, and how often its lanes have broken."""

    number: OpNumber
    request: StartOp
    source: Result | None
    result: Result
    root: TrainerId | None = None
    """Who it is, whatever its rank becomes (O5)."""
    receivers: tuple[TrainerId, ...] = ()
    """Of a broadcast: likewise."""
    holds: bool = True
    """Whether the last attempt has brought the result here."""
    contributors: tuple[TrainerId, ...] = ()
    """Whose values the last attempt has put into the result."""
    attempts: int = 0
    broken: int = 0
    doomed: Verdict | None = None
    """Why this rank can't run it at all: a matter for all ranks (O3)."""

    @property
    def kind(self) -> str:
        """What is called."""
        return self.request.call.kind

    @property
    def is_table(self) -> bool:
        """Whether its result has a row for each rank, however many there are."""
        return self.kind in TABLE_KINDS

    @property
    def row_bytes(self) -> int:
        """Of a table: what each rank gives."""
        return self.request.count * WIRE_DTYPES[_TABLE_DTYPE].itemsize

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
        if call.kind in _ADDING:
            check_reduction(call.reduction or "sum", request.wire_dtype)
    except ValueError as e:
        raise ProtocolError(f"op {request.op} is {call}: {e}") from e


def _fits(rank: LocalRank, request: StartOp) -> bool:
    call, ranks = request.call, range(len(rank.world))
    exact = request.count == SYNC_VALUES
    row_fits = exact if call.kind == "sync" else request.count <= MAX_ROW_VALUES
    return (
        call.kind in KINDS
        and (call.kind not in ROOTED or call.root in ranks)
        and all(receiver in ranks for receiver in call.receivers)
        and (call.kind not in TABLE_KINDS or (row_fits and request.wire_dtype == _TABLE_DTYPE))
    )


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
    root = rank.world[call.root] if kind in ROOTED else None
    extent, itemsize = _extent(rank, request), WIRE_DTYPES[request.wire_dtype].itemsize
    needs_input = extent.gives > 0
    if needs_input != (request.arena >= 0):
        raise ProtocolError(f"op {request.op} comes with arena {request.arena}")
    source = None
    if needs_input:
        nbytes = extent.gives * itemsize
        arena = rank.arenas.inputs.hold(request.arena, nbytes)
        source = Result(arena=arena, nbytes=nbytes, is_input=True)
    op = Op(
        number=request.op,
        request=request,
        source=source,
        result=NOTHING,
        root=root,
        receivers=tuple(rank.world[r] for r in call.receivers) or rank.world,
    )
    if kind == "broadcast" and root == rank.id:
        op.result = source or NOTHING
    elif extent.gets or op.is_table:
        room_bytes = op.row_bytes * (_MOST_RANKS if kind == "sync" else len(rank.world))
        try:
            arena = await rank.arenas.outputs.acquire(max(room_bytes, extent.gets * itemsize))
        except (UsageError, OSError):
            if source is not None:
                rank.let_go(source)
            raise
        op.result = Result(arena=arena, nbytes=extent.gets * itemsize)
    return op


def let_go(rank: LocalRank, op: Op, *, keep: Result | None) -> None:
    """Give the op's regions back, but for the one that holds its result."""
    regions = [op.result] if op.source is None or op.source is op.result else [op.source, op.result]
    for region in regions:
        if region is not keep:
            rank.let_go(region)
