"""Runs one op of one rank: try, wait for the leader where it is stuck, try again, or fetch.

A straight line from the request to the reply; what comes next is decided in
`pmesh.core.jobs.attempt`.
"""

from dataclasses import replace
from typing import TypeAlias, assert_never

import trio

from pmesh.agent.jobs.driver import Jobs
from pmesh.agent.jobs.op_layout import NOTHING, Op, check_request, lay_out, let_go
from pmesh.agent.jobs.op_network import run_on_network
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.jobs.retained import fetch_result
from pmesh.core.jobs import attempt as attempts
from pmesh.core.jobs.attempt import Fail, Failed, Fetch, RequestView, Run, TellLate, Wait
from pmesh.core.values import OpOutcome, Verdict
from pmesh.core.wire.local import OpDone, OpFailed, StartOp
from pmesh.errors import LaneBroken, ProtocolError, UsageError
from pmesh.ids import OpNumber
from pmesh.net.lanes.lane import CallsDiffer
from pmesh.net.local.arenas import Arena

TELL_AFTER_OPS = 8  # so often a heartbeat goes ahead of time, while nothing else tells the marks
LOOK_AGAIN_S = 0.1  # while there are too few ranks: half a heartbeat

Reply: TypeAlias = tuple[OpDone | OpFailed, Arena | None]
"""The reply, and the output arena that it names; it stays until the next op has ended."""


async def run_op(rank: LocalRank, request: StartOp, jobs: Jobs) -> Reply:
    """Run the op to its end, the same at all ranks.

    Raises:
        ProtocolError: no pmesh client would send this request.
    """
    if rank.late_failure is not None:  # I5
        return _failed(request.op, attempts.tell_late(rank))
    if request.op != rank.ledger.started + 1:
        raise ProtocolError(f"op {request.op} after op {rank.ledger.started}")
    check_request(rank, request)
    try:
        op = await lay_out(rank, request)
    except (UsageError, OSError) as e:  # OSError: the system has no memory or descriptor left
        op = _doomed(request, Verdict("UsageError", f"rank {rank.rank}: {e}", (rank.id,)))
    attempts.start(rank, op, trio.current_time())
    while True:
        attempts.begin_attempt(rank, op, trio.current_time())
        with rank.attempt():
            with trio.move_on_at(op.deadline):
                return await _attempt(rank, op, jobs)
            verdict = attempts.timed_out(rank, op, jobs.progress, jobs.newcomers(rank))
            await _await_view(rank, verdict, op.number, jobs)


def _doomed(request: StartOp, verdict: Verdict) -> Op:
    return Op(
        number=request.op,
        call=request.call,
        timeout_s=request.timeout_s,
        request=request,
        source=None,
        result=NOTHING,
        doomed=verdict,
    )


async def _attempt(rank: LocalRank, op: Op, jobs: Jobs) -> Reply:
    """One try. Whatever can't go on waits here for the view change that cancels it."""
    try:
        while True:
            step = attempts.next_step(
                rank,
                op,
                newcomers=lambda: jobs.newcomers(rank),
                retained_bytes=rank.retained_bytes,
            )
            match step:
                case Fail(outcome):
                    let_go(rank, op, keep=None)
                    return _failed(op.number, attempts.end_failed(rank, op, outcome))
                case TellLate():
                    let_go(rank, op, keep=None)
                    return _failed(op.number, attempts.tell_late(rank))
                case Wait() as wait:
                    await _wait(rank, wait, jobs)
                    continue
                case RequestView(verdict, number):
                    await _await_view(rank, verdict, number, jobs)
                case Fetch(outcome):
                    await _fetch(rank, op, outcome, jobs)
                case Run():
                    _note_run(rank, op, jobs)
                    await run_on_network(rank, op, jobs)
                case _:
                    assert_never(step)
            await rank.unfenced()
            return _deliver(rank, op, jobs)
    except CallsDiffer as e:
        await trio.lowlevel.checkpoint_if_cancelled()  # by a view: it has settled what differed
        number = OpNumber(e.op)
        await _await_view(rank, attempts.differs(rank, number, str(e)), number, jobs)
    except LaneBroken as e:  # wait for the view without the lost neighbour
        await trio.sleep(attempts.LANE_GRACE_S)
        jobs.event_log.note("lane broken", str(e), job=rank.roster.job, op=op.number)
        await _await_view(rank, attempts.break_lanes(rank, op, str(e)), op.number, jobs)
    raise AssertionError("a view ends the wait for it")


async def _await_view(rank: LocalRank, verdict: Verdict | None, op: int, jobs: Jobs) -> None:
    rank.request_view(verdict, op)
    jobs.poke()
    await trio.sleep_forever()


async def _wait(rank: LocalRank, wait: Wait, jobs: Jobs) -> None:
    if wait.what == "ranks":  # who waits is told by heartbeats, five a second
        await trio.sleep(LOOK_AGAIN_S)
        return
    if wait.what == "room":
        jobs.beat()
    await rank.changed()


def _failed(op: OpNumber, failed: Failed) -> Reply:
    return OpFailed(op, failed.verdict, failed.consumed, failed.world), None


def _deliver(rank: LocalRank, op: Op, jobs: Jobs) -> Reply:
    """V3: no await lies between the end of the fence and the ledger's entry."""
    rank.complete(op.number, op.result, op.contributors, holds=op.holds)
    arena = None if op.result.is_input else op.result.arena
    lent = arena is not None and op.request.borrows and rank.arenas.outputs.lend(arena)
    let_go(rank, op, keep=op.result)
    rank.pass_barrier(op.number, op.kind)
    if rank.ledger.ops and len(rank.ledger.ops) % TELL_AFTER_OPS == 0:
        jobs.beat()
    if rank.halted_since is not None:
        _note_halt(rank, op, jobs)
    number = -1 if arena is None else arena.number
    return OpDone(op.number, number, rank.see(op.contributors), op.clipped, lent), arena


def _note_halt(rank: LocalRank, op: Op, jobs: Jobs) -> None:
    """An op has ended that a view change had interrupted."""
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


def _note_run(rank: LocalRank, op: Op, jobs: Jobs) -> None:
    op.attempts += 1
    if op.attempts > 1:
        job = rank.roster.job
        text = f"op {op.number} of job {job!r} runs again, among {_ranks(rank.size)}"
        jobs.event_log.note("op rerun", text, job=job, op=op.number)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


async def _fetch(rank: LocalRank, op: Op, outcome: OpOutcome, jobs: Jobs) -> None:
    """O2: the op has been completed by others."""
    op.contributors, op.holds = outcome.contributors, op.gets
    if op.result.is_input or not op.gets:
        return  # a broadcast's root had the result all along, and I8: its input is never written
    if op.is_table:
        op.result = replace(op.result, nbytes=len(op.contributors) * op.row_bytes)
    job = rank.roster.job
    text = f"op {op.number} of job {job!r} had ended elsewhere: its result is fetched"
    jobs.event_log.note("op fetched", text, job=job, op=op.number)
    await fetch_result(rank, op.request.call, op.result.memory, outcome, jobs)
