"""Runs one op of one rank: try, wait for the leader where it is stuck, try again, or fetch.

A straight line from the request to the reply. Nothing here decides that an op has failed: what
goes wrong becomes a concern, and the view change that it causes says the same to all ranks (O3).
"""

import itertools
from dataclasses import dataclass
from typing import Protocol

import trio

from pmesh.agent.lane_desk import End, LaneDesk
from pmesh.agent.ranks import LocalRank, Result
from pmesh.core.messages import AskResult, Concern
from pmesh.core.records import fingerprint
from pmesh.core.reductions import WIRE_DTYPES, check_reduction
from pmesh.core.session import OpDone, OpFailed, StartOp
from pmesh.core.views import Verdict
from pmesh.errors import LaneBroken, ProtocolError, UsageError
from pmesh.ids import Member, OpNumber, Rank
from pmesh.net.arenas import Arena
from pmesh.net.collectives import CallsDiffer, RingPosition, all_reduce, broadcast
from pmesh.net.lanes import Lane

MAX_UNSTABLE_OPS = 32  # half of the arenas that a session may have; beyond it a start waits (O2)
MAX_UNSTABLE_BYTES = 256 * 1024 * 1024  # likewise; one op may always be retained, of any size
TELL_AFTER_OPS = 8  # so often a heartbeat goes ahead of time, while nothing else tells the marks
LANE_GRACE_S = 1.0  # a lane ends before its machine's link does: wait for the better reason
COPIED_BYTES = 1024 * 1024  # at once: some 0.1 ms, so that the event loop stays responsive
ASK_AGAIN_S = 1.0  # five heartbeats: a holder that is one view behind has caught up
KINDS = ("all_reduce", "broadcast", "barrier")
LANE_ATTEMPTS = 3  # an op that breaks its lanes thrice fails

_NOTHING = Result(arena=None, nbytes=0)


class Surroundings(Protocol):
    """What an op needs of its agent (`pmesh.agent.jobs`)."""

    desk: LaneDesk

    def poke(self) -> None:
        """A concern has arisen."""
        ...

    def beat(self) -> None:
        """Tell the others how far this rank has come."""
        ...

    def ask(self, member: Member, message: AskResult) -> None:
        """Send on the link to the member."""
        ...

    def neighbour(self, rank: LocalRank, other: Rank) -> LocalRank | None:
        """Another rank of the same job, if it lives here too."""
        ...

    def late_ranks(self, rank: LocalRank, op: OpNumber) -> tuple[Rank, ...]:
        """The ranks that are not known to have started the op."""
        ...


@dataclass(slots=True, kw_only=True)
class _Op:
    """A request, its regions, and how often its lanes have broken."""

    number: OpNumber
    request: StartOp
    source: Result | None
    result: Result
    broken: int = 0
    doomed: Verdict | None = None
    """Why this rank can't run it at all: a matter for all ranks (O3)."""


async def run_op(
    rank: LocalRank, request: StartOp, around: Surroundings
) -> tuple[OpDone | OpFailed, Arena | None]:
    """Run the op to its end, the same at all ranks.

    Returns the reply, and the output arena that it names; it stays as it is until the next call.

    Raises:
        ProtocolError: no pmesh client would send this request.
    """
    number = request.op
    if rank.owed is not None:  # I5: it had returned here before another rank called it differently
        owed, rank.owed = rank.owed, None
        return OpFailed(number, owed, consumed=False), None
    if number != rank.ledger.started + 1:
        raise ProtocolError(f"op {number} after op {rank.ledger.started}")
    _check(rank, request)
    try:
        op = await _lay_out(rank, request)
    except (UsageError, OSError) as e:  # OSError: the system has no memory or descriptor left
        doomed = Verdict("UsageError", f"rank {rank.rank}: {e}", (rank.rank,))
        op = _Op(number=number, request=request, source=None, result=_NOTHING, doomed=doomed)
    rank.start(number, request.call)
    patience_s = min(request.timeout_s, 1e9)
    deadline = trio.current_time() + patience_s
    while (verdict := rank.verdict_on(number)) is None:
        if rank.owed is not None and not rank.holders_of(number):
            # I5: the view has told us of it after this call began. Nobody has this op's result, and
            # nothing of an attempt under the new number has been sent: it has not begun.
            owed, rank.owed = rank.owed, None
            rank.take_back(number)
            _let_go(rank, op, keep=None)
            return OpFailed(number, owed, consumed=False), None
        if rank.holders_of(number):  # it can't fail any more: a late fetch is only tried again
            deadline = trio.current_time() + patience_s
        with rank.attempt():
            with trio.move_on_at(deadline):
                await _attempt(rank, op, around)
                return _deliver(rank, op, around)
            # I6: not raised here alone (O3); the op is settled by the next view.
            _raise_concern(rank, op, _timed_out(rank, op, around), around)
            await trio.sleep_forever()
    rank.fail(number, verdict)
    _let_go(rank, op, keep=None)
    cause, rank.owed = rank.owed or verdict, None  # an earlier op's failure is this one's cause
    return OpFailed(number, cause), None


def _check(rank: LocalRank, request: StartOp) -> None:
    """Refuse what no client of ours sends: a trainer must not be able to end its agent."""
    call = request.call
    if call.kind not in KINDS or (call.kind == "broadcast" and not 0 <= call.root < rank.size):
        raise ProtocolError(f"op {request.op} is {call}")
    try:
        if call.kind != "broadcast":
            check_reduction(call.reduction or "sum", request.wire_dtype)
    except ValueError as e:
        raise ProtocolError(f"op {request.op} is {call}: {e}") from e


async def _lay_out(rank: LocalRank, request: StartOp) -> _Op:
    """Find the input region, and a free output region where the op has one."""
    nbytes = request.count * WIRE_DTYPES[request.wire_dtype].itemsize
    is_root = request.call.kind == "broadcast" and request.call.root == rank.rank
    needs_input = nbytes > 0 and (is_root or request.call.kind != "broadcast")
    if needs_input != (request.arena >= 0):
        raise ProtocolError(f"op {request.op} comes with arena {request.arena}")
    source = None
    if needs_input:
        arena = rank.arenas.inputs.hold(request.arena, nbytes)
        source = Result(arena=arena, nbytes=nbytes, is_input=True)
    result = (source or _NOTHING) if is_root else _NOTHING
    if nbytes and not is_root:
        try:
            result = Result(arena=await rank.arenas.outputs.acquire(nbytes), nbytes=nbytes)
        except (UsageError, OSError):
            if source is not None:
                rank.let_go(source)
            raise
    return _Op(number=request.op, request=request, source=source, result=result)


def _let_go(rank: LocalRank, op: _Op, *, keep: Result | None) -> None:
    """Give the op's regions back, but for the one that holds its result."""
    regions = [op.result] if op.source is None or op.source is op.result else [op.source, op.result]
    for region in regions:
        if region is not keep:
            rank.let_go(region)


def _deliver(rank: LocalRank, op: _Op, around: Surroundings) -> tuple[OpDone, Arena | None]:
    """V3: no await lies between the end of the fence and the ledger's entry."""
    rank.complete(op.number, op.result)
    _let_go(rank, op, keep=op.result)
    everyone = tuple(Rank(i) for i in range(rank.size))
    if rank.size == 1:
        rank.stabilize(op.number)
    elif op.request.call.kind != "broadcast":
        # O2: nobody gets through without everyone having started, and so ended what was before.
        rank.stabilize(op.number - 1)
    if len(rank.ledger.ops) % TELL_AFTER_OPS == 0:
        around.beat()
    arena = None if op.result.is_input else op.result.arena
    return OpDone(op.number, -1 if arena is None else arena.number, everyone), arena


async def _attempt(rank: LocalRank, op: _Op, around: Surroundings) -> None:
    """One try. Whatever can't go on waits here for the view change that cancels it."""
    try:
        if op.doomed is not None:
            _raise_concern(rank, op, op.doomed, around)
            await trio.sleep_forever()
        await _wait_for_room(rank, around)
        holders = rank.holders_of(op.number)
        if holders:
            await _fetch(rank, op, holders, around)
        else:
            await _run_ring(rank, op, await rank.ring(around.desk))
        await rank.unfenced()
    except CallsDiffer as e:
        verdict = Verdict("OpMismatch", f"op {e.op} of job {rank.roster.job!r}: {e}", (rank.rank,))
        _raise_concern(rank, op, verdict, around, number=OpNumber(e.op))
        await trio.sleep_forever()
    except LaneBroken as e:
        await _replace_lanes(rank, op, e, around)


async def _wait_for_room(rank: LocalRank, around: Surroundings) -> None:
    """O2: unstable ops are bounded in number and bytes."""
    while len(rank.ledger.ops) > MAX_UNSTABLE_OPS or rank.retained_bytes > MAX_UNSTABLE_BYTES:
        around.beat()
        await rank.stable_moved.wait()


async def _run_ring(rank: LocalRank, op: _Op, ring: RingPosition) -> None:
    request, mark = op.request, rank.ledger.ended
    if request.call.kind == "broadcast":
        await broadcast(
            ring,
            op=op.number,
            fingerprint=rank.fingerprint,
            completed=mark,
            root=request.call.root,
            buffer=op.result.memory,
        )
        return
    await all_reduce(
        ring,
        op=op.number,
        fingerprint=rank.fingerprint,
        completed=mark,
        source=memoryview(b"") if op.source is None else op.source.memory.toreadonly(),
        result=op.result.memory,
        dtype=request.wire_dtype,
        reduction=request.call.reduction or "sum",
    )


async def _fetch(rank: LocalRank, op: _Op, holders: tuple[Rank, ...], around: Surroundings) -> None:
    """O2: the op has been completed by others; take its result from one of them."""
    holder = holders[0]
    if op.result.is_input:
        return  # a broadcast's root had the result all along, and I8: its input is never written
    near = around.neighbour(rank, holder)
    if near is not None:
        await _copy(near, op)
        return
    lane = await _ask_for_lane(rank, op, holders, around)
    try:
        ring = RingPosition(rank=1, size=2, roster=rank.roster.number, from_previous=lane)
        await broadcast(
            ring,
            op=op.number,
            fingerprint=rank.fingerprint,
            completed=rank.ledger.ended,
            root=0,
            buffer=op.result.memory,
        )
    finally:
        rank.count(lane)
        lane.close()


async def _ask_for_lane(
    rank: LocalRank, op: _Op, holders: tuple[Rank, ...], around: Surroundings
) -> Lane:
    """Ask one holder after the other: one that has not installed our view yet does not answer."""
    for holder in itertools.cycle(holders):
        edge = rank.edge(holder, rank.rank, op.number)
        ask = AskResult(edge.job, edge.born, edge.number, op.number, holder, rank.rank)
        around.ask(rank.roster.trainers[holder].member, ask)
        with trio.move_on_after(ASK_AGAIN_S):
            return await around.desk.take(End(edge, sending=False))
    raise AssertionError("a cycle has no end")


async def _copy(near: LocalRank, op: _Op) -> None:
    """The result of a rank on this machine."""
    retained, report = near.result_of(op.number), near.ledger.ops.get(op.number)
    if report is not None and report.call != op.request.call:
        raise CallsDiffer(op.number, f"rank {near.rank}")
    if retained is None or retained.nbytes != op.result.nbytes:
        raise LaneBroken(f"the result of op {op.number} is gone")
    source, target = retained.memory, op.result.memory
    for begin in range(0, op.result.nbytes, COPIED_BYTES):
        target[begin : begin + COPIED_BYTES] = source[begin : begin + COPIED_BYTES]
        await trio.lowlevel.checkpoint()


async def serve_result(rank: LocalRank, ask: AskResult, around: Surroundings) -> None:
    """O2: send a retained result to a rank that missed the end of its op."""
    retained = rank.result_of(ask.op)
    report = rank.ledger.ops.get(ask.op)
    if retained is None or report is None or ask.number != rank.roster.number:
        return  # another view has come: the asker will ask again under its number
    edge = rank.edge(rank.rank, ask.to_rank, ask.op)
    around.desk.offer(edge, rank.roster.trainers[ask.to_rank].member)
    lane = await around.desk.take(End(edge, sending=True))
    try:
        ring = RingPosition(rank=0, size=2, roster=edge.number, to_next=lane)
        await broadcast(
            ring,
            op=ask.op,
            fingerprint=fingerprint(report.call),
            completed=rank.ledger.ended,
            root=0,
            buffer=retained.memory,
        )
    finally:
        rank.count(lane)
        lane.close()


async def _replace_lanes(rank: LocalRank, op: _Op, error: LaneBroken, around: Surroundings) -> None:
    """Wait for the view without the lost neighbour; if it lives, ask for new lanes."""
    await trio.sleep(LANE_GRACE_S)
    op.broken += 1
    give_up = op.broken >= LANE_ATTEMPTS
    verdict = Verdict("LaneBroken", str(error), (rank.rank,)) if give_up else None
    _raise_concern(rank, op, verdict, around)
    await trio.sleep_forever()


def _raise_concern(
    rank: LocalRank,
    op: _Op,
    verdict: Verdict | None,
    around: Surroundings,
    *,
    number: OpNumber | None = None,
) -> None:
    roster = rank.roster
    about = op.number if number is None else number
    rank.concern = Concern(roster.job, roster.born, roster.number, verdict, about)
    around.poke()


def _timed_out(rank: LocalRank, op: _Op, around: Surroundings) -> Verdict:
    late = around.late_ranks(rank, op.number)
    names = ", ".join(f"rank {r} ({rank.roster.names[r]})" for r in late)
    why = f"not started by {names}" if late else "every rank has started it: the network is slow"
    return Verdict(
        "OpTimedOut",
        f"op {op.number} ({op.request.call}) of job {rank.roster.job!r} did not end "
        f"within {op.request.timeout_s:g} s: {why}",
        late,
    )
