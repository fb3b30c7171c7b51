"""Ops of ranks that are at this agent: done once, for all of them, in shared memory.

If all ranks of the job are here, that is all. If others are elsewhere, `_Relay` has the values of
those here folded, or put side by side, and waits until the first of them has the result from the
network. In a broadcast neither is done; and at the root's agent all take its values as if nobody
were elsewhere, before the first rank sends them.

Each rank's task brings its part. The last one that comes begins the op, and all tasks then wait for
its end. If one of them is cancelled meanwhile (its trainer died, a deadline passed, a view came),
the op stops after the slices that are being done, and nobody has its result. Then a view follows,
as after every cancel, and settles the op at all ranks alike (O3). A task never ends before the
threads have left its memory (V3).

Only a broadcast's root waits for nobody, as over lanes; the others copy its values when they come.

A large result that all ranks get is written once, into the arena of one of them. The others take an
alias of that arena as their result, once the op has ended; a copy, if they have no room for it.
Until then each has an arena of its own, for an attempt that must be made again, or a fetch.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import trio

from pmesh.agent.jobs.ranks import KeptResult
from pmesh.agent.jobs.repeated_together import RepeatedTogether
from pmesh.core.ops.machines import of_machine
from pmesh.core.ops.together import SAME_FOR_ALL, Fold, Together, ValuesAt, plan_together
from pmesh.core.values import Roster
from pmesh.core.wire.trainer import StartOp
from pmesh.errors import LaneBroken
from pmesh.ids import Epoch, JobName, OpNumber
from pmesh.net.lanes.folding import SourceFold
from pmesh.net.lanes.lane import CallsDiffer
from pmesh.net.sessions.combining import CombiningRun, slices_of

SHARED_BYTES: Final = 256 * 1024
"""From here on, an alias costs less than a copy."""


class Attempt(NamedTuple):
    """One attempt of one op, by all ranks of a roster."""

    job: JobName
    born: Epoch
    number: int
    """Of the roster."""
    op: OpNumber


def attempt_of(roster: Roster, op: OpNumber) -> Attempt:
    """Return the attempt at an op by the ranks of a roster."""
    return Attempt(roster.job, roster.born, roster.number, op)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What one rank brings."""

    request: StartOp
    source: memoryview
    """Its values; empty if it gives none."""
    result: KeptResult
    """Where its result will be, unless it takes another rank's."""
    root: int
    gets: bool
    """Whether it takes a broadcast's values, of which it is not the root."""
    describe: Callable[[], str]
    """Returns the rank's name, for errors."""
    folds: Together | None = None
    """What the ranks here do with their values before the first of them meets the network."""


class _Work:
    """Values that move, and the tasks that wait for their end."""

    def __init__(
        self,
        plan: Together,
        request: StartOp,
        sources: Sequence[memoryview],
        results: Sequence[memoryview],
        *,
        reduction: str = "",
    ) -> None:
        """Values of one op. `start` makes them move, or the first `finish`.

        Args:
            plan: what to do.
            request: says the dtype, and the reduction if `reduction` is empty.
            sources: the values of each rank.
            results: where they go, of each rank.
            reduction: another one than that of the request.

        Raises:
            LaneBroken: the plan does not fit this memory.
        """
        try:
            self._slices = slices_of(
                plan,
                sources,
                results,
                dtype=request.wire_dtype,
                reduction=reduction or request.call.reduction or "sum",
            )
        except ValueError as e:  # a trainer has lied: only its job suffers
            raise LaneBroken(f"op {request.op} does not fit its memory: {e}") from e
        self.run = CombiningRun(self._slices, plan.moving_bytes)
        self._waiting = set[trio.lowlevel.Task]()
        self._has_begun = self._is_over = False

    def start(self) -> None:
        """Do a small one at once; else begin."""
        self._has_begun = True
        self._is_over = self.run.start(self._end)

    def by_parts(self) -> int:
        """Leave the slices to the library, in place of `finish`: see `Slices.by_parts`."""
        return 0 if self._has_begun else self._slices.by_parts()

    def _end(self) -> None:
        self._is_over = True
        _wake(self._waiting)

    @property
    def is_done(self) -> bool:
        """Whether it has been done, and was not stopped before."""
        return self._is_over and self.run.result()

    async def finish(self) -> None:
        """Return once it is done. A task that is cancelled here ends it for all that wait.

        It does so once no thread is at work any more (V3). The others then wait for the view that
        follows, as after each cancel.
        """

        def stop(_: object) -> trio.lowlevel.Abort:
            self.run.stop()
            return trio.lowlevel.Abort.FAILED

        if not self._has_begun:
            self.start()
        if not self._is_over:
            self._waiting.add(trio.lowlevel.current_task())
            await trio.lowlevel.wait_task_rescheduled(stop)
        if not self.run.result():
            await trio.sleep_forever()


def _wake(tasks: set[trio.lowlevel.Task]) -> None:
    for task in tasks:
        trio.lowlevel.reschedule(task)
    tasks.clear()


class _Meeting:
    """The parts of one attempt."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: dict[int, RankPart] = {}
        self.work: _Work | None = None
        """What all ranks wait for, or those of a broadcast that take one result."""
        self.writes: int | None = None
        """The rank into whose arena a result is written that the others take."""
        self.ended = 0
        """How many ranks have their results."""
        self.traffic: Callable[[], int] = lambda: 0
        """Returns the bytes that have moved at the sockets for the ranks here."""
        self._waiting = set[trio.lowlevel.Task]()

    def wake(self) -> None:
        """Let those go on that wait for others to come."""
        _wake(self._waiting)

    async def wait(self, rank: int) -> None:
        """Wait for others to come; if this task is cancelled, its part is not there any more."""
        task = trio.lowlevel.current_task()

        def withdraw(_: object) -> trio.lowlevel.Abort:  # at once: the last rank may come any time
            self._waiting.discard(task)
            del self.parts[rank]
            return trio.lowlevel.Abort.SUCCEEDED

        self._waiting.add(task)
        await trio.lowlevel.wait_task_rescheduled(withdraw)

    def fold(self) -> None:
        """Lay out the fold of the values of the ranks here, as the last one has come."""
        parts = [self.parts[rank] for rank in range(self.size)]
        request, plan, first = parts[0].request, parts[0].folds, parts[0].result.nbytes
        assert plan is not None  # noqa: S101 - all ranks here decide alike
        if any(part.result.nbytes != first for part in parts):  # a trainer has lied
            raise LaneBroken(f"op {request.op}: ranks of this agent differ in what they get")
        self.work = _Work(
            plan,
            request,
            [part.source for part in parts],
            [part.result.memory for part in parts],
            reduction=of_machine(request.call.reduction),
        )
        self.wake()

    def begin(self) -> None:
        """Begin the op, as the last rank has come, and let the others wait for its end."""
        parts = [self.parts[rank] for rank in range(self.size)]
        requests, first = [part.request for part in parts], parts[0]
        nbytes = first.result.nbytes
        once = first.request.call.kind in SAME_FOR_ALL and nbytes >= SHARED_BYTES
        once = once and all(part.result.nbytes == nbytes for part in parts)  # else one has lied
        try:
            plan = plan_together(requests, root=first.root, once=once)
        except ValueError as e:
            raise LaneBroken(f"op {first.request.op}: {e}") from e
        results = [part.result.memory for part in parts]
        self.work = _Work(plan, first.request, [part.source for part in parts], results)
        self.work.start()
        self.writes = 0 if once else None
        self.wake()


class _Relay(_Meeting):
    """The ranks here of a job that has others elsewhere; rank 0 of these meets the network.

    While it does so it may read the result region of another one. So who is cancelled stops it, and
    waits until it has left the memory (V3). Then all wait for the view, as after each cancel.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._scope = trio.CancelScope()
        self._over = trio.Event()
        """Rank 0 reads and writes no memory of this op any more."""
        self._has_result = False

    async def lead(self, run: Callable[[memoryview, SourceFold | None], Awaitable[None]]) -> None:
        """Do the network's part, unless a view has ended this attempt."""
        source = self.parts[1].result.memory.toreadonly() if self.work else memoryview(b"")
        try:
            with self._scope:
                await trio.lowlevel.checkpoint_if_cancelled()  # V3: a view came meanwhile
                await run(source, self.work)
                self._has_result = True
        finally:
            self._over.set()
        if not self._has_result:
            await trio.sleep_forever()

    async def follow(self) -> None:
        """Wait until rank 0 has the result."""
        try:
            await self._over.wait()
        except trio.Cancelled:
            if self.work is not None:  # else rank 0 is in nobody's memory, or has not come at all
                self._scope.cancel()
                with trio.CancelScope(shield=True):
                    await self._over.wait()
            raise
        if not self._has_result:
            await trio.sleep_forever()


class Meetings:
    """The ops for which ranks of this agent have met, or wait."""

    def __init__(self) -> None:
        self._open: dict[Attempt, _Meeting] = {}
        self.repeated = RepeatedTogether()

    def taken(self, attempt: Attempt) -> int:
        """Return how far an op has come: a number that grows while it moves."""
        meeting = self._open.get(attempt)
        if meeting is None:
            return 0
        return (0 if meeting.work is None else meeting.work.run.taken) + meeting.traffic()

    def forget(self, job: JobName, *, below: int) -> None:
        """Drop what ranks have left here under earlier rosters."""
        self._open = {
            at: meeting for at, meeting in self._open.items() if at[0] != job or at[2] >= below
        }
        self.repeated.forget(job, below=below)

    def meet(self, attempt: Attempt, rank: int, size: int, part: RankPart) -> "Taking | None":
        """Take part in an op that is no broadcast, without waiting.

        Returns None if `take_part` would raise.
        """
        try:
            meeting = self._join(attempt, rank, size, part)
        except CallsDiffer:
            return None
        if len(meeting.parts) == size:
            try:
                meeting.begin()
            except LaneBroken:
                del meeting.parts[rank]
                return None
        return Taking(self, attempt, meeting, rank)

    async def take_part(
        self, attempt: Attempt, rank: int, size: int, part: RankPart
    ) -> KeptResult | None:
        """Do an op with all other ranks of the job; return when this rank has its result.

        Returns the result of another rank if this one is to take it. That one keeps it until this
        one has ended the op (O2).

        Raises:
            CallsDiffer: another rank has called something else.
            LaneBroken: what the ranks ask for does not fit together.
        """
        meeting = self._join(attempt, rank, size, part)
        if part.request.call.kind == "broadcast":
            writes = await _take_copy(meeting, rank, part)
            self.end_part(attempt, meeting)
            return None if writes is None else meeting.parts[writes].result
        if len(meeting.parts) == size:
            meeting.begin()
        return await Taking(self, attempt, meeting, rank).finish()

    async def relay(
        self,
        attempt: Attempt,
        rank: int,
        size: int,
        part: RankPart,
        *,
        run: Callable[[memoryview, SourceFold | None], Awaitable[None]],
        traffic: Callable[[], int],
    ) -> KeptResult | None:
        """Do an op of a job that has ranks at other agents, too, with all others of this agent.

        A broadcast's root is at another agent.

        Args:
            attempt: the op's.
            rank: this rank's place among those of this agent, of which 0 meets the network.
            size: how many ranks of the job are here, at least two.
            part: what it brings.
            run: does the network's part, and writes the result of rank 0. It is called at rank 0
                only, with the place of the folded values and with what folds them there; in a
                broadcast with neither.
            traffic: returns the bytes that have moved at the sockets of this rank.

        Returns the result of rank 0, at the others; they must take it at once.

        Raises:
            CallsDiffer: another rank has called something else.
            LaneBroken: what the ranks ask for does not fit together; or what `run` raises.
        """
        meeting = self._join(attempt, rank, size, part, _Relay)
        assert isinstance(meeting, _Relay)  # noqa: S101 - all ranks here decide alike
        if rank == 0:
            meeting.traffic = traffic
        if part.folds is not None:  # else the values come to whoever is here
            if len(meeting.parts) == size:
                meeting.fold()
            else:
                await meeting.wait(rank)
        if rank == 0:
            await meeting.lead(run)
        else:
            await meeting.follow()
        self.end_part(attempt, meeting)
        return meeting.parts[0].result if rank else None

    def _join(
        self,
        attempt: Attempt,
        rank: int,
        size: int,
        part: RankPart,
        kind: type[_Meeting] = _Meeting,
    ) -> _Meeting:
        meeting = self._open.get(attempt)
        if meeting is None or not meeting.parts:  # those who withdrew may have called another kind
            meeting = self._open[attempt] = kind(size)
        for other in meeting.parts.values():  # O8
            if other.request.call != part.request.call:
                raise CallsDiffer(attempt.op, other.describe())
        meeting.parts[rank] = part
        return meeting

    def end_part(self, attempt: Attempt, meeting: _Meeting) -> None:
        """Note that another rank has its result."""
        meeting.ended += 1
        if meeting.ended == meeting.size:
            self._open.pop(attempt, None)


@dataclass(frozen=True, slots=True)
class Taking:
    """The part of one rank in an op that has begun, or that still waits for others."""

    meetings: Meetings
    attempt: Attempt
    meeting: _Meeting
    rank: int

    def ends_at_once(self) -> bool:
        """Return True if the op is done and its result is here: then this needs no `finish`."""
        work, writes = self.meeting.work, self.meeting.writes
        if work is None or not work.is_done or writes not in {None, self.rank}:
            return False
        self.meetings.end_part(self.attempt, self.meeting)
        return True

    async def finish(self) -> KeptResult | None:
        """Return when this rank has its result; see `Meetings.take_part`."""
        meeting = self.meeting
        if meeting.work is None:
            await meeting.wait(self.rank)
        assert meeting.work is not None  # noqa: S101 - else nobody wakes it
        await meeting.work.finish()
        self.meetings.end_part(self.attempt, meeting)
        writes = meeting.writes
        return None if writes is None or writes == self.rank else meeting.parts[writes].result


async def _take_copy(meeting: _Meeting, rank: int, part: RankPart) -> int | None:
    """Copy the root's values; return the rank that has done so, or does, if its copy will do.

    The root waits for nobody: its values are kept until all have them (O2).
    """
    if rank == part.root:
        meeting.wake()
        return None
    while part.root not in meeting.parts:
        await meeting.wait(rank)
    if not part.gets:
        return None
    writes, nbytes = meeting.writes, part.result.nbytes
    if meeting.work and writes is not None and meeting.parts[writes].result.nbytes == nbytes:
        await meeting.work.finish()
        return writes
    work = _copy(part.request, meeting.parts[part.root].source, part.result.memory)
    if writes is None and nbytes >= SHARED_BYTES:
        meeting.work, meeting.writes = work, rank
    await work.finish()
    return None


async def copy_result(request: StartOp, of: KeptResult, into: KeptResult) -> None:
    """Copy the result of another rank, which has ended this op."""
    await _copy(request, of.memory, into.memory).finish()


def _copy(request: StartOp, source: memoryview, result: memoryview) -> _Work:
    folds = (Fold((ValuesAt(0, 0),), (ValuesAt(1, 0),), source.nbytes),) if source.nbytes else ()
    plan = Together(2, folds, reduces=False, makes_nan_equal=False)
    nothing = memoryview(b"")
    return _Work(plan, request, [source, nothing], [nothing, result])
