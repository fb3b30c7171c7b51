"""One rank that lives on this machine: its ledger, fence, lanes and retained results."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import trio

from pmesh.agent.lanes.edge_costs import RingCosts
from pmesh.agent.lanes.rank_lanes import RankLanes
from pmesh.agent.lanes.rendezvous import LaneDesk
from pmesh.core.jobs import op_log as ledgers
from pmesh.core.jobs.op_log import Ledger
from pmesh.core.values import OpOutcome, Roster, Trainer, Verdict
from pmesh.core.views.quorum import is_in_force
from pmesh.core.wire.link import Call, Concern, JobReport, KnownPrimary, RankMarks
from pmesh.core.wire.local import World
from pmesh.core.wire.records import fingerprint
from pmesh.ids import OpNumber, Rank, TrainerId
from pmesh.net.lanes.collectives import RingPosition
from pmesh.net.local.arena_pools import SessionArenas
from pmesh.net.local.arenas import Arena

COME_BACK = "mesh.sync() brings it back"

Fence: TypeAlias = Literal["view change", "own stall"]
"""Why nothing is delivered: V3, or V8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What an op has left in shared memory: the agent's until the op is stable (O2)."""

    arena: Arena | None
    """None when there are no values."""
    nbytes: int
    is_input: bool = False
    """It is the trainer's own input: a broadcast's root."""
    offset: int = 0
    """Where in the arena it begins."""

    @property
    def memory(self) -> memoryview:
        """The bytes of the result."""
        if self.arena is None:
            return memoryview(b"")
        return self.arena.memory[self.offset : self.offset + self.nbytes]


class LocalRank:
    """A trainer of a job, connected here. Its op task runs ops, the views steer it."""

    def __init__(
        self, roster: Roster, trainer: Trainer, arenas: SessionArenas, program: str
    ) -> None:
        self.roster: Roster = roster
        self.trainer = trainer
        self.arenas = arenas
        self.program = program
        self.compression: str | None = None
        """How its values are compressed, as its trainer says."""
        self.pid = -1
        """Of the trainer's process, once its session knows this rank."""
        self.ledger = Ledger(stable=trainer.enters - 1)
        self.world: tuple[TrainerId, ...] = () if trainer.enters else roster.ids
        """O5: who rank i is for the trainer; it changes only when a call returns."""
        self.fingerprint = 0
        """Of the last call; 0 while there is none that may be compared."""
        self.synced = -1
        self.stopped = False
        """Whether the trainer's process has been stopped, as by SIGSTOP."""
        self.concern: Concern | None = None
        self.over: Verdict | None = None
        """Why the job has ended for this trainer."""
        self.owed: OpOutcome | None = None
        """Of an op that had already returned here when it failed: raised by the next call (I5)."""
        self.leaving: str | None = None
        """Why the trainer is gone."""
        self.leaving_since = 0.0
        self.busy_since: float | None = None
        """Since when the op that runs has been running."""
        self.progress: tuple[tuple[int, int], float] | None = None
        """What had moved on its lanes, and since when no more, while an op waits for them."""
        self.halted_since: float | None = None
        """Since when the op under way has not gone on, once a view change interrupts it."""
        self.released = trio.Event()
        """The job is over for this trainer, so nobody will ask for its results."""
        self.stable_moved = trio.Event()
        self.in_force = trio.Event()
        """Whether those whose votes the roster needed are known to have installed it (V10)."""
        self.learn(())
        self.lanes = RankLanes(trainer.id, roster)
        self.costs = RingCosts()
        self._names = {t.id: t.name for t in roster.trainers}
        self._outcomes = {outcome.op: outcome for outcome in roster.outcomes}
        self._results: dict[OpNumber, Result] = {}
        self._failed: set[OpNumber] = set()
        """What the trainer has been told to have failed, or will be by `owed`: told once."""
        self._fences: set[Fence] = set()
        self._unfenced = trio.Event()
        self._attempt: trio.CancelScope | None = None
        self._running: OpNumber | None = None
        self.serving: set[trio.CancelScope] = set()
        """What sends results to other ranks: it must end before the result's memory is reused."""

    def __repr__(self) -> str:
        return f"<LocalRank {self.trainer.id} of {self.roster.job!r}, roster {self.roster.number}>"

    @property
    def id(self) -> TrainerId:
        """Its number within the job."""
        return self.trainer.id

    @property
    def rank(self) -> Rank | None:
        """Its place in the ring; None if the others go on without it."""
        return self.roster.rank_of(self.trainer.id)

    @property
    def size(self) -> int:
        """How many ranks the ring has."""
        return len(self.roster.trainers)

    @property
    def superseded(self) -> Verdict | None:
        """Why the trainer has no part in the job any more, though it may come back (O6)."""
        if self.over is None and self.rank is None:
            job = self.roster.job
            return Verdict(
                "HistorySuperseded", f"job {job!r} goes on without this rank; {COME_BACK}"
            )
        return self.over

    @property
    def is_needed(self) -> bool:
        """Whether somebody may still ask for its results (O2)."""
        return self.over is None and (self.rank is not None or bool(self._results))

    @property
    def retained_bytes(self) -> int:
        """What results that are not yet stable hold."""
        return sum(result.nbytes for result in self._results.values())

    # --- what the agreement reads and decides

    def report(self) -> JobReport:
        """For the flush answer (V3)."""
        roster, ranks = self.roster, (ledgers.report(self.ledger, self.id),)
        return JobReport(roster.job, roster.born, roster.number, fenced=False, ranks=ranks)

    def marks(self) -> RankMarks:
        """For every heartbeat (O2)."""
        roster, ledger = self.roster, self.ledger
        return RankMarks(
            roster.job,
            roster.number,
            self.id,
            ledger.started,
            ledger.ended,
            self.fingerprint,
            self.synced,
            self.stopped,
        )

    def fence(self, why: Fence) -> None:
        """From here on no completion is delivered: V3, until a view is installed; or V8."""
        if not self._fences:
            self._unfenced = trio.Event()
        self._fences.add(why)
        if self._running is not None and self.halted_since is None:
            self.halted_since = max(self.lanes.moved_at, self.busy_since or 0.0)

    def lift(self, fence: Fence) -> None:
        """What the fence was for is known."""
        self._fences.discard(fence)
        if not self._fences:
            self._unfenced.set()

    async def unfenced(self) -> None:
        """Wait until a completion may be delivered. Returns at once while there is no fence.

        The view that ends the fence may cancel the attempt that waits here, which then must not go
        on, also if it was about to run already.
        """
        while self._fences:
            await self._unfenced.wait()
        await trio.lowlevel.checkpoint_if_cancelled()

    def learn(self, known: Collection[KnownPrimary]) -> None:
        """What the agent knows of rosters with a quorum: perhaps that ours is in force (V10)."""
        if is_in_force(self.roster, known):
            self.in_force.set()

    async def quorum(self) -> None:
        """V10: wait until this side has a majority, and that is known to have installed the roster.

        Returns at once where nobody asks for one.
        """
        if not self.roster.quorate:
            await trio.sleep_forever()  # the view that restores the quorum begins the next attempt
        if not self.in_force.is_set():
            await self.in_force.wait()

    def follow(self, roster: Roster, desk: LaneDesk) -> None:
        """A view has been installed that has this job."""
        if roster.number == self.roster.number:
            self.halted_since = None
            self.lift("view change")
            return
        self.roster = roster
        self.in_force = trio.Event()
        self.learn(())
        self.costs = RingCosts()
        self.concern = None
        self._names |= {t.id: t.name for t in roster.trainers}
        self._outcomes = {outcome.op: outcome for outcome in roster.outcomes}
        self._failed = {
            op for op in self._failed if op in self._outcomes or op > self.ledger.stable
        }
        for outcome in roster.outcomes:
            if outcome.verdict is not None and self._has_returned(outcome.op):
                self.owed = outcome
                self._failed.add(outcome.op)
        self.ledger = ledgers.apply_failures(self.ledger, roster.outcomes)
        running = self._running
        if self.owed is not None and running is not None and running not in self._outcomes:
            # I5: its trainer will call another op instead, so nobody may hear of this one: what
            # could, was under the number before.
            self.take_back(running)
        self._stop_attempt()
        self.lanes.begin(roster, desk)

    def end(self, verdict: Verdict) -> None:
        """The job is over for this trainer: the others go on without it, or not at all."""
        self.over = self.over or verdict
        self._stop_attempt()
        for op in list(self._results):
            self.let_go(self._results.pop(op))
        self.released.set()

    def _has_returned(self, op: OpNumber) -> bool:
        """Whether the trainer took the op for a success. A stable one would not fail otherwise."""
        if op < self.trainer.enters or op in self._failed:
            return False
        report = self.ledger.ops.get(op)
        return op <= self.ledger.stable if report is None else report.completed

    def _stop_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()
        for scope in self.serving:
            scope.cancel()
        self.lift("view change")
        self.lanes.close()

    # --- what its trainer sees

    def describe_world(self) -> World:
        """The ranks as the trainer sees them (O5)."""
        rank = self.world.index(self.id) if self.id in self.world else -1
        names = tuple(self._names.get(trainer, "a lost machine") for trainer in self.world)
        return World(rank, self.world, names)

    def see(self, contributors: tuple[TrainerId, ...]) -> World | None:
        """A call returns that these have taken part in; None if the world is as it was (O5)."""
        if contributors == self.world:
            return None
        self.world = contributors
        self._names = {
            t: name for t, name in self._names.items() if t in contributors or t in self.roster.ids
        }
        return self.describe_world()

    # --- what the op task asks

    def attempt(self) -> trio.CancelScope:
        """The scope of one try at an op; the next view change that resolves ops cancels it."""
        self._attempt = trio.CancelScope()
        return self._attempt

    def failure_of(self, op: OpNumber) -> OpOutcome | None:
        """Why the op fails, and for whom; None while it may succeed."""
        if self.superseded is not None:
            return OpOutcome(op, self.world, verdict=self.superseded)
        outcome = self._outcomes.get(op)
        return outcome if outcome is not None and outcome.verdict is not None else None

    def result_elsewhere(self, op: OpNumber) -> OpOutcome | None:
        """Who has the result of an op that others completed; None if it must be run."""
        outcome = self._outcomes.get(op)
        return outcome if outcome is not None and outcome.holders else None

    def start(self, op: OpNumber, call: Call) -> None:
        """The trainer has called the op."""
        self._running = op
        self.halted_since = None
        self.fingerprint = fingerprint(call)
        is_root = call.kind == "broadcast" and self.world[call.root] == self.id
        self.ledger = ledgers.start(self.ledger, op, call, is_root=is_root)
        if call.kind == "sync":
            self.synced = op

    def take_back(self, op: OpNumber) -> None:
        """The call is as if it had never been made."""
        self._running = None
        self.fingerprint = 0
        others = {number: r for number, r in self.ledger.ops.items() if number != op}
        self.ledger = replace(self.ledger, ops=others)

    def complete(
        self,
        op: OpNumber,
        result: Result,
        contributors: tuple[TrainerId, ...],
        *,
        holds: bool = True,
    ) -> None:
        """The op's result is there, if it is for this rank at all, and may be delivered."""
        self._running = None
        self.ledger = ledgers.complete(self.ledger, op, contributors, holds=holds)
        self._results[op] = result

    def fail(self, outcome: OpOutcome) -> None:
        """The op has failed, here as everywhere."""
        self._running = None
        self._failed.add(outcome.op)
        self.ledger = ledgers.fail(self.ledger, outcome)

    def result_of(self, op: OpNumber) -> Result | None:
        """The retained result of an op."""
        return self._results.get(op)

    def stabilize(self, mark: int) -> None:
        """Every rank has ended the ops up to `mark`: nobody will ask for their results."""
        if self._running is not None:  # a view may have failed it, and its trainer not know yet
            mark = min(mark, self._running - 1)
        if self.concern is not None and self.concern.op >= 0:  # I5: the leader asks who called what
            mark = min(mark, self.concern.op - 1)
        before = self.ledger.stable
        self.ledger = ledgers.stabilize(self.ledger, mark)
        if self.ledger.stable == before:
            return
        for op in [op for op in self._results if op <= self.ledger.stable]:
            self.let_go(self._results.pop(op))
        self._outcomes = {op: o for op, o in self._outcomes.items() if op > self.ledger.stable}
        self.stable_moved.set()
        self.stable_moved = trio.Event()

    def let_go(self, result: Result) -> None:
        """Give the result's arena back."""
        if result.arena is not None and result.is_input:
            self.arenas.inputs.release(result.arena)
        elif result.arena is not None:
            self.arenas.outputs.release(result.arena)

    def give_up_results(self) -> None:
        """The session's memory goes: nobody can be served from it any more."""
        self._results.clear()

    # --- lanes

    async def ring(self, desk: LaneDesk) -> RingPosition:
        """This rank's place in the ring, as soon as both its lanes are open."""
        roster, rank = self.roster, self.rank
        if rank is None:  # V2: the view without us is about to end the attempt
            await trio.sleep_forever()
            raise AssertionError("nobody wakes it")
        if self.size == 1:
            return RingPosition(rank=rank, size=1, roster=roster.number)
        previous, following = (trainer.id for trainer in self.neighbours())
        to, from_ = await self.lanes.open([following], [previous], desk)
        return RingPosition(
            rank=rank,
            size=self.size,
            roster=roster.number,
            to_next=to[following],
            from_previous=from_[previous],
        )

    def neighbours(self) -> tuple[Trainer, Trainer]:
        """Before and after us in the ring; only while we are in it."""
        place = self.roster.ids.index(self.id)
        return self.roster.trainers[place - 1], self.roster.trainers[(place + 1) % self.size]
