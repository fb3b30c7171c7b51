"""The network's part of an op: its plan, over the lanes that the plan needs."""

from dataclasses import replace

import numpy as np
import trio

from pmesh.agent.jobs.driver import Jobs
from pmesh.agent.jobs.op_layout import Op
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.lanes.edge_costs import agree_on_costs
from pmesh.agent.lanes.rendezvous import LaneRendezvous
from pmesh.compression.blocks import Float32s
from pmesh.compression.codecs import Codec
from pmesh.core.ops.kinds import KINDS, Setting
from pmesh.core.ops.moving import plan_broadcast
from pmesh.core.ops.plan import RankPlan
from pmesh.core.wire.records import RecordHeader
from pmesh.ids import Rank
from pmesh.net.lanes.executor import run_plan
from pmesh.net.lanes.ring import RingPosition, Tensors, all_reduce_coded


async def run_on_network(rank: LocalRank, op: Op, jobs: Jobs) -> None:
    """One attempt at the op, in the present roster.

    Args:
        rank: ours.
        op: laid out.
        jobs: the rest of the agent.

    Raises:
        CallsDiffer: another rank called something else.
        LaneBroken: a lane is gone.
    """
    if rank.rank is None:  # V2: the view without us is about to end the attempt
        await trio.sleep_forever()
        raise AssertionError("nobody wakes it")
    op.contributors, rendezvous = rank.roster.ids, jobs.rendezvous
    root = None if op.root is None else rank.roster.rank_of(op.root)
    if _leaves_the_choice(rank, op):
        ring = await rank.ring(rendezvous)
        members = tuple(trainer.member for trainer in rank.roster.trainers)
        times = jobs.round_trips_s(members)
        rank.costs.edges = await agree_on_costs(
            ring, _header(rank, op), members, times, jobs.edge_book
        )
    if op.codec is not None:
        await _all_reduce_coded(rank, op, op.codec, await rank.ring(rendezvous))
        return
    here = Setting(
        request=op.request,
        rank=rank.rank,
        size=rank.size,
        root=root or 0,
        edges=rank.costs.edges,
    )
    if op.kind == "broadcast":
        await rank.ring(rendezvous)  # both lanes, also where one is not needed
        here = replace(here, reach=_reach(rank, op, Rank(here.root)))
        op.holds = (here.rank - here.root) % here.size <= (here.reach or 0)
    if op.is_table:
        op.result = replace(op.result, nbytes=rank.size * op.row_bytes)
    await run_on_lanes(rank, op, KINDS[op.kind].plan(here), rendezvous)
    if op.kind == "reduce":
        # Nobody has ended it before the root has, so that it can run again among others.
        op.holds = root == rank.rank
        await rank.ring(rendezvous)
        told = plan_broadcast(**here.at, root=here.root, nbytes=0)
        await run_on_lanes(rank, op, told, rendezvous)


def _reach(rank: LocalRank, op: Op, root: Rank) -> int:
    """How far along the ring from the root somebody lacks what it has."""
    places = [rank.roster.rank_of(receiver) for receiver in op.receivers]
    return max(((place - root) % rank.size for place in places if place is not None), default=0)


async def run_on_lanes(rank: LocalRank, op: Op, plan: RankPlan, rendezvous: LaneRendezvous) -> None:
    """Run a plan of the op over the lanes that it needs."""
    ids, kind = rank.roster.ids, KINDS[op.kind]
    to, from_ = await rank.lanes.open(
        [ids[peer] for peer in plan.peers_to], [ids[peer] for peer in plan.peers_from], rendezvous
    )
    await run_plan(
        plan,
        {peer: to[ids[peer]] for peer in plan.peers_to},
        {peer: from_[ids[peer]] for peer in plan.peers_from},
        _header(rank, op),
        source=_table_of(rank, op) if op.is_table and kind.reduces else _source_of(op),
        result=op.result.memory,
        dtype=op.request.wire_dtype if kind.reduces else "",
        reduction=op.request.call.reduction or "sum",
    )


async def _all_reduce_coded(rank: LocalRank, op: Op, codec: Codec, ring: RingPosition) -> None:
    tensors = Tensors(
        own=_float32s(_source_of(op)),
        result=_float32s(op.result.memory),
        residual=None if op.residual is None else _float32s(op.residual.memory.toreadonly()),
        residual_out=None if op.residual_out is None else _float32s(op.residual_out.memory),
    )
    op.clipped = await all_reduce_coded(
        ring,
        op=op.number,
        fingerprint=rank.fingerprint,
        completed=rank.ledger.ended,
        tensors=tensors,
        codec=codec,
        reduction=op.request.call.reduction,
    )


def _float32s(memory: memoryview) -> Float32s:
    return np.frombuffer(memory, np.float32)


def _leaves_the_choice(rank: LocalRank, op: Op) -> bool:
    """Whether the ranks are to find out what is quickest; of two ranks, each way is the same."""
    chosen = op.request.call.strategy
    asks = op.kind in {"all_reduce", "barrier"} and chosen in {"", "hierarchical"}
    knows = rank.costs.edges is not None or op.codec is not None
    return asks and rank.size > 2 and not knows  # noqa: PLR2004 - as it says


def _source_of(op: Op) -> memoryview:
    return memoryview(b"") if op.source is None else op.source.memory.toreadonly()


def _table_of(rank: LocalRank, op: Op) -> memoryview:
    """A row for each rank, all zeros but our own: their sum is what each rank has given."""
    table, place = bytearray(rank.size * op.row_bytes), rank.rank or 0
    table[place * op.row_bytes : (place + 1) * op.row_bytes] = _source_of(op)
    return memoryview(table).toreadonly()


def _header(rank: LocalRank, op: Op) -> RecordHeader:
    return RecordHeader(0, rank.roster.number, op.number, 0, rank.fingerprint, rank.ledger.ended)
