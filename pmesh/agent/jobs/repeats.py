"""The calls of a trainer that the library answers by itself (`pmesh.net.lanes.persistent`).

Python runs a call twice under a roster before the library may: by then what a view has decided of
ops (O2, O3) is behind. It must be a barrier: so it proves that all ranks have ended the op before,
and three arenas in turn are enough for the results of all calls (O2), with two more if the trainer
keeps results. The ranks of one agent meet in the library. If there are ranks elsewhere, too, it
answers small reductions, and the first rank here exchanges what all of them have folded.

What the library has done is noted in the rank before anybody reads or changes how far the rank has
come (`RankState.catch_up`), and the library is recalled before anything is decided
(`RankState.recall`). So no rule knows of it: to all others an op has begun and ended between two
turns of the event loop, or Python runs it.
"""

import ctypes
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import trio
from msgspec.structs import replace

from pmesh import native
from pmesh.agent.grants import Grants
from pmesh.agent.jobs.driver import Jobs
from pmesh.agent.jobs.op_task import asks_for_costs
from pmesh.agent.jobs.ranks import KeptResult, LocalRank
from pmesh.agent.jobs.regions import NOTHING, hold
from pmesh.agent.jobs.repeated_results import RepeatedResults
from pmesh.agent.jobs.requests import Shape
from pmesh.agent.jobs.together import SHARED_BYTES
from pmesh.core.jobs.attempt import MAX_UNSTABLE_BYTES, MAX_UNSTABLE_OPS
from pmesh.core.jobs.progress import of_job
from pmesh.core.ops.kinds import KINDS
from pmesh.core.ops.plan import PlanMaker, RankPlan
from pmesh.core.ops.reductions import WIRE_DTYPES
from pmesh.core.ops.together import SAME_FOR_ALL
from pmesh.core.wire.records import RecordHeader
from pmesh.core.wire.session import DropArena, SessionMessage, encode
from pmesh.core.wire.trainer import OpDone, StartOp
from pmesh.errors import LaneBroken
from pmesh.ids import OpNumber
from pmesh.native.layout import MOST_CALLS, OWN_SLOTS
from pmesh.net.lanes.lane import Lane
from pmesh.net.lanes.native import KeptThreads, library_for
from pmesh.net.lanes.persistent import (
    NO_LIMIT,
    BegunOp,
    EndedOp,
    Meeting,
    Message,
    PersistentCall,
    PersistentCalls,
    around_numbers,
)
from pmesh.net.sessions.arenas import Arena
from pmesh.net.sessions.combining import MOST_THREADS
from pmesh.net.sessions.processes import read_clocks
from pmesh.net.sessions.sessions import Session

LEAST_TIMEOUT_S = 1.0  # the library holds an op for a tenth of this before Python goes on with it
TRUST_S = 1.0  # V8
MOST_TRAINERS = 16  # each has a thread
MOST_BYTES_HERE = 5 * 2**25
"""That are read and written where all ranks meet: the event loop may have to wait for that, 10 ms.
8 ranks meet with 16 MiB each."""
FEW_BYTES_HERE = 2**23
"""The same, if the machine has more cores than the ranks have threads: Python uses them."""
_MOST_SEEN = 64
IN_USE_OPS = 1000  # a call that was not repeated for so many makes room for others
MOST_IN_VAIN = 128  # a step of a training may have half as many calls that not all ranks know yet
_MOST_DOUBLINGS = 6  # after 64 ops that are left to Python it tries again
_CHOOSES_AMONG = 3  # machines: for two, all strategies are alike
_AMONG_MACHINES = frozenset({"all_reduce", "barrier"})
"""What is repeated if some ranks are at one agent, and others elsewhere."""

_NO_PLAN = PlanMaker(size=1).plan()

_serving: set["RepeatedCalls"] = set()


@dataclass(slots=True)
class _Kept:
    """One call, and the memory that is held for it."""

    call: StartOp
    """The request of op 0, with an offset and a step of 1 where they are not 0."""
    source: KeptResult
    nbytes: int
    """Of the result."""
    used: int
    """The op in which it was called last."""


@dataclass(slots=True)
class _Way:
    """How the ranks of a call exchange values: over lanes, or where all of them meet."""

    library: ctypes.CDLL
    plan: RankPlan = _NO_PLAN
    lanes: Sequence[Lane] = ()
    dtype: str = ""
    """Of what the plan reduces."""
    meeting: Meeting | None = None


class RepeatedCalls:
    """Those of one rank."""

    def __init__(self, rank: LocalRank, session: Session, grants: Grants, jobs: Jobs) -> None:
        """Begin without a call; the ops that end are added to those of the jobs."""
        self._rank = rank
        self._session = session
        self._grants = grants
        self._jobs = jobs
        self._library: PersistentCalls | None = None
        self._kept: list[_Kept] = []
        self._results = RepeatedResults(rank, grants, jobs.meetings.repeated)
        self._seen: dict[StartOp, None] = {}  # the oldest first
        self._here = self._place()
        self._served = False
        """Whether it is not noted yet what the library has done since it began to serve."""
        self._is_awaited = False
        """Whether a task waits until the library serves no longer."""
        self._in_vain = 0
        """How often in a row the library has got a request, and has answered none."""
        self._noted_begun = OpNumber(-1)
        self._trusted_until_us = 0
        for arenas in (rank.arenas.inputs, rank.arenas.outputs):
            arenas.on_shortage(self._give_way)

    def close(self) -> None:
        """End the thread, and hold no memory any more."""
        self.recall()
        library, self._library = self._library, None
        if library is not None:
            library.close()
        _serving.discard(self)
        self.forget()

    def rest(self) -> bool:
        """As `close`, until the next call is learnt; return False if the session still needs it."""
        if not self._is_awaited:
            self.close()
        return not self._is_awaited

    # --- calls that are repeated

    async def learn(self, request: StartOp) -> None:
        """Note that Python has run a call; if it has done so before, the library runs the next."""
        self._follow()
        if not _may_repeat(self._rank, request):
            return
        call = _request(request, 0)
        if call not in self._seen:
            self._seen[call] = None
            if len(self._seen) > _MOST_SEEN:
                del self._seen[next(iter(self._seen))]
        elif all(kept.call != call for kept in self._kept):
            await self._keep(call, request)

    async def _keep(self, call: StartOp, request: StartOp) -> None:
        rank, shape = self._rank, self._rank.shapes.of(self._rank, request)
        itemsize = WIRE_DTYPES[call.wire_dtype].itemsize
        nbytes, gives = shape.extent.gets * itemsize, shape.extent.gives * itemsize
        shares = rank.has_all_here and call.call.kind in SAME_FOR_ALL and nbytes > 0
        if rank.has_all_here:
            way = self._way_here(max(gives, nbytes), reduces=shape.kind.reduces)
        elif rank.place_here:
            way = self._way_beside(nbytes)
        else:
            way = self._way_over_lanes(call, shape, nbytes)
        if way is None or not self._has_thread(way.library) or self._free_place() is None:
            return
        lends = call.borrows and (not shares or rank.rank == 0)  # who decides how many are shared
        if not await self._make_room(nbytes, lends=lends, shares=shares):
            return
        if len(rank.mates) > 1:
            way.meeting = self._jobs.meetings.repeated.meeting(rank, call, shares=shares)
            if way.meeting is None:
                return
        source = hold(rank, request.arena, gives, request.offset) if gives else NOTHING
        results = self._results.shared if shares else self._results.own
        place = self._free_place()
        assert self._library is not None and place is not None  # noqa: S101, PT018 - as above
        for replaced in self._kept[place : place + 1]:
            rank.let_go(replaced.source)
        self._kept[place : place + 1] = [_Kept(call, source, nbytes, request.op)]
        self._library.put(
            place,
            PersistentCall(
                way.plan,
                way.lanes,
                RecordHeader(0, rank.roster.number, 0, 0, rank.fingerprint, -1),
                source=source.memory,
                arena=NOTHING.memory if source.arena is None else source.arena.memory,
                itemsize=itemsize,
                nbytes=nbytes,
                scratch=np.empty(way.plan.scratch_bytes, np.uint8).data,
                dtype=way.dtype,
                reduction=call.call.reduction or "sum",
                request=_cut(*(_request(call, n) for n in (1, 2))),
                says_place=bool(call.offset),
                says_step=bool(call.step),
                reply=_cut(*(_reply(n, nbytes) for n in (1, 2))),
                lending=_cut(*(_reply(n, nbytes, lent=True) for n in (1, 2)))
                if call.borrows and nbytes and len(results) > OWN_SLOTS
                else (),
                meeting=way.meeting,
                rank=rank.place_here,
                folded=np.empty(gives, np.uint8).data if way.lanes and way.meeting else None,
            ),
            results[0].memory if nbytes else NOTHING.memory,
        )

    def _way_over_lanes(self, call: StartOp, shape: Shape, nbytes: int) -> _Way | None:
        plan, rank = shape.plan, self._rank
        if plan is None or shape.planned_for != self._here[:2]:
            return None
        if len(rank.mates) > 1 and nbytes >= SHARED_BYTES:
            return None
        firsts = [ranks[0] for ranks in rank.machines] or range(rank.size)
        lanes = rank.lanes.if_open(
            [firsts[at] for at in plan.receives], [firsts[at] for at in plan.sends]
        )
        if lanes is None or plan.works:
            return None
        dtype = call.wire_dtype if shape.kind.reduces else ""
        library = library_for(plan, lanes, dtype, call.call.reduction or "sum")
        return None if library is None else _Way(library, plan, lanes, dtype)

    @staticmethod
    def _way_beside(nbytes: int) -> _Way | None:
        """Return the way of a rank whose agent's first one meets the network."""
        library = native.library()
        return None if library is None or nbytes >= SHARED_BYTES else _Way(library)

    def _way_here(self, nbytes: int, *, reduces: bool) -> _Way | None:
        nbytes *= 1 + (self._rank.size if reduces else 1)  # written and read, whatever the parts
        library, cores = native.library(), min(os.cpu_count() or 1, MOST_THREADS)
        most = MOST_BYTES_HERE if cores <= self._rank.size else FEW_BYTES_HERE
        return None if library is None or nbytes > most else _Way(library)

    def _free_place(self) -> int | None:
        """Return where there is room for a call; None if all calls that are kept are in use."""
        if len(self._kept) < MOST_CALLS:
            return len(self._kept)
        place = min(range(MOST_CALLS), key=lambda place: self._kept[place].used)
        is_old = self._kept[place].used < self._rank.ledger.started - IN_USE_OPS
        return place if is_old else None

    async def _make_room(self, nbytes: int, *, lends: bool, shares: bool) -> bool:
        """Have arenas for results of this size; return False if there is no room."""
        results = self._results
        if results.has_room(nbytes, lends=lends, shares=shares):
            return True
        if not results.may_make_room(nbytes, lends=lends, shares=shares):
            return False
        self._forget_calls()
        has_room = await results.make_room(nbytes, lends=lends, shares=shares)
        if self._library is not None:
            self._library.write_into(_by_number(results.own), _by_number(results.shared))
        return has_room

    def _has_thread(self, library: ctypes.CDLL) -> bool:
        """Return whether there is a thread."""
        if self._library is not None:
            return True
        if len(_serving) >= MOST_TRAINERS:
            return False
        try:
            drop = _cut(DropArena(1), DropArena(2))
            self._library = PersistentCalls(library, self._session.descriptor, drop)
        except (LaneBroken, OSError):  # the system has no room: Python goes on
            return False
        self._library.vouch(self._trusted_until_us)
        _serving.add(self)
        return True

    def _follow(self) -> None:
        """Forget the calls if they were made among other ranks, or with other plans."""
        if any(a is not b for a, b in zip(self._here, self._place(), strict=True)):
            self.forget()
            self._seen.clear()
            self._results.ask_again()
            self._in_vain = 0
            self._here = self._place()
        elif self._results.is_out_of_date:
            self.forget()

    def _place(self) -> tuple[object, object, object]:
        rank = self._rank
        return rank.roster, rank.costs.edges, rank.world

    def forget(self) -> None:
        """Keep no call, and no memory for them."""
        self._forget_calls()
        if self._library is not None:
            self._library.write_into({})
        self._results.forget()

    def _forget_calls(self) -> None:
        self.recall()
        if self._library is not None:
            self._library.clear()
        kept, self._kept = self._kept, []
        for each in kept:
            self._rank.let_go(each.source)

    async def _give_way(self) -> None:
        """Keep no memory that other ops need now."""
        self.forget()
        await self._rank.arenas.outputs.rest()

    def forget_arena(self, number: int) -> None:
        """Keep no call that reads an input arena which the trainer drops."""
        if any(each.call.arena == number for each in self._kept):
            self.forget()

    # --- the library serves

    def serve(self, *, most_unread: int = 0) -> bool:
        """Let the library answer what comes next, if it may; then `stopped` and `recall` follow.

        So many bytes may be in the session already.
        """
        rank = self._rank
        if not self._kept or self._library is None or not _is_at_rest(rank):
            return False
        self._follow()
        if len(rank.mates) > 1 and (self._is_awaited_in_python() or self._meets_nobody()):
            return False
        chooses = (len(rank.machines) or rank.size) >= _CHOOSES_AMONG and not rank.has_all_here
        chooses = chooses and any(asks_for_costs(kept.call.call) for kept in self._kept)
        limit: int | None = rank.costs.due if chooses else NO_LIMIT
        has_turn = not self._session.is_sending and self._session.unread_bytes <= most_unread
        if not (self._kept and has_turn) or limit is None:
            return False
        outputs, arenas = rank.arenas.outputs, self._results.arenas
        may_lend = outputs.may_lend(arenas)
        own = [arena for arena in arenas if arena.number not in outputs]
        if not may_lend and outputs.may_lend(own[:1]) and self._lends:
            return False  # Python lends the last ones
        unread = self._session.take_unread()
        try:
            self._library.serve(
                rank.ledger.started + 1,
                limit=limit,
                kept=[r.arena.number for r in rank.results.values() if r.arena is not None],
                lent=[arena.number for arena in arenas if arena.number in outputs],
                may_lend=may_lend,
                unread=unread,
            )
        except LaneBroken:
            self._session.put_back(unread)
            self.forget()
            return False
        self._served = True
        return True

    def _is_awaited_in_python(self) -> bool:
        """Return whether another rank of this agent has begun the next op."""
        rank = self._rank
        running = (other.running for other in of_job(self._jobs.ranks, rank.roster))
        return any(op is not None and op > rank.ledger.started for op in running)

    def _meets_nobody(self) -> bool:
        """Return whether to leave the next op to Python, which has had to recall the library.

        All ranks try again in the same ops: else they would miss each other.
        """
        tries_every = 1 << min(max(self._in_vain - MOST_IN_VAIN, 0), _MOST_DOUBLINGS)
        return (self._rank.ledger.started + 1) % tries_every != 0

    async def stopped(self) -> None:
        """Wait until the library serves no longer; what it has not answered comes next.

        Raises:
            trio.BrokenResourceError: the trainer does not take its replies.
        """
        library, ended = self._library, self._rank.ledger.ended
        assert library is not None  # noqa: S101 - it serves
        self._is_awaited = True
        try:
            await library.stopped()
        finally:
            self._is_awaited = False
            self.recall()
        if library.trainer_is_stuck:
            raise trio.BrokenResourceError("the program does not read its replies")
        unread = library.take_unread()
        self._session.put_back(unread)
        if self._rank.ledger.ended > ended:
            self._in_vain = 0
        elif unread:
            self._in_vain += 1

    def vouch(self) -> None:
        """V8: let the library answer for another second, on a clock that sleep does not stop."""
        self._trusted_until_us = int(1e6 * (read_clocks().elapsed_s + TRUST_S))
        if self._library is not None:
            self._library.vouch(self._trusted_until_us)

    @property
    def _lends(self) -> bool:
        return any(kept.call.borrows for kept in self._kept)

    # --- what it has done

    def recall(self) -> None:
        """Make the library answer none from now on, and catch up."""
        if self._library is not None:
            self._library.recall()
            self.catch_up()

    def catch_up(self) -> None:
        """Note in the rank which ops have ended since the last time, and which one has begun."""
        library, rank = self._library, self._rank
        if library is None:
            return
        ended = library.take_ended()
        if ended:
            self._note(ended)
        if self._served and not library.serves:
            self._served = False
            self._note_loans(library.lent)
        begun = library.begun
        if begun is not None and begun.number != self._noted_begun:
            self._noted_begun = OpNumber(begun.number)
            rank.start(self._noted_begun, self._kept[begun.call].call.call)
            rank.busy_since = trio.current_time()

    def _note_loans(self, lent: Collection[int]) -> None:
        """Note which arenas the trainer has kept and dropped while the library served."""
        outputs = self._rank.arenas.outputs
        for arena in self._results.arenas:
            if arena.number in lent and arena.number not in outputs:
                outputs.note_lent(arena)
            elif arena.number not in lent and arena.number in outputs:
                outputs.drop(arena.number)

    def _note(self, ended: Sequence[EndedOp]) -> None:
        rank, outputs = self._rank, self._rank.arenas.outputs
        shift = trio.current_time() - read_clocks().awake_s
        for op in ended:
            began, end = op.began_s + shift, op.ended_s + shift
            rank.own_time.note(began, calls=True)
            rank.own_time.note(end, calls=False)
            request = replace(self._kept[op.call].call, op=OpNumber(op.number))
            self._kept[op.call].used = op.number
            self._jobs.ended_ops.append((rank, request, began, end, op.receiving_s, False))
            rank.idle_since = end
            if op.step:
                rank.step, rank.share_percent = op.step, request.share_percent
        results = [self._result_of(op) for op in ended]
        arenas = [result.arena for result in results if result.arena is not None]
        for arena in arenas[-2:]:  # the trainer may still read these
            outputs.next_turn()
            outputs.deliver(arena)
        last, result = OpNumber(ended[-1].number), results[-1]
        if result.arena is not None:
            outputs.hold(result.arena)
        call = self._kept[ended[-1].call].call.call
        for earlier in rank.complete_barriers(last, call, result):
            rank.let_go(earlier)

    def _result_of(self, op: EndedOp | BegunOp) -> KeptResult:
        nbytes = self._kept[op.call].nbytes
        return KeptResult(arena=self._results.arenas[op.result] if nbytes else None, nbytes=nbytes)

    def take_begun(self, op: OpNumber) -> KeptThreads | None:
        """Return what goes on with an op that the library has begun; None if there is none.

        The next output arena that is acquired is the one of its result.
        """
        begun = None if self._library is None else self._library.begun
        if self._library is None or begun is None:
            return None
        self._library.begun = None
        if begun.number != op:
            begun.threads.abandon()
            return None
        arena = self._result_of(begun).arena
        if arena is not None:
            self._rank.arenas.outputs.reserve(arena)
        return begun.threads

    def abandon(self) -> None:
        """Stop the op that has begun and whose request has not been read, if there is one."""
        if self._library is not None and self._library.begun is not None:
            begun, self._library.begun = self._library.begun, None
            begun.threads.abandon()


def _may_repeat(rank: LocalRank, request: StartOp) -> bool:
    """Return whether a call is one that the library may answer, among these ranks."""
    kind = KINDS[request.call.kind]
    return (
        rank.may_repeat
        and len(rank.mates) <= MOST_TRAINERS
        and (not rank.machines or request.call.kind in _AMONG_MACHINES)
        and kind.barrier
        and kind.row is None
        and request.call.kind != "reduce"
        and not (request.call.compression or request.follows)
        and request.timeout_s >= LEAST_TIMEOUT_S
    )


def _is_at_rest(rank: LocalRank) -> bool:
    """Return whether nothing but the next call is to be decided, and its ranks are as before."""
    return (
        rank.running is None
        and rank.ledger.ended == rank.ledger.started
        and len(rank.ledger.ops) <= MAX_UNSTABLE_OPS
        and rank.retained_bytes <= MAX_UNSTABLE_BYTES
        and rank.world == rank.roster.ids
        and rank.may_run
        and not rank.is_short_of_ranks(0)
        and not (rank.fences or rank.losses or rank.leaving)
        and (rank.superseded, rank.late_failure, rank.view_request) == (None, None, None)
    )


def _by_number(arenas: Sequence[Arena]) -> dict[int, memoryview]:
    return {arena.number: arena.memory for arena in arenas}


def _request(call: StartOp, number: int) -> StartOp:
    """Return a call's request of that op, with this number for all that may differ, or 1 for 0."""
    offset, step = ((number or 1) * bool(each) for each in (call.offset, call.step))
    return replace(call, op=OpNumber(number), offset=offset, step=step)


def _reply(number: int, nbytes: int, *, lent: bool = False) -> OpDone:
    """Return the reply to an op whose arena has the same number; -1 if there is no result."""
    return OpDone(OpNumber(number), number if nbytes else -1, lent=lent)


def _cut(one: SessionMessage, other: SessionMessage) -> Message:
    return around_numbers(encode(one), encode(other))
