"""Runs one op of one rank, from the request to the reply.

`pmesh.core.jobs.attempt` decides what comes next: an attempt, a wait for a view, another attempt,
or a fetch of the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias, assert_never

import numpy as np
import trio
from msgspec import structs

from pmesh.agent.jobs.driver import Jobs
from pmesh.agent.jobs.ranks import KeptResult, LocalRank
from pmesh.agent.jobs.regions import NOTHING, Op, lay_out, let_go
from pmesh.agent.jobs.retained import fetch_result
from pmesh.agent.jobs.together import SHARED_BYTES, RankPart, Taking, attempt_of, copy_result
from pmesh.agent.lanes.edge_costs import agree_on_costs
from pmesh.agent.lanes.rendezvous import LaneRendezvous
from pmesh.compression.blocks import Float32s
from pmesh.compression.codecs import Codec
from pmesh.core.jobs import attempt as attempts
from pmesh.core.jobs.attempt import (
    Fail,
    Failed,
    FetchResult,
    NextStep,
    ReportLate,
    RequestView,
    Run,
    WaitForNews,
)
from pmesh.core.ops.kinds import KINDS, Setting
from pmesh.core.ops.machines import BY_MACHINES, for_ranks, place_of, plan_block, plan_fold
from pmesh.core.ops.moving import plan_broadcast
from pmesh.core.ops.plan import RankPlan
from pmesh.core.ops.reductions import WIRE_DTYPES
from pmesh.core.ops.together import Together
from pmesh.core.topology.ranks import edges_among
from pmesh.core.values import OpOutcome, Verdict
from pmesh.core.wire.calls import Call
from pmesh.core.wire.records import RecordHeader
from pmesh.core.wire.trainer import OpDone, OpFailed, StartOp
from pmesh.errors import LaneBroken, ProtocolError, UsageError
from pmesh.ids import OpNumber
from pmesh.net.lanes.executor import begin_plan, run_plan
from pmesh.net.lanes.folding import SourceFold
from pmesh.net.lanes.lane import CallsDiffer, PathLost
from pmesh.net.lanes.native import KeptThreads, LibraryThreads
from pmesh.net.lanes.ring import RingPosition, Tensors, all_reduce_coded
from pmesh.net.sessions.arenas import Arena

BEAT_EVERY_OPS = 8  # unstable ops: after so many, a heartbeat with our progress goes early
RANKS_POLL_S = 0.1  # while there are too few ranks: half a heartbeat

_IN_STEPS = frozenset({"broadcast", "reduce"})  # they decide between two plans who holds the result

OpReply: TypeAlias = tuple[OpDone | OpFailed, Arena | None]
"""The reply, and the output arena that it names, which stays until the next op has ended."""


async def run_op(rank: LocalRank, request: StartOp, jobs: Jobs) -> OpReply:
    """Run the op to its end, which is the same at all ranks.

    Raises:
        ProtocolError: no pmesh client would send this request.
    """
    if rank.late_failure is not None:  # I5
        return _failed(request.op, attempts.report_late(rank))
    begun = None if rank.repeats is None else rank.repeats.take_begun(request.op)
    if request.op != (rank.ledger.started + 1 if rank.running is None else rank.running):
        raise ProtocolError(f"op {request.op} after op {rank.ledger.started}")
    shape = rank.shapes.of(rank, request)
    try:
        op = await lay_out(rank, request, shape)
    except (UsageError, OSError) as e:  # OSError: the system has no memory or descriptor left
        op = _doomed(request, Verdict("UsageError", f"rank {rank.rank}: {e}", (rank.id,)))
    if rank.late_failure is not None:  # I5: a view has come while memory was made for the result
        let_go(rank, op, keep=None)
        return _failed(request.op, attempts.report_late(rank))
    now = trio.current_time()
    attempts.start(rank, op, now)
    if begun is not None:
        op.begun = begun
    elif _ends_at_once(rank, op, jobs):
        return _deliver(rank, op, jobs)
    while True:
        attempts.begin_attempt(rank, op, now)
        if op.shared is not None:  # an attempt was interrupted before its result counted
            rank.let_go(op.shared)
            op.shared = None
        with rank.attempt(op.deadline):
            return await _attempt(rank, op, jobs)
        if not rank.was_interrupted:
            with rank.attempt():
                verdict = attempts.timed_out(rank, op, jobs.progress, jobs.newcomers(rank))
                await _await_view(rank, verdict, op.number, jobs)
        now = trio.current_time()


def _ends_at_once(rank: LocalRank, op: Op, jobs: Jobs) -> bool:
    """Run a small op in one turn of the event loop, into which no view can come.

    Returns False if it can't run so. What has begun then is `op.begun`, which the first attempt
    takes to its end.
    """
    if op.codec is not None or not isinstance(_next_step(rank, op, jobs), Run):
        return False
    if is_in_memory(rank, op, jobs):
        if rank.repeats is not None:  # else no rank here repeats anything
            jobs.recall_others(rank)
        op.begun = _meet(rank, op, jobs)
        ended = op.begun is not None and op.begun.ends_at_once()
    else:
        op.begun = _begin_on_lanes(rank, op)
        ended = op.begun is not None and op.begun.ends_at_once(rank.patience)
    if ended:
        op.begun, op.contributors = None, rank.roster.ids
    return ended


def _begin_on_lanes(rank: LocalRank, op: Op) -> LibraryThreads | None:
    """Begin the op in the library; None if it needs more than one plan that is known already."""
    if op.kind.row or op.call.kind in _IN_STEPS or _leaves_the_choice(rank, op):
        return None
    if rank.machines and is_by_machines(rank, op):  # it waits for others here
        return None
    plan = _plan_of(rank, op)
    lanes = rank.lanes.if_open(plan.receives, plan.sends)
    if lanes is None:
        return None
    try:
        return begin_plan(
            plan,
            lanes,
            _header(rank, op),
            source=NOTHING.memory if op.source is None else op.source.memory,  # only read (I8)
            result=op.result.memory,
            dtype=op.request.wire_dtype if op.kind.reduces else "",
            reduction=op.request.call.reduction or "sum",
        )
    except LaneBroken:  # the attempt that follows meets it, too
        return None


def _doomed(request: StartOp, verdict: Verdict) -> Op:
    return Op(
        number=request.op,
        call=request.call,
        timeout_s=request.timeout_s,
        request=request,
        kind=KINDS[request.call.kind],
        result=NOTHING,
        doomed=verdict,
    )


async def _attempt(rank: LocalRank, op: Op, jobs: Jobs) -> OpReply:
    """Make one attempt. If it can't go on, it waits here for a view change that cancels it."""
    try:
        while True:
            step = Run() if op.begun is not None else _next_step(rank, op, jobs)
            match step:
                case Fail(outcome):
                    let_go(rank, op, keep=None)
                    return _failed(op.number, attempts.end_failed(rank, op, outcome))
                case ReportLate():
                    let_go(rank, op, keep=None)
                    return _failed(op.number, attempts.report_late(rank))
                case WaitForNews() as wait:
                    await _wait(rank, wait, jobs)
                    continue
                case RequestView(verdict, number):
                    await _await_view(rank, verdict, number, jobs)
                case FetchResult(outcome):
                    await _fetch(rank, op, outcome, jobs)
                case Run():
                    await run_on_network(rank, op, jobs)
                case _:
                    assert_never(step)
            await rank.unfenced()
            return _deliver(rank, op, jobs)
    except CallsDiffer as e:
        await trio.lowlevel.checkpoint_if_cancelled()  # by a view: it has settled what differed
        number = OpNumber(e.op)
        await _await_view(rank, attempts.differs(rank, number, str(e)), number, jobs)
    except LaneBroken as e:
        await _await_lanes(rank, op, e, jobs)
    raise AssertionError("a view ends the wait for it")


def _next_step(rank: LocalRank, op: Op, jobs: Jobs) -> NextStep:
    return attempts.next_step(
        rank, op, newcomers=lambda: jobs.newcomers(rank), retained_bytes=rank.retained_bytes
    )


async def _await_lanes(rank: LocalRank, op: Op, broken: LaneBroken, jobs: Jobs) -> None:
    """Wait for the view with other lanes: without a lost neighbour, or over another path."""
    is_path = isinstance(broken, PathLost)  # the neighbour is still there
    await trio.sleep(0 if is_path else attempts.LANE_GRACE_S)
    jobs.event_log.note("lane broken", str(broken), job=rank.roster.job, op=op.number)
    verdict = None if is_path else attempts.break_lanes(rank, op, str(broken))
    await _await_view(rank, verdict, op.number, jobs)


async def _await_view(rank: LocalRank, verdict: Verdict | None, op: int, jobs: Jobs) -> None:
    rank.request_view(verdict, op)
    jobs.reevaluate()
    await trio.sleep_forever()


async def _wait(rank: LocalRank, wait: WaitForNews, jobs: Jobs) -> None:
    if wait.what == "ranks":  # heartbeats report who waits, five a second
        await trio.sleep(RANKS_POLL_S)
        return
    if wait.what == "room":
        jobs.beat()
    await rank.changed()


def _failed(op: OpNumber, failed: Failed) -> OpReply:
    return OpFailed(op, failed.verdict, failed.consumed, failed.world), None


def _deliver(rank: LocalRank, op: Op, jobs: Jobs) -> OpReply:
    """V3: no await lies between the end of the fence and the ledger's entry."""
    result = op.shared or op.result
    rank.complete(op.number, result, op.contributors, holds=op.holds)
    arena, lent = None if result.is_input else result.arena, False
    if arena is not None:
        rank.arenas.outputs.deliver(arena)
        lent = op.request.borrows and rank.arenas.outputs.lend(arena)
    let_go(rank, op, keep=result)
    rank.pass_barrier(op.number, op.call.kind)
    if rank.ledger.ops and len(rank.ledger.ops) % BEAT_EVERY_OPS == 0:
        jobs.beat()
    if rank.halted_since is not None:
        _note_halt(rank, op, jobs)
    number = -1 if arena is None else arena.number
    return OpDone(op.number, number, rank.see(op.contributors), op.clipped, lent), arena


def _note_halt(rank: LocalRank, op: Op, jobs: Jobs) -> None:
    """Record how long an op stood still that a view change had interrupted."""
    since, rank.halted_since = rank.halted_since, None
    halted_s = trio.current_time() - (since or 0.0)
    jobs.event_log.note(
        "ring stood still",
        f"job {rank.roster.job!r} stood still for {halted_s:.3f} s, until op {op.number} had ended "
        f"among {_ranks(len(op.contributors))}",
        job=rank.roster.job,
        op=op.number,
        duration_s=halted_s,
    )


def _note_rerun(rank: LocalRank, op: Op, jobs: Jobs) -> None:
    job = rank.roster.job
    text = f"op {op.number} of job {job!r} runs again, among {_ranks(rank.size)}"
    jobs.event_log.note("op rerun", text, job=job, op=op.number)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


async def _fetch(rank: LocalRank, op: Op, outcome: OpOutcome, jobs: Jobs) -> None:
    """O2: fetch the result of an op that others have completed."""
    op.contributors, op.holds = outcome.contributors, op.gets
    if op.result.is_input or not op.gets:
        return  # a broadcast's root had the result all along, and I8: its input is never written
    if op.kind.row:
        op.result = structs.replace(op.result, nbytes=len(op.contributors) * op.row_bytes)
    job = rank.roster.job
    text = f"op {op.number} of job {job!r} had ended elsewhere: its result is fetched"
    jobs.event_log.note("op fetched", text, job=job, op=op.number)
    await fetch_result(rank, op.request.call, op.result.memory, outcome, jobs)


# --- the network's part: a plan, over the lanes that it needs


async def run_on_network(rank: LocalRank, op: Op, jobs: Jobs) -> None:
    """Run the op once, among the ranks of the current roster.

    Args:
        rank: the local rank that runs it.
        op: the op, as `lay_out` has made it.
        jobs: the jobs of the agent.

    Raises:
        CallsDiffer: another rank called something else.
        LaneBroken: a lane is gone.
    """
    op.attempts += 1
    if op.attempts > 1:
        _note_rerun(rank, op, jobs)
    if rank.rank is None:  # V2: the view without us is about to end the attempt
        await trio.sleep_forever()
        raise AssertionError("nobody wakes it")
    op.contributors, rendezvous = rank.roster.ids, jobs.rendezvous
    if op.begun is not None and not (rank.machines and is_by_machines(rank, op)):
        begun, op.begun = op.begun, None
        await _take_result(rank, op, await begun.finish())
        return
    if is_in_memory(rank, op, jobs):
        await _run_in_memory(rank, op, jobs)
        return
    if _leaves_the_choice(rank, op):
        ring = await rank.ring(rendezvous)
        members = tuple(trainer.member for trainer in rank.roster.trainers)
        times = jobs.round_trips_s(members)
        is_first = rank.costs.edges is None
        edges = await agree_on_costs(
            ring, _header(rank, op), members, times, jobs.membership, is_first=is_first
        )
        await trio.lowlevel.checkpoint_if_cancelled()  # a view that came has made other costs
        rank.costs.agreed(edges, op.number)
    if op.codec is not None:
        await _all_reduce_coded(rank, op, op.codec, await rank.ring(rendezvous))
        return
    if is_by_machines(rank, op):
        try:
            await _run_by_machines(rank, op, jobs)
        finally:
            if isinstance(op.begun, KeptThreads):  # a view came before it could go on
                op.begun.abandon()
                op.begun = None
    else:
        await _run_by_ranks(rank, op, rendezvous)


async def _run_by_ranks(rank: LocalRank, op: Op, rendezvous: LaneRendezvous) -> None:
    """Run the op over lanes between ranks."""
    here = _setting(rank, op)
    if op.call.kind == "broadcast":
        await rank.ring(rendezvous)  # both lanes, also where one is not needed
        op.holds = (here.rank - here.root) % here.size <= (here.reach or 0)
    if op.kind.row:
        op.result = structs.replace(op.result, nbytes=rank.size * op.row_bytes)
    await run_on_lanes(rank, op, op.kind.plan(here), rendezvous)
    if op.call.kind == "reduce":
        # No rank ends the op before the root has, so that it can run again among others.
        op.holds = here.root == rank.rank
        await rank.ring(rendezvous)
        news = plan_broadcast(**here.rooted, nbytes=0)
        await run_on_lanes(rank, op, news, rendezvous)


def _plan_of(rank: LocalRank, op: Op) -> RankPlan:
    """Return the plan of an op that has one only, and whose root is the same all the time."""
    shape, here = op.shape, (rank.roster, rank.costs.edges)
    assert shape is not None  # noqa: S101 - a doomed op does not run
    if shape.plan is None or shape.planned_for != here:
        shape.planned_for, shape.plan = here, _new_plan(rank, op)
    return shape.plan


def _new_plan(rank: LocalRank, op: Op) -> RankPlan:
    plan = op.kind.plan(_setting(rank, op))
    return for_ranks(plan, rank.size) if is_by_machines(rank, op) else plan


def _setting(rank: LocalRank, op: Op) -> Setting:
    """Return on what the plan of this rank depends, or that of its machine."""
    request, edges, size = op.request, rank.costs.edges, rank.size
    reach, in_place = None, False
    place: Callable[[int], int] = int
    if is_by_machines(rank, op):
        size, place = len(rank.machines), partial(place_of, rank.machines)
        firsts = [ranks[0] for ranks in rank.machines]
        edges = None if edges is None else edges_among(edges, firsts)
        in_place = len(rank.machines[place(rank.rank or 0)]) > 1
        if op.kind.bound:
            blocks = tuple(sum(request.parts[r] for r in ranks) for ranks in rank.machines)
            request = structs.replace(request, parts=blocks)
    root = place(0 if op.root is None else _root_of(rank, op))
    if op.call.kind == "broadcast":  # to the receiver that is furthest along the ring
        left = [r for r in map(rank.roster.rank_of, op.receivers) if r is not None]
        reach = max(((place(receiver) - root) % size for receiver in left), default=0)
    return Setting(
        request=request,
        rank=place(rank.rank or 0),
        size=size,
        root=root,
        reach=reach,
        edges=edges,
        in_place=in_place,
    )


def _root_of(rank: LocalRank, op: Op) -> int:
    """Return the current rank of the root that the op has; 0 if that has gone."""
    assert op.root is not None  # noqa: S101 - see the callers
    return rank.roster.rank_of(op.root) or 0


def is_in_memory(rank: LocalRank, op: Op, jobs: Jobs) -> bool:
    """Return whether all ranks are at this agent; the same at all of them."""
    return op.codec is None and rank.only_member == jobs.me and rank.size > 1


def is_by_machines(rank: LocalRank, op: Op) -> bool:
    """Return whether machines take part in the op, not ranks; the same at all ranks."""
    return op.codec is None and bool(rank.machines) and op.call.kind in BY_MACHINES


async def _run_by_machines(rank: LocalRank, op: Op, jobs: Jobs) -> None:
    """Run the op among ranks of which several are at one agent, and others elsewhere."""
    await trio.lowlevel.checkpoint_if_cancelled()
    firsts, mine = [ranks[0] for ranks in rank.machines], rank.mates
    attempt, place = attempt_of(rank.roster, op.number), rank.place_here
    part = replace(_part_of(rank, op, mine), folds=_fold_of(op, mine))
    is_roots = op.root is not None and _root_of(rank, op) in mine
    if len(mine) > 1:
        jobs.recall_others(rank)

    async def run(source: memoryview, fold: SourceFold | None = None) -> None:
        if op.begun is not None:  # the library has folded what all here have brought
            begun, op.begun = op.begun, None
            await begun.finish()
            return
        if fold is not None and not op.kind.reduces:
            await fold.finish()
            await trio.lowlevel.checkpoint_if_cancelled()  # V3: a view came as values were copied
            fold = None
        plan = _plan_of(rank, op)
        to, from_ = await rank.lanes.open(
            [firsts[at] for at in plan.sends], [firsts[at] for at in plan.receives], jobs.rendezvous
        )
        await run_plan(
            plan,
            {at: to[firsts[at]] for at in plan.sends},
            {at: from_[firsts[at]] for at in plan.receives},
            _header(rank, op),
            source=source,
            result=op.result.memory,
            dtype=op.request.wire_dtype if op.kind.reduces else "",
            reduction=op.request.call.reduction or "sum",
            fold=fold,
        )

    if len(mine) == 1:
        await run(_source_of(op))
    elif is_roots:
        other = await jobs.meetings.take_part(attempt, place, len(mine), part)
        await _take_result(rank, op, other)
        if not place:
            await trio.lowlevel.checkpoint_if_cancelled()  # V3: a view came as values were copied
            await run((op.shared or op.result).memory.toreadonly())
    else:
        first = await jobs.meetings.relay(
            *(attempt, place, len(mine), part), run=run, traffic=lambda: sum(rank.lanes.traffic)
        )
        await _take_result(rank, op, first if op.holds else None)


def _fold_of(op: Op, mine: tuple[int, ...]) -> Together | None:
    """Return what the ranks of this agent do with their values before one meets the network."""
    if op.call.kind == "broadcast":
        return None
    if op.kind.bound:
        itemsize = WIRE_DTYPES[op.request.wire_dtype].itemsize
        return plan_block(tuple(part * itemsize for part in op.request.parts), mine)
    return plan_fold(0 if op.source is None else op.source.nbytes, len(mine))


async def _run_in_memory(rank: LocalRank, op: Op, jobs: Jobs) -> None:
    """Run the op among ranks that are all at this agent."""
    await trio.lowlevel.checkpoint_if_cancelled()
    jobs.recall_others(rank)
    part = _part_of(rank, op, range(rank.size))
    other = await jobs.meetings.take_part(
        attempt_of(rank.roster, op.number), rank.rank or 0, rank.size, part
    )
    await _take_result(rank, op, other)


def _meet(rank: LocalRank, op: Op, jobs: Jobs) -> Taking | None:
    """Take part among ranks of this agent at once, if no other has called something else."""
    if op.call.kind == "broadcast" or rank.rank is None:
        return None
    part = _part_of(rank, op, range(rank.size))
    return jobs.meetings.meet(attempt_of(rank.roster, op.number), rank.rank, rank.size, part)


def _part_of(rank: LocalRank, op: Op, mine: Sequence[int]) -> RankPart:
    """Return what a rank brings, among the ranks of this agent."""
    root, kind = 0 if op.root is None else _root_of(rank, op), op.call.kind
    if kind == "broadcast":
        op.holds = rank.id in {op.root, *op.receivers}
        if not op.holds and len(mine) < rank.size:
            op.holds = _passes_on(rank, op, mine)
    elif kind == "reduce":
        op.holds = root == rank.rank
    if op.kind.row:
        op.result = structs.replace(op.result, nbytes=rank.size * op.row_bytes)
    return RankPart(
        request=op.request,
        source=NOTHING.memory if op.source is None else op.source.memory,  # only read (I8)
        result=NOTHING if op.result.is_input else op.result,
        root=mine.index(root) if root in mine else 0,
        gets=op.holds,
        describe=partial(rank.roster.describe, rank.id),
    )


def _passes_on(rank: LocalRank, op: Op, mine: Sequence[int]) -> bool:
    """Return whether a broadcast's values come by here on their way to other machines' ranks."""
    here = _setting(rank, op)
    distance, reach = (here.rank - here.root) % here.size, here.reach or 0
    return mine[0] == rank.rank and distance <= reach > 0


async def _take_result(rank: LocalRank, op: Op, other: KeptResult | None) -> None:
    """Take the result of another rank of this agent, if there is one: an alias of it, or a copy."""
    if other is None or other.arena is None:
        return
    alias = None
    if other.nbytes >= SHARED_BYTES and other.nbytes == op.result.nbytes:  # else one has lied
        alias = rank.arenas.outputs.adopt(other.arena)
    if alias is None:
        await copy_result(op.request, other, op.result)
    else:
        op.shared = structs.replace(op.result, arena=alias)


async def run_on_lanes(rank: LocalRank, op: Op, plan: RankPlan, rendezvous: LaneRendezvous) -> None:
    """Run a plan of the op over the lanes that it needs."""
    await trio.lowlevel.checkpoint_if_cancelled()  # V3: a view came as the plan before it ended
    kind = op.kind
    to, from_ = await rank.lanes.open(plan.sends, plan.receives, rendezvous)
    await run_plan(
        plan,
        to,
        from_,
        _header(rank, op),
        source=_table_of(rank, op) if kind.row and kind.reduces else _source_of(op),
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
    """Return whether the ranks must measure their edges; for two, all strategies are alike."""
    places = len(rank.machines) or rank.size
    may = places > 2 and op.codec is None  # noqa: PLR2004 - as it says
    return may and asks_for_costs(op.call) and rank.costs.is_due(op.number)


def asks_for_costs(call: Call) -> bool:
    """Return whether the ranks of a call measure their edges if that is due."""
    return call.kind in {"all_reduce", "barrier"} and call.strategy in {"", "hierarchical", "chain"}


def _source_of(op: Op) -> memoryview:
    return memoryview(b"") if op.source is None else op.source.memory.toreadonly()


def _table_of(rank: LocalRank, op: Op) -> memoryview:
    """Return a table with our row and zeros; the sum of all tables has the rows of all ranks."""
    table, place = bytearray(rank.size * op.row_bytes), rank.rank or 0
    table[place * op.row_bytes : (place + 1) * op.row_bytes] = _source_of(op)
    return memoryview(table).toreadonly()


def _header(rank: LocalRank, op: Op) -> RecordHeader:
    return RecordHeader(0, rank.roster.number, op.number, 0, rank.fingerprint, rank.ledger.ended)
