"""Runs one op of one rank: try, wait for the leader where it is stuck, try again, or fetch.

A straight line from the request to the reply. Nothing here decides that an op has failed: what
goes wrong becomes a concern, and the view change that it causes says the same to all ranks (O3).
"""

from dataclasses import replace

import trio

from pmesh.agent.jobs.op_layout import NOTHING, Op, check_request, lay_out, let_go
from pmesh.agent.jobs.op_network import run_on_network
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.jobs.retained import fetch_result
from pmesh.agent.jobs.surroundings import Surroundings
from pmesh.core.values import OpOutcome, Verdict
from pmesh.core.views.outcomes import BOUND_KINDS
from pmesh.core.wire.link import Concern
from pmesh.core.wire.local import OpDone, OpFailed, StartOp
from pmesh.errors import LaneBroken, ProtocolError, UsageError
from pmesh.ids import OpNumber
from pmesh.net.lanes.collectives import CallsDiffer
from pmesh.net.local.arenas import Arena

MAX_UNSTABLE_OPS = 32  # half of the arenas that a session may have; beyond it a start waits (O2)
MAX_UNSTABLE_BYTES = 256 * 1024 * 1024  # likewise; one op may always be retained, of any size
TELL_AFTER_OPS = 8  # so often a heartbeat goes ahead of time, while nothing else tells the marks
LANE_GRACE_S = 1.0  # a lane ends before its machine's link does: wait for the better reason
NO_BARRIERS = frozenset({"broadcast", "gather", "scatter", "all_to_all"})
LOOK_AGAIN_S = 0.1  # while there are too few ranks: half a heartbeat
LANE_ATTEMPTS = 3  # an op that breaks its lanes thrice fails


async def run_op(
    rank: LocalRank, request: StartOp, around: Surroundings
) -> tuple[OpDone | OpFailed, Arena | None]:
    """Run the op to its end, the same at all ranks.

    Returns the reply, and the output arena that it names; it stays until the next op has ended.

    Raises:
        ProtocolError: no pmesh client would send this request.
    """
    number = request.op
    if rank.owed is not None:  # I5: it had returned here before another rank called it differently
        return _tell_late(rank, number), None
    if number != rank.ledger.started + 1:
        raise ProtocolError(f"op {number} after op {rank.ledger.started}")
    check_request(rank, request)
    try:
        op = await lay_out(rank, request)
    except (UsageError, OSError) as e:  # OSError: the system has no memory or descriptor left
        doomed = Verdict("UsageError", f"rank {rank.rank}: {e}", (rank.id,))
        op = Op(number=number, request=request, source=None, result=NOTHING, doomed=doomed)
    rank.start(number, request.call)
    patience_s = min(request.timeout_s, 1e9)
    deadline = trio.current_time() + patience_s
    while (failure := rank.failure_of(number)) is None:
        elsewhere = rank.result_elsewhere(number)
        if rank.owed is not None and elsewhere is None:
            # I5: the view has told us of it after this call began, and has taken the call back:
            # nobody has its result, and nothing of an attempt under the new number has been sent.
            let_go(rank, op, keep=None)
            return _tell_late(rank, number), None
        if elsewhere is not None:  # it can't fail any more: a late fetch is only tried again
            deadline = trio.current_time() + patience_s
        with rank.attempt():
            with trio.move_on_at(deadline):
                await _attempt(rank, op, around)
                return _deliver(rank, op, around)
            # I6: not raised here alone (O3); the op is settled by the next view.
            _raise_concern(rank, op, _timed_out(rank, op, around), around)
            await trio.sleep_forever()
    consumed = rank.superseded is None
    if consumed:
        rank.fail(failure)
    else:
        rank.take_back(number)  # how the op ends is the others' matter
    let_go(rank, op, keep=None)
    cause = (rank.owed or failure).verdict  # an earlier op's failure is this one's cause
    assert cause is not None  # noqa: S101 - `failure_of` gives only outcomes that have one
    rank.owed = None
    return OpFailed(number, cause, consumed, rank.see(failure.contributors)), None


def _tell_late(rank: LocalRank, number: OpNumber) -> OpFailed:
    owed, rank.owed = rank.owed, None
    assert owed is not None  # noqa: S101 - the callers have looked
    assert owed.verdict is not None  # noqa: S101 - likewise
    # O5: once a later op has ended here, the world is that op's.
    world = rank.see(owed.contributors) if owed.op == rank.ledger.started else None
    return OpFailed(number, owed.verdict, consumed=False, world=world)


def _deliver(rank: LocalRank, op: Op, around: Surroundings) -> tuple[OpDone, Arena | None]:
    """V3: no await lies between the end of the fence and the ledger's entry."""
    rank.complete(op.number, op.result, op.contributors, holds=op.holds)
    arena = None if op.result.is_input else op.result.arena
    lent = arena is not None and op.request.borrows and rank.arenas.outputs.lend(arena)
    let_go(rank, op, keep=op.result)
    if rank.size == 1:
        rank.stabilize(op.number)
    elif op.kind not in NO_BARRIERS:
        # O2: nobody gets through without everyone having started, and so ended what was before.
        rank.stabilize(op.number - 1)
    if rank.ledger.ops and len(rank.ledger.ops) % TELL_AFTER_OPS == 0:
        around.beat()
    if rank.halted_since is not None:
        _note_halt(rank, op, around)
    number = -1 if arena is None else arena.number
    return OpDone(op.number, number, rank.see(op.contributors), op.clipped, lent), arena


def _note_halt(rank: LocalRank, op: Op, around: Surroundings) -> None:
    """An op has ended that a view change had interrupted."""
    since, rank.halted_since = rank.halted_since, None
    halted_s = trio.current_time() - (since or 0.0)
    around.event_log.note(
        "ring stood still",
        f"job {rank.roster.job!r} stood still for {halted_s:.3f} s, until op {op.number} had ended "
        f"among {_ranks(len(op.contributors))}",
        job=rank.roster.job,
        op=op.number,
        duration_s=halted_s,
    )


async def _attempt(rank: LocalRank, op: Op, around: Surroundings) -> None:
    """One try. Whatever can't go on waits here for the view change that cancels it."""
    try:
        if op.doomed is not None:
            _give_up(rank, op, op.doomed, around)
            await trio.sleep_forever()
        await _wait_for_room(rank, around)
        await rank.quorum()
        elsewhere = rank.result_elsewhere(op.number)
        if elsewhere is not None:
            await _fetch(rank, op, elsewhere, around)
        else:
            await _wait_for_ranks(rank, around)
            await _let_newcomers_in(rank, op, around)
            await rank.unfenced()  # V3: our flush answer did not name this op, so nothing leaves
            await _run(rank, op, around)
        await rank.unfenced()
    except CallsDiffer as e:
        await trio.lowlevel.checkpoint_if_cancelled()  # by a view: it has settled what differed
        verdict = Verdict("OpMismatch", f"op {e.op} of job {rank.roster.job!r}: {e}", (rank.id,))
        _raise_concern(rank, op, verdict, around, number=OpNumber(e.op))
        await trio.sleep_forever()
    except LaneBroken as e:
        await _replace_lanes(rank, op, e, around)


def _give_up(rank: LocalRank, op: Op, doomed: Verdict, around: Surroundings) -> None:
    """The op fails everywhere; unless others have completed it (I4), who go on without us then."""
    if rank.result_elsewhere(op.number) is None:
        _raise_concern(rank, op, doomed, around)
        return
    text = f"{rank.roster.describe(rank.id)} is lost: it can't take op {op.number}: "
    lost = Verdict("RankLost", text + doomed.message, (rank.id,))
    _raise_concern(rank, op, lost, around, number=OpNumber(-1))


def _note_run(rank: LocalRank, op: Op, around: Surroundings) -> None:
    op.attempts += 1
    if op.attempts > 1:
        job = rank.roster.job
        text = f"op {op.number} of job {job!r} runs again, among {_ranks(rank.size)}"
        around.event_log.note("op rerun", text, job=job, op=op.number)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


async def _wait_for_room(rank: LocalRank, around: Surroundings) -> None:
    """O2: unstable ops are bounded in number and bytes."""
    while len(rank.ledger.ops) > MAX_UNSTABLE_OPS or rank.retained_bytes > MAX_UNSTABLE_BYTES:
        around.beat()
        await rank.stable_moved.wait()


async def _wait_for_ranks(rank: LocalRank, around: Surroundings) -> None:
    """`min_ranks`: those who wait for the next sync count, or it might never come."""
    least = rank.roster.terms.min_ranks
    while rank.size < least and rank.size + around.newcomers(rank) < least:  # noqa: ASYNC110 - who waits is told by heartbeats, five a second
        await trio.sleep(LOOK_AGAIN_S)


async def _let_newcomers_in(rank: LocalRank, op: Op, around: Surroundings) -> None:
    """O6: a sync under way is where they enter, by a view change; it runs again with them."""
    if op.kind == "sync" and around.newcomers(rank):
        _raise_concern(rank, op, None, around)
        await trio.sleep_forever()


async def _run(rank: LocalRank, op: Op, around: Surroundings) -> None:
    root = None if op.root is None else rank.roster.rank_of(op.root)
    if op.root is not None and root is None:
        _raise_concern(rank, op, _without_root(rank, op), around)
        await trio.sleep_forever()
    if op.kind in BOUND_KINDS and rank.world != rank.roster.ids:
        _raise_concern(rank, op, _without_some(rank, op), around)
        await trio.sleep_forever()
    _note_run(rank, op, around)
    await run_on_network(rank, op, root, around)


def _without_root(rank: LocalRank, op: Op) -> Verdict:
    call = op.request.call
    text = (
        f"op {op.number} ({call}) of job {rank.roster.job!r}: its root, rank {call.root}, is lost"
    )
    return Verdict("RankLost", text)


def _without_some(rank: LocalRank, op: Op) -> Verdict:
    """O4: who is to give and get how much has been said for ranks that are not all there now."""
    lost = tuple(trainer for trainer in rank.world if trainer not in rank.roster.ids)
    text = f"op {op.number} ({op.request.call}) of job {rank.roster.job!r}: its ranks have changed"
    return Verdict("RosterChanged", text, lost)


async def _fetch(rank: LocalRank, op: Op, outcome: OpOutcome, around: Surroundings) -> None:
    """O2: the op has been completed by others."""
    op.contributors, op.holds = outcome.contributors, op.gets
    if op.result.is_input or not op.gets:
        return  # a broadcast's root had the result all along, and I8: its input is never written
    if op.is_table:
        op.result = replace(op.result, nbytes=len(op.contributors) * op.row_bytes)
    job = rank.roster.job
    text = f"op {op.number} of job {job!r} had ended elsewhere: its result is fetched"
    around.event_log.note("op fetched", text, job=job, op=op.number)
    await fetch_result(rank, op.request.call, op.result.memory, outcome, around)


async def _replace_lanes(rank: LocalRank, op: Op, error: LaneBroken, around: Surroundings) -> None:
    """Wait for the view without the lost neighbour; if it lives, ask for new lanes."""
    await trio.sleep(LANE_GRACE_S)
    around.event_log.note("lane broken", str(error), job=rank.roster.job, op=op.number)
    op.broken += 1
    give_up = op.broken >= LANE_ATTEMPTS
    verdict = Verdict("LaneBroken", str(error), (rank.id,)) if give_up else None
    _raise_concern(rank, op, verdict, around)
    await trio.sleep_forever()


def _raise_concern(
    rank: LocalRank,
    op: Op,
    verdict: Verdict | None,
    around: Surroundings,
    *,
    number: OpNumber | None = None,
) -> None:
    roster = rank.roster
    about = op.number if number is None else number
    rank.concern = Concern(roster.job, roster.born, roster.number, verdict, about)
    around.poke()


def _timed_out(rank: LocalRank, op: Op, around: Surroundings) -> Verdict:
    what = f"op {op.number} ({op.request.call}) of job {rank.roster.job!r} did not end "
    what += f"within {op.request.timeout_s:g} s: "
    too_few = describe_shortage(rank, around.newcomers(rank))
    if too_few:
        return Verdict("NotEnoughRanks", what + too_few)
    late = around.marks.late(rank, op.number)
    names = ", ".join(map(rank.roster.describe, late))
    why = f"not started by {names}" if late else "every rank has started it: the network is slow"
    return Verdict("OpTimedOut", what + why, late)


def describe_shortage(rank: LocalRank, newcomers: int) -> str:
    """Why ops wait for more ranks; empty while they need not."""
    roster = rank.roster
    if not roster.quorate:
        voters = len(roster.primary.voters)
        return f"this side of a partition has {rank.size} of {voters} ranks, which is no majority"
    if not rank.in_force.is_set():
        return "a majority, which has not been seen to have agreed to the last change"
    if rank.size + newcomers < roster.terms.min_ranks:
        return f"{rank.size} of at least {roster.terms.min_ranks} ranks (min_ranks) are here"
    return ""
