"""The network's part of an op: along the ring, or over lanes to whom its plan names."""

from dataclasses import replace

import numpy as np

from pmesh.agent.jobs.op_layout import REDUCING, Op
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.jobs.surroundings import Surroundings
from pmesh.agent.lanes.edge_costs import agree_on_costs
from pmesh.agent.lanes.rendezvous import LaneDesk
from pmesh.compression.blocks import Float32s
from pmesh.compression.codecs import Codec
from pmesh.core.ops.all_reduce import plan_centralized, plan_hierarchical, plan_tree
from pmesh.core.ops.moving import plan_all_gather, plan_all_to_all, plan_gather, plan_scatter
from pmesh.core.ops.plan import RankPlan
from pmesh.core.ops.reduce import plan_reduce, plan_reduce_scatter
from pmesh.core.ops.reductions import WIRE_DTYPES
from pmesh.core.wire.local import SUMMED_TABLES
from pmesh.core.wire.records import RecordHeader
from pmesh.ids import Rank
from pmesh.net.lanes.coded import Tensors, all_reduce_coded
from pmesh.net.lanes.collectives import RingPosition, all_reduce, broadcast
from pmesh.net.lanes.transfers import run_plan


async def run_on_network(rank: LocalRank, op: Op, around: Surroundings) -> None:
    """One attempt at the op, in the present roster.

    Args:
        rank: ours.
        op: laid out.
        around: the rest of the agent.

    Raises:
        CallsDiffer: another rank called something else.
        LaneBroken: a lane is gone.
    """
    op.contributors, desk = rank.roster.ids, around.desk
    root = None if op.root is None else rank.roster.rank_of(op.root)
    if _leaves_the_choice(rank, op):
        ring = await rank.ring(desk)
        members = tuple(trainer.member for trainer in rank.roster.trainers)
        times = around.round_trips_s(members)
        rank.costs.edges = await agree_on_costs(
            ring, _header(rank, op), members, times, around.edge_book
        )
    if op.kind == "broadcast" and root is not None:
        await broadcast_along(rank, op, await rank.ring(desk), root)
    elif op.codec is not None:
        await _all_reduce_coded(rank, op, op.codec, await rank.ring(desk))
    elif op.kind in SUMMED_TABLES:
        ring = await rank.ring(desk)
        op.result = replace(op.result, nbytes=ring.size * op.row_bytes)
        await _all_reduce(rank, op, ring, _table_of(op, ring))
    elif (plan := _plan_of(rank, op, root)) is None:
        await _all_reduce(rank, op, await rank.ring(desk), _source_of(op))
    else:
        if op.is_table:
            op.result = replace(op.result, nbytes=plan.size * op.row_bytes)
        await _run_plan(rank, op, plan, desk)
        if op.kind == "reduce" and root is not None:
            # Nobody has ended it before the root has, so that it can run again among others.
            op.holds = root == rank.rank
            ring = await rank.ring(desk)
            await broadcast(ring, root=root, buffer=memoryview(b""), **_of(rank, op))


async def broadcast_along(rank: LocalRank, op: Op, ring: RingPosition, root: Rank) -> None:
    """Along the ring as far as somebody lacks it; those beyond only hear that it has got there."""
    places = [rank.roster.rank_of(receiver) for receiver in op.receivers]
    reach = max(((place - root) % ring.size for place in places if place is not None), default=0)
    distance = (ring.rank - root) % ring.size
    op.holds = distance <= reach
    if distance <= reach:
        near = replace(ring, rank=distance, size=reach + 1)
        await broadcast(near, root=0, buffer=op.result.memory, **_of(rank, op))
    if reach <= distance and reach < ring.size - 1:
        beyond = replace(ring, rank=distance - reach, size=ring.size - reach)
        await broadcast(beyond, root=0, buffer=memoryview(b""), **_of(rank, op))


async def _all_reduce(rank: LocalRank, op: Op, ring: RingPosition, source: memoryview) -> None:
    await all_reduce(
        ring,
        source=source,
        result=op.result.memory,
        dtype=op.request.wire_dtype,
        reduction=op.request.call.reduction or "sum",
        **_of(rank, op),
    )


async def _all_reduce_coded(rank: LocalRank, op: Op, codec: Codec, ring: RingPosition) -> None:
    tensors = Tensors(
        own=_float32s(_source_of(op)),
        result=_float32s(op.result.memory),
        residual=None if op.residual is None else _float32s(op.residual.memory.toreadonly()),
        residual_out=None if op.residual_out is None else _float32s(op.residual_out.memory),
    )
    op.clipped = await all_reduce_coded(
        ring, tensors=tensors, codec=codec, reduction=op.request.call.reduction, **_of(rank, op)
    )


def _float32s(memory: memoryview) -> Float32s:
    return np.frombuffer(memory, np.float32)


async def _run_plan(rank: LocalRank, op: Op, plan: RankPlan, desk: LaneDesk) -> None:
    ids = rank.roster.ids
    to, from_ = await rank.lanes.open(
        [ids[peer] for peer in plan.peers_to], [ids[peer] for peer in plan.peers_from], desk
    )
    await run_plan(
        plan,
        {peer: to[ids[peer]] for peer in plan.peers_to},
        {peer: from_[ids[peer]] for peer in plan.peers_from},
        _header(rank, op),
        source=_source_of(op),
        result=op.result.memory,
        dtype=op.request.wire_dtype if op.kind in REDUCING else "",
        reduction=op.request.call.reduction or "sum",
    )


def _leaves_the_choice(rank: LocalRank, op: Op) -> bool:
    """Whether the ranks are to find out what is quickest; of two ranks, each way is the same."""
    chosen = op.request.call.strategy
    asks = op.kind in {"all_reduce", "barrier"} and chosen in {"", "hierarchical"}
    knows = rank.costs.edges is not None or op.codec is not None
    return asks and rank.size > 2 and not knows  # noqa: PLR2004 - as it says


def _plan_of(rank: LocalRank, op: Op, root: Rank | None) -> RankPlan | None:
    """None: the ring's own all-reduce, which needs no plan of lanes."""
    request, at = op.request, {"rank": rank.rank or 0, "size": rank.size}
    itemsize = WIRE_DTYPES[request.wire_dtype].itemsize
    parts = tuple(part * itemsize for part in request.parts)
    match op.kind:
        case "reduce":
            plan = plan_reduce(**at, root=root or 0, nbytes=request.count * itemsize)
        case "all_gather":
            plan = plan_all_gather(**at, nbytes=parts)
        case "collect":
            plan = plan_all_gather(**at, nbytes=(op.row_bytes,) * rank.size)
        case "gather":
            plan = plan_gather(**at, root=root or 0, nbytes=parts)
        case "scatter":
            plan = plan_scatter(**at, root=root or 0, nbytes=parts)
        case "reduce_scatter":
            plan = plan_reduce_scatter(**at, nbytes=parts)
        case "all_to_all":
            from_ = tuple(part * itemsize for part in request.parts_in)
            plan = plan_all_to_all(**at, to=parts, from_=from_)
        case _:
            return _plan_of_strategy(rank, op, itemsize)
    return plan


def _plan_of_strategy(rank: LocalRank, op: Op, itemsize: int) -> RankPlan | None:
    values = {"count": op.request.count, "itemsize": itemsize}
    at = {"rank": rank.rank or 0, "size": rank.size}
    match op.request.call.strategy or rank.costs.choose(op.request.count * itemsize):
        case "tree":
            plan = plan_tree(**at, **values)
        case "centralized":
            plan = plan_centralized(**at, **values)
        case "hierarchical":
            plan = plan_hierarchical(
                **at, **values, islands=rank.costs.islands or _each_alone(rank.size)
            )
        case _:
            return None
    return plan


def _each_alone(size: int) -> tuple[tuple[int, ...], ...]:
    return tuple((place,) for place in range(size))


def _source_of(op: Op) -> memoryview:
    return memoryview(b"") if op.source is None else op.source.memory.toreadonly()


def _table_of(op: Op, ring: RingPosition) -> memoryview:
    """A row for each rank, all zeros but our own: their sum is what each rank has given."""
    table = bytearray(ring.size * op.row_bytes)
    table[ring.rank * op.row_bytes : (ring.rank + 1) * op.row_bytes] = _source_of(op)
    return memoryview(table).toreadonly()


def _header(rank: LocalRank, op: Op) -> RecordHeader:
    return RecordHeader(0, rank.roster.number, op.number, 0, rank.fingerprint, rank.ledger.ended)


def _of(rank: LocalRank, op: Op) -> dict[str, int]:
    """What every record of the op says."""
    return {
        "op": op.number,
        "fingerprint": rank.fingerprint,
        "completed": rank.ledger.ended,
    }
