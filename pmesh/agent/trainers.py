"""One session of a local program, from its first request to its end."""

import math

import trio

from pmesh.agent.jobs import Candidate, Jobs
from pmesh.agent.ops import run_op
from pmesh.agent.ranks import LocalRank
from pmesh.core.session import (
    SESSION_VERSION,
    ArenaGone,
    ArenaGranted,
    Connect,
    DropArena,
    Joined,
    Leave,
    Refused,
    StartOp,
    StillWaiting,
    WantArena,
)
from pmesh.core.views import Verdict
from pmesh.errors import ProtocolError, UsageError
from pmesh.ids import JobName, OpNumber
from pmesh.net.arena_pools import SessionArenas
from pmesh.net.arenas import Arena
from pmesh.net.sessions import Session

LOOK_S = 0.25  # how soon a trainer's death is seen while it waits; costs nothing per op
SAY_EVERY_S = 10.0  # I6: a line that says on whom a call waits
PREDECESSOR_S = 2.0  # a job of the same name that is just ending makes way in this time


async def serve_trainer(session: Session, request: Connect, jobs: Jobs) -> None:
    """A trainer's session: it waits for its job to begin, then runs ops until it leaves."""
    arenas = SessionArenas()
    try:
        if request.version != SESSION_VERSION:
            await _refuse(session, "ProtocolVersionMismatch", _other_version(request.version))
            return
        if not await _previous_run_ended(JobName(request.job), request.timeout_s, jobs):
            await _refuse(session, "JobRunning", _why_running(JobName(request.job), jobs))
            return
        rank = await _wait_for_job(session, request, arenas, jobs)
        if rank is not None:
            await _serve_rank(session, rank, jobs)
    finally:
        for abandoned in [r for r in jobs.ranks if r.arenas is arenas]:
            abandoned.give_up_results()  # the agent ends
        with trio.CancelScope(shield=True):
            await arenas.aclose()


async def _refuse(session: Session, error: str, message: str) -> None:
    await session.send(Refused(Verdict(error, message)))


def _other_version(version: int) -> str:
    return (
        f"the trainer speaks session version {version}, the agent {SESSION_VERSION}: "
        "install the same pmesh for both, then 'pmesh down' and 'pmesh up'"
    )


async def _previous_run_ended(job: JobName, timeout_s: float, jobs: Jobs) -> bool:
    """A run that has lost ranks is ending: wait for that. One that is whole goes on."""
    now = trio.current_time()
    whole_until, over_at = now + min(PREDECESSOR_S, timeout_s), now + min(timeout_s, 1e9)
    while (roster := jobs.membership.view.roster_of(job)) is not None:
        now = trio.current_time()
        if now >= over_at or (not roster.lost and now >= whole_until):
            return False
        await trio.sleep(LOOK_S / 5)
    return True


def _why_running(job: JobName, jobs: Jobs) -> str:
    roster = jobs.membership.view.roster_of(job)
    if roster is None or not roster.lost:
        return f"job {job!r} is running already; nobody can join it while it runs"
    left = [i for i in range(len(roster.trainers)) if i not in roster.lost_ranks]
    names = ", ".join(f"rank {i} ({roster.names[i]})" for i in left)
    return f"an earlier run of job {job!r} has failed but not ended: stop the scripts of {names}"


async def _wait_for_job(
    session: Session, request: Connect, arenas: SessionArenas, jobs: Jobs
) -> LocalRank | None:
    """Wait until the roster is committed; None if the trainer was refused or has gone."""
    candidate = jobs.enlist(JobName(request.job), request.wait_for, request.program, arenas)
    try:
        refusal = await _wait_as_candidate(session, request, candidate, jobs)
    except BaseException:  # the trainer is gone, or the agent ends
        jobs.withdraw(candidate)
        raise
    if candidate.rank is None:
        jobs.withdraw(candidate)  # first: while we tell the trainer, the job might begin with it
    if refusal is not None:
        await session.send(refusal)
    return candidate.rank


async def _wait_as_candidate(
    session: Session, request: Connect, candidate: Candidate, jobs: Jobs
) -> Refused | None:
    began = said_at = trio.current_time()
    while candidate.rank is None and not session.trainer_gone():
        now = trio.current_time()
        if now - began >= request.timeout_s:
            text = _too_few(candidate, request.timeout_s, jobs)
            return Refused(Verdict("NotEnoughRanks", text))
        if _has_begun(candidate.job, jobs):
            return Refused(Verdict("JobRunning", _why_running(candidate.job, jobs)))
        if now - said_at >= SAY_EVERY_S:
            said_at = now
            await session.send(StillWaiting(-1, now - began, _without(candidate, jobs)))
        with trio.move_on_after(min(LOOK_S, began + request.timeout_s - now)):
            await candidate.joined.wait()
    return None


def _has_begun(job: JobName, jobs: Jobs) -> bool:
    """The job has begun without one that came too late for the view that began it."""
    roster = jobs.membership.view.roster_of(job)
    return roster is not None and not roster.lost


def _without(candidate: Candidate, jobs: Jobs) -> tuple[str, ...]:
    counts = jobs.waiting_for(candidate.job)
    return tuple(seat.name for seat in jobs.membership.view.seats if not counts.get(seat.member, 0))


def _too_few(candidate: Candidate, timeout_s: float, jobs: Jobs) -> str:
    counts = jobs.waiting_for(candidate.job)
    idle = ", ".join(_without(candidate, jobs))
    machines = f"machines without one: {idle}" if idle else "every machine of the mesh has one"
    return (
        f"{sum(counts.values())} of {candidate.wait_for} trainers of job {candidate.job!r} came "
        f"within {timeout_s:g} s; {machines}"
    )


async def _serve_rank(session: Session, rank: LocalRank, jobs: Jobs) -> None:
    """Ops one after the other, in a straight line; then results are kept until nobody asks."""
    view = jobs.membership.view
    why = "is lost: its trainer died"
    garbage: ProtocolError | None = None
    try:
        await session.send(Joined(rank.rank, rank.size, rank.roster.names, view))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, session, rank, jobs)
            await _serve_requests(session, rank, jobs)
            why = "has left the job"
            nursery.cancel_scope.cancel()
    except* ProtocolError as e:
        why = "is lost: its trainer sent garbage"
        garbage = ProtocolError(str(e.exceptions[0]))
    except* (trio.EndOfChannel, trio.BrokenResourceError):
        pass
    finally:
        rank.leaving = rank.leaving or (why, trio.current_time())
    await session.aclose()
    await rank.released.wait()  # until then the others may ask for its results (O2)
    if garbage is not None:
        raise garbage


async def _serve_requests(session: Session, rank: LocalRank, jobs: Jobs) -> None:
    granted: set[int] = set()  # output arenas that the trainer has mapped
    while True:
        match request := await session.receive():
            case StartOp():
                await _serve_op(session, rank, request, jobs, granted)
            case WantArena(nbytes):
                await _grant_input(session, rank.arenas, nbytes)
            case DropArena(number):
                rank.arenas.inputs.drop(number)
            case Leave():
                return
            case _:
                raise ProtocolError(f"a trainer that has joined sent {type(request).__name__}")


async def _serve_op(
    session: Session, rank: LocalRank, request: StartOp, jobs: Jobs, granted: set[int]
) -> None:
    rank.busy_since = trio.current_time()
    try:
        reply, arena = await run_op(rank, request, jobs)
    finally:
        rank.busy_since = None
    for number in rank.arenas.outputs.take_gone():
        granted.discard(number)
        await session.send(ArenaGone(number))
    if arena is not None and arena.number not in granted:
        granted.add(arena.number)
        await _grant(session, arena)
    await session.send(reply)


async def _grant_input(session: Session, arenas: SessionArenas, nbytes: int) -> None:
    try:
        arena = await arenas.inputs.create(nbytes)
    except (UsageError, OSError) as e:  # OSError: the system has no memory or descriptor left
        await _refuse(session, "UsageError", str(e))
        return
    await _grant(session, arena)


async def _grant(session: Session, arena: Arena) -> None:
    granted = ArenaGranted(arena.number, arena.kind, arena.nbytes)
    await session.send(granted, (arena.descriptor,))


async def _watch(session: Session, rank: LocalRank, jobs: Jobs) -> None:
    """What the op's own straight line can't see while it waits for the network."""
    said = 1
    while True:
        await trio.sleep(LOOK_S)
        if rank.busy_since is None:
            said = 1
            continue
        if session.trainer_gone() and rank.leaving is None:
            rank.leaving = ("is lost: its trainer died in the middle of an op", trio.current_time())
        waited_s = trio.current_time() - rank.busy_since
        if waited_s >= said * SAY_EVERY_S:
            said = math.floor(waited_s / SAY_EVERY_S) + 1
            op = OpNumber(rank.ledger.started)
            late = jobs.late_ranks(rank, op)
            names = tuple(f"rank {r} ({rank.roster.names[r]})" for r in late)
            await session.send(StillWaiting(op, waited_s, names))
