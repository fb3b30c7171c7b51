"""One session of a local program, from its first request to its end."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import trio

from pmesh.agent.containment import Contain
from pmesh.agent.grants import SAY_EVERY_S, Grants
from pmesh.agent.jobs.driver import Jobs, WaitingRank
from pmesh.agent.jobs.op_task import run_op
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.jobs.repeats import RepeatedCalls
from pmesh.core.jobs.comparing import describe_difference
from pmesh.core.jobs.jobs import LEFT
from pmesh.core.jobs.progress import of_job
from pmesh.core.jobs.rank import COME_BACK
from pmesh.core.values import MAX_JOB_BYTES, Comparison, Verdict
from pmesh.core.wire.session import SESSION_VERSION, ArenaGone, DropArena, Refused, WantArena
from pmesh.core.wire.trainer import (
    ENTERS,
    TRAINER_REQUESTS,
    ComparesStates,
    Compresses,
    Connect,
    Joined,
    Leave,
    OpDone,
    OpFailed,
    RanksLost,
    ReportsNumbers,
    StartOp,
    StillWaiting,
    World,
)
from pmesh.core.wire.views import Candidate
from pmesh.errors import ProtocolError
from pmesh.ids import JobName, OpNumber, TrainerId
from pmesh.native.layout import UNREAD_BYTES
from pmesh.net.sessions.arena_pools import IDLE_S, ArenaShare, SessionArenas
from pmesh.net.sessions.processes import TrainerProcess
from pmesh.net.sessions.sessions import ENDS_OF_A_SESSION, Session, refuse, report_errors

TIMED_VALUES = 16 * 1024  # to ask the lanes of smaller ops how long they received costs 1 % of one
POLL_S = 0.02  # while a trainer waits for its job
LOOK_S = 0.002  # when its process has ended: nobody waits for the op that it may have called
WATCH_S = 0.5  # while it has one: a check costs 0.3 ms, and the process's end needs no check
SAY_OF_JOB_EVERY_S = 1.0  # a person waits, and starts the others meanwhile
MOST_UNLINKED = 3
MOST_WISHES = 4  # of one machine, which may say that it has 128 trainers
ALONE = (
    "this machine is alone in its mesh: run 'pmesh up' on the others ('pmesh invite' adds one, "
    "'pmesh status' shows what it finds)"
)
NO_ROOM = "the view has no room for more trainers of this machine until others end"
PREDECESSOR_S = 2.0  # a job of the same name that is just ending makes way in this time


async def serve_trainer(
    session: Session,
    request: Connect,
    jobs: Jobs,
    share: ArenaShare,
    contain: Contain,
    *,
    compression: str = "",
    unlinked: Callable[[], Sequence[str]] = tuple,
    op_completed: Callable[[bool], None] = lambda _: None,
    rank_is: Callable[[int], None] = lambda _: None,
) -> None:
    """Serve a trainer's session: it waits for its job, then runs ops until it leaves.

    Args:
        session: the session with the program.
        request: its first request.
        jobs: the jobs of this agent.
        share: the program's share of shared memory.
        contain: contains errors that nobody foresaw.
        compression: of gradients, if the trainer does not set it; empty for none.
        unlinked: returns why agents that were found are not linked, one text for each.
        op_completed: called after the first op, and after the first `sync`, with True.
        rank_is: called with the trainer's rank before a reply tells it to the trainer.
    """
    arenas = SessionArenas(share)
    trainer = _TrainerSession(
        session,
        request,
        arenas,
        jobs,
        contain,
        unlinked=unlinked,
        op_completed=op_completed,
        rank_is=rank_is,
    )
    try:
        if request.version != SESSION_VERSION:
            await refuse(session, "ProtocolVersionMismatch", other_version(request.version))
        elif len(request.job.encode()) > MAX_JOB_BYTES:
            await refuse(session, "UsageError", _too_long(request.job))
        elif await trainer.join():
            await trainer.serve(compression)
    finally:
        for abandoned in [r for r in jobs.ranks if r.arenas is arenas]:
            abandoned.give_up_results()  # the agent ends
        with trio.CancelScope(shield=True):
            await arenas.aclose()


def _too_long(job: str) -> str:
    nbytes = len(job.encode())
    return f"the job's name {job!r} takes {nbytes} bytes in UTF-8, {MAX_JOB_BYTES} are allowed"


def other_version(version: int) -> str:
    return (
        f"the trainer speaks session version {version}, the agent {SESSION_VERSION}: "
        "install the same pmesh for both, then 'pmesh down' and 'pmesh up'"
    )


class _TrainerSession:
    """One trainer: in its job, about to enter it, or left behind by it."""

    def __init__(
        self,
        session: Session,
        request: Connect,
        arenas: SessionArenas,
        jobs: Jobs,
        contain: Contain,
        *,
        unlinked: Callable[[], Sequence[str]],
        op_completed: Callable[[bool], None],
        rank_is: Callable[[int], None],
    ) -> None:
        self._session = session
        self._request = request
        self._arenas = arenas
        self._jobs = jobs
        self._contain = contain
        self._unlinked = unlinked
        self._op_completed = op_completed
        self._rank_is = rank_is
        self._syncs: bool | None = None
        """Whether a `sync` has been completed; None before any op."""
        self._job = JobName(request.job)
        self._rank: LocalRank | None = None
        self._grants = Grants(session, arenas)
        self._serves = False
        """Whether a request is being served."""
        self._failed = False
        """Whether the last op has failed."""
        self._has_left = False
        self._may_repeat = False
        """Whether the library may answer what comes next."""
        self._most_unread = 0
        """How much may have come already then: a trainer drops a result with its next call."""
        self._learns: StartOp | None = None
        """The last op, until `_repeats` has noted it: later its memory may be gone."""
        self._repeats: RepeatedCalls | None = None

    async def join(self) -> bool:
        """Wait until the job begins, unless it runs; return False if the trainer can't go on.

        A trainer enters a running job later, in a `sync`, so that no rank waits while the trainer
        sets up its state (O6).
        """
        deadline = trio.current_time() + min(PREDECESSOR_S, self._request.timeout_s)
        while self._rank is None:
            refusal = None
            if not self._job_runs():
                refusal = await self._enlist(self._request.timeout_s, begins=True)
                if self._rank is None and self._session.trainer_gone():
                    return False
            elif not self._jobs.runs_without_sync(self._job):
                break
            elif trio.current_time() >= deadline:
                refusal = Verdict("JobRunning", _never_syncs(self._job))
            else:
                await trio.sleep(POLL_S)  # a job that is just ending makes way for the next run
            if refusal is not None:
                await self._session.send(Refused(refusal))
                return False
        return True

    async def serve(self, compression: str) -> None:
        """Serve requests one after the other; then keep results until no rank needs them."""
        why, garbage, bugs = "is lost: its trainer died", list[BaseException](), list[str]()
        what = f"a trainer of job {self._job!r}"
        try:
            with self._contain(what, bugs.append, passing=ENDS_OF_A_SESSION):
                view = self._jobs.membership.view
                world = self._world()
                self._tell_rank(world)
                await self._session.send(Joined(world, view, compression))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch, nursery.cancel_scope)
                    nursery.start_soon(self._await_end, nursery.cancel_scope)
                    # A task of its own: each wait of an op enters all coroutines of its task again.
                    nursery.start_soon(self._serve_requests, nursery)
                if self._has_left:
                    why = LEFT
        except* ProtocolError as e:
            why = "is lost: its trainer sent garbage"
            garbage += e.exceptions
        except* (trio.EndOfChannel, trio.BrokenResourceError):
            pass
        finally:
            self._end_repeats()
            if bugs:
                why = "is lost: its agent has made an error; the log there says which"
            if self._rank is not None:
                self._jobs.depart(self._rank, why)
        await report_errors(self._session, bugs)
        await self._session.aclose()
        for rank in [rank for rank in self._jobs.ranks if rank.arenas is self._arenas]:
            await rank.released.wait()  # until then the others may ask for its results (O2)
        if garbage:
            raise ProtocolError(str(garbage[0]))

    # --- before it has a rank

    def _job_runs(self) -> bool:
        return self._jobs.membership.view.roster_of(self._job) is not None

    async def _enlist(self, timeout_s: float, *, begins: bool) -> Verdict | None:
        """Wait for a rank; return the reason if there is none in time.

        A trainer that wants to begin the job gets no rank either if the job turns out to run, on
        machines that this one has met only now.
        """
        waiter = self._jobs.enlist(self._request, self._arenas, begins=begins)
        try:
            refusal = await self._wait_for_job(waiter, timeout_s, begins=begins)
        except BaseException:  # the trainer is gone, or the agent ends
            self._jobs.withdraw(waiter)
            raise
        self._rank = waiter.rank
        if self._rank is None:
            self._jobs.withdraw(waiter)  # before the refusal is sent: the job might begin meanwhile
        else:
            self._rank.pid = self._session.pid
        return refusal

    async def _wait_for_job(
        self, waiter: WaitingRank, timeout_s: float, *, begins: bool
    ) -> Verdict | None:
        began, said = trio.current_time(), 0
        deadline = began + timeout_s  # one sum: a tiny rest, added to the clock, may change nothing
        while waiter.rank is None and not self._session.trainer_gone():
            now = trio.current_time()
            if now >= deadline:
                return Verdict("NotEnoughRanks", self._too_few(waiter, timeout_s))
            if self._jobs.runs_without_sync(self._job):
                return Verdict("JobRunning", _never_syncs(self._job))
            if (broken := self._broken_group()) is not None:
                return broken
            if begins and self._job_runs():
                return None
            if now - began >= (said + 1) * SAY_OF_JOB_EVERY_S:
                said = math.floor((now - began) / SAY_OF_JOB_EVERY_S)
                facts = tuple(self._describe_wait(waiter))
                await self._session.send(StillWaiting(ENTERS, now - began, facts))
            with trio.move_on_at(min(now + POLL_S, deadline)):
                await waiter.joined.wait()
        return None

    def _too_few(self, waiter: WaitingRank, timeout_s: float) -> str:
        if self._job_runs():
            if self._jobs.has_no_room_for(waiter):
                text = f"job {waiter.job!r} has let in no trainer of this machine for"
                return f"{text} {timeout_s:g} s: {NO_ROOM}"
            return f"job {waiter.job!r} has not called mesh.sync() within {timeout_s:g} s"
        count, *others = self._describe_wait(waiter)
        return "; ".join([f"{count} after {timeout_s:g} s", *others])

    def _describe_wait(self, waiter: WaitingRank) -> Iterator[str]:
        """Yield which machines have a trainer, which have none, and what others wait for."""
        if self._job_runs():
            yield f"job {waiter.job!r} runs; this trainer enters in its next mesh.sync()"
            if self._jobs.has_no_room_for(waiter):
                yield NO_ROOM
            return
        view, counts = self._jobs.membership.view, self._jobs.waiting_for(waiter.job)
        here, name_of = sum(counts.values()), self._jobs.membership.names.of_seat
        yield f"{here} of {waiter.wait_for} trainers of job {waiter.job!r} are here"
        if len(view.seats) == 1 and waiter.wait_for > 1:
            yield ALONE
            yield from self._unlinked()[:MOST_UNLINKED]
            return
        if here < waiter.wait_for:
            idle = [name_of(seat) for seat in view.seats if not counts.get(seat.member, 0)]
            yield f"machines without one: {', '.join(idle)}" if idle else "every machine has one"
        if self._jobs.has_no_room_for(waiter):
            yield NO_ROOM
        for seat in view.seats:
            peer = self._jobs.membership.state.peers.get(seat.member.node)
            others = () if peer is None else peer.heartbeat.waiting
            yield from itertools.islice(_other_wishes(name_of(seat), others, waiter), MOST_WISHES)

    def _broken_group(self) -> Verdict | None:
        """Return why the trainer's group can't come together any more; None if it can."""
        group = self._request.group_of
        if group is None:
            return None
        of_this = (r for r in self._jobs.ranks if r.roster.job == group.job)
        rank = next((r for r in of_this if r.id == group.trainer), None)
        if rank is not None and rank.late_failure is not None:
            return rank.late_failure.verdict  # the others know this failure already, and don't come
        roster = self._jobs.membership.view.roster_of(group.job)
        gone = set(group.members).difference(() if roster is None else roster.ids)
        if not gone:
            return None
        losses = () if roster is None else roster.losses
        messages = (loss.message for loss in losses if gone.intersection(loss.trainers))
        why = next(messages, "one of its ranks is lost")
        return Verdict("RankLost", f"{why}; not all of its ranks had come", tuple(sorted(gone)))

    # --- requests

    async def _serve_requests(self, nursery: trio.Nursery) -> None:
        """Serve one request after the other; end the session's other tasks when it leaves."""
        while not self._has_left:
            self._serves = False
            if self._may_repeat:
                await self._let_library_serve()
            request = await self._session.receive(TRAINER_REQUESTS)
            self._serves = True
            self._most_unread = UNREAD_BYTES if isinstance(request, DropArena) else 0
            match request:
                case StartOp(follows=True) if self._failed:
                    pass
                case StartOp(arena=arena) if self._arenas.inputs.was_taken_back(arena):
                    await self._session.send(ArenaGone(arena))
                case StartOp():
                    await self._serve_op(request)
                case WantArena(nbytes, lasting):
                    await self._grants.grant_input(nbytes, lasting=lasting)
                case DropArena(number):
                    self._drop(number)
                case Compresses() | ReportsNumbers() | ComparesStates():
                    self._note(request)
                case Leave():
                    self._has_left = True
                case _:
                    raise ProtocolError(f"a trainer that has joined sent {type(request).__name__}")
        nursery.cancel_scope.cancel()

    def _note(self, said: Compresses | ReportsNumbers | ComparesStates) -> None:
        """Keep what the trainer says for `pmesh status`, if it has a rank."""
        rank = self._rank
        if rank is None:
            return
        match said:
            case Compresses(text):
                rank.compression = text
            case ReportsNumbers(reports):
                rank.reports = reports
            case ComparesStates(found):
                self._note_comparison(rank, found)

    def _note_comparison(self, rank: LocalRank, found: Comparison) -> None:
        """Keep what the ranks have found; if some differ, add one event for all ranks here."""
        roster = rank.roster
        is_known = any(r.comparison == found for r in of_job(self._jobs.ranks, roster))
        rank.comparison = found
        if found.differing and not is_known:
            text = describe_difference(roster, found)
            self._jobs.event_log.note("states differ", text, job=roster.job, op=found.op)

    async def _enter_job(self, request: StartOp) -> StartOp | Verdict:
        """O6: get a rank, unless there is one whose history the job still has.

        Returns the request, with its op's number there, or the reason why there is no rank.
        """
        if request.call.kind != "sync":
            raise ProtocolError(f"a trainer enters by {request.call}")
        rank, refusal = self._rank, None
        if rank is None or rank.superseded is not None:
            self._rank = None  # the old rank serves its results until no other needs them
            refusal = await self._enlist(request.timeout_s, begins=False)
            rank = self._rank
            if rank is None:
                return refusal or _not_in(self._job)
            rank.world = ()  # the trainer learns the ranks when the sync returns (O5)
        return msgspec.structs.replace(request, op=OpNumber(rank.ledger.started + 1))

    async def _serve_op(self, request: StartOp) -> None:
        if request.follows:  # it was there already, so the others had no turn yet
            await trio.lowlevel.checkpoint()
        if request.op == ENTERS:
            entered = await self._enter_job(request)
            if isinstance(entered, Verdict):
                await self._session.send(OpFailed(OpNumber(ENTERS), entered))
                return
            request = entered
        rank = self._rank
        if rank is None:
            raise ProtocolError("an op before the sync in which the trainer enters its job")
        began = rank.busy_since = trio.current_time()
        is_timed = request.count >= TIMED_VALUES  # smaller ops receive for no time that matters
        received_s = rank.lanes.receiving_s if is_timed else 0.0
        rank.own_time.note(began, calls=True)
        if request.step:
            rank.step, rank.share_percent = request.step, request.share_percent
        try:
            reply, arena = await run_op(rank, request, self._jobs)
        finally:
            rank.busy_since, rank.idle_since = None, trio.current_time()
            rank.own_time.note(rank.idle_since, calls=False)
        ended = rank.idle_since
        if rank.losses:
            losses, rank.losses = rank.losses, []  # a view may add others while these are sent
            await self._session.send(RanksLost(tuple(losses)))
        if self._grants.lacks(arena):
            await self._grants.report_gone()
            await self._grants.grant_output(arena)
        self._failed = not isinstance(reply, OpDone)
        self._may_repeat = rank.may_repeat and not self._failed
        self._learns = request if self._may_repeat else None
        syncs = request.call.kind == "sync" or bool(self._syncs)
        if isinstance(reply, OpDone) and syncs != self._syncs:
            self._syncs = syncs
            self._op_completed(syncs)
        if reply.world is not None:
            self._tell_rank(reply.world)
        await self._session.send(reply)
        received_s = rank.lanes.receiving_s - received_s if is_timed else 0.0
        self._jobs.ended_ops.append((rank, request, began, ended, received_s, self._failed))

    async def _let_library_serve(self) -> None:
        """Let the library answer what comes next, until something comes that it can't answer."""
        rank = self._rank
        if rank is None:
            return
        if self._repeats is None or rank.repeats is None:
            self._end_repeats()  # those of the rank before
            self._repeats = RepeatedCalls(rank, self._session, self._grants, self._jobs)
            rank.repeats = self._repeats
        request, self._learns = self._learns, None
        if request is not None:
            await self._repeats.learn(request)
        if self._repeats.serve(most_unread=self._most_unread):
            await self._repeats.stopped()

    def _drop(self, arena: int) -> None:
        if self._repeats is not None:
            self._repeats.forget_arena(arena)
        self._arenas.drop(arena)

    def _end_repeats(self) -> None:
        if self._repeats is not None:
            self._repeats.close()
            self._repeats = None

    def _tell_rank(self, world: World) -> None:
        """Report the trainer's rank in its job; the ranks of a group are not reported."""
        if world.rank >= 0 and self._request.group_of is None:
            self._rank_is(world.rank)

    def _world(self) -> World:
        if self._rank is not None and self._rank.world:
            return self._rank.describe_world()
        roster = self._jobs.membership.view.roster_of(self._job)
        if roster is None:
            return World(-1, (), ())
        return World(-1, roster.ids, tuple(map(roster.name_of, roster.trainers)))

    # --- what an op can't notice while it waits for the network

    async def _await_end(self, scope: trio.CancelScope) -> None:
        """End the session when its process ends, even if a child holds the connection open."""
        with contextlib.suppress(OSError):  # then `_watch` notices it
            await self._jobs.exits.wait(self._session.pid)
            if self._rank is not None:
                self._rank.recall()  # the library may run an op of it
            if self._rank is None or self._rank.busy_since is None:
                await self._read_last_requests()
            scope.cancel()

    async def _read_last_requests(self) -> None:
        """Let a process that has ended leave as it has asked; return if it has called an op."""
        with trio.move_on_after(WATCH_S):
            while self._rank is None or self._rank.busy_since is None:  # noqa: ASYNC110 - it is rare
                await trio.sleep(LOOK_S)

    async def _watch(self, scope: trio.CancelScope) -> None:
        process = TrainerProcess(self._session.pid)
        began, said = 0.0, 1
        stopped: frozenset[TrainerId] = frozenset[TrainerId]()
        while True:
            await trio.sleep(WATCH_S)
            rank = self._rank
            if rank is None:
                continue
            self._look_at(rank, process)
            if rank.busy_since is None:
                await self._rest(rank)
                continue
            if self._session.trainer_gone():  # its connection is, if not its process
                scope.cancel()
                return
            if rank.busy_since != began:
                began, said, stopped = rank.busy_since, 1, frozenset[TrainerId]()
            waited_s = trio.current_time() - began
            known = stopped
            stopped = self._jobs.progress.stopped(rank, OpNumber(rank.ledger.started))
            if not stopped <= known or waited_s >= said * SAY_EVERY_S:
                said = math.floor(waited_s / SAY_EVERY_S) + 1
                await self._report_wait(rank, waited_s)

    async def _rest(self, rank: LocalRank) -> None:
        """Close the lanes and the memory of a group that has made no call for long."""
        rank.catch_up()
        idle_s = trio.current_time() - rank.idle_since
        if self._serves:  # a reply may still name the memory of its result
            return
        if self._request.group_of is not None and rank.is_stable and idle_s >= IDLE_S:
            rank.recall()
            if not rank.is_stable:  # the library had just begun an op
                return
            if self._repeats is not None and not self._repeats.rest():
                return
            self._jobs.rest(rank)
            await self._arenas.inputs.rest()
            if not self._serves:  # a request may have come while a thread closed large arenas
                await self._arenas.outputs.rest()

    def _look_at(self, rank: LocalRank, process: TrainerProcess) -> None:
        """Report that the trainer's process is stopped or runs again; after a long stop, a loss."""
        stopped_s = process.stopped_for_s(trio.current_time())
        if rank.stopped != (stopped_s is not None):
            rank.stopped = stopped_s is not None
            self._jobs.note_stop(rank.progress())
            self._jobs.beat()
        patience_s = self._request.straggler_after_s
        if stopped_s is not None and stopped_s >= patience_s:
            self._jobs.depart(rank, f"is lost: its trainer has been stopped for {patience_s:g} s")

    async def _report_wait(self, rank: LocalRank, waited_s: float) -> None:
        op = OpNumber(rank.ledger.started)
        what = self._jobs.progress.describe_wait(rank, op, self._jobs.newcomers(rank))
        await self._session.send(StillWaiting(op, waited_s, (what,)))


def _other_wishes(name: str, others: Iterable[Candidate], waiter: WaitingRank) -> Iterator[str]:
    """Yield what else the trainers of a machine wait for."""
    for other in others:
        if other.job != waiter.job:
            yield f"{name} waits in job {other.job!r}"
        elif other.wait_for != waiter.wait_for:
            yield f"{name} asks for wait_for={other.wait_for}, this rank for {waiter.wait_for}"


def _never_syncs(job: JobName) -> str:
    return (
        f"job {job!r} is running and never calls mesh.sync(), in which others could enter it: wait "
        "for its end, choose another name, start all its trainers at once with "
        f"pmesh.connect({job!r}, wait_for=N), or begin each step with state = mesh.sync(state)"
    )


def _not_in(job: JobName) -> Verdict:
    return Verdict("HistorySuperseded", f"this trainer is not in job {job!r}; {COME_BACK}")
