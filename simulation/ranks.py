"""One rank that lives on a simulated agent: its ledger, fences and retained results.

The counterpart of `pmesh.agent.jobs.ranks`, and in the same words. Everything that the agreement
reads or writes is the real thing (`pmesh.core.jobs.op_log`, rosters, outcomes); how its ops run is
`simulation.ops`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from pmesh.core.jobs import op_log as ledgers
from pmesh.core.jobs.op_log import Ledger
from pmesh.core.values import OpOutcome, Roster, Trainer, Verdict
from pmesh.core.views.quorum import may_run
from pmesh.core.wire.link import Call, Concern, JobReport, RankMarks
from pmesh.core.wire.records import fingerprint
from pmesh.ids import OpNumber, Rank, TrainerId
from simulation.job_host import JobHost, Siblings
from simulation.lane_messages import OpResult, Token

Fence: TypeAlias = Literal["view change", "own stall"]
"""Why nothing is delivered: V3, or V8."""


@dataclass(frozen=True, slots=True)
class End:
    """How an op has ended for a trainer."""

    call: Call
    outcome: OpResult | Verdict
    world: tuple[TrainerId, ...]
    """Who rank i is from then on (O5)."""
    staged: int = -1
    """The number of the roster of the last attempt here, whose residual is committed now (O9)."""


@dataclass(slots=True)
class Op:
    """The op that a trainer has called and that has not ended."""

    number: OpNumber
    call: Call
    root: TrainerId | None
    """Of a broadcast: who it is, whatever its rank becomes (O5)."""
    receivers: tuple[TrainerId, ...]
    """Of a broadcast: likewise, who lacks what it brings."""
    deadline: float
    phase: Literal["waiting", "ring", "fetching", "stuck", "ready"] = "waiting"
    contributors: tuple[TrainerId, ...] = ()
    result: OpResult | None = None
    holds: bool = True
    """Whether the attempt has brought the result here, or only the news of it."""
    staged: int = -1
    """The number of the roster of the last attempt: what it rounds away is kept meanwhile."""
    asked: int = 0
    """How many holders have been asked for its result."""
    asked_at: float = 0.0
    broken_at: float | None = None
    """When a lane that it needs has ended."""
    broken: int = 0


class LocalRank:
    """A trainer of a job, connected here."""

    def __init__(
        self,
        host: JobHost,
        siblings: Siblings,
        roster: Roster,
        trainer: Trainer,
        value: Callable[[OpNumber], int],
    ) -> None:
        self.host = host
        self.siblings = siblings
        self.roster = roster
        self.trainer = trainer
        self.id = trainer.id
        self.value = value
        """What its trainer puts into an op: no two trainers or ops put in the same."""
        self.ledger = Ledger(stable=trainer.enters - 1)
        self.world: tuple[TrainerId, ...] = () if trainer.enters else roster.ids
        self.fingerprint = 0
        self.synced = -1
        self.stopped = False
        self.concern: Concern | None = None
        self.over: Verdict | None = None
        self.owed: OpOutcome | None = None
        self.leaving: str | None = None
        self.leaving_since = 0.0
        self.op: Op | None = None
        self.replied: Callable[[Verdict | None], None] | None = None
        """Told how the call that is under way has ended: with which error."""
        self.progress: tuple[int, float] | None = None
        self.moved = 0
        """How many messages its lanes have brought or taken."""
        self.tokens: dict[OpNumber, dict[TrainerId, Token]] = {}
        self.ends: dict[OpNumber, End] = {}
        """How each op ended here, for ever: what the invariants are checked on."""
        self.results: dict[OpNumber, OpResult] = {}
        self.fences: set[Fence] = set()
        self._running: OpNumber | None = None
        self._outcomes = {outcome.op: outcome for outcome in roster.outcomes}

    @property
    def rank(self) -> Rank | None:
        """Its place in the ring; None if the others go on without it."""
        return self.roster.rank_of(self.id)

    @property
    def size(self) -> int:
        """How many ranks the ring has."""
        return len(self.roster.trainers)

    @property
    def may_run(self) -> bool:
        """V10: whether its side has a majority, and the majority has installed its roster."""
        return may_run(self.roster, self.host.state.primaries)

    @property
    def superseded(self) -> Verdict | None:
        """Why the trainer has no part in the job any more, though it may come back (O6)."""
        if self.over is None and self.rank is None:
            return Verdict("HistorySuperseded", "the job goes on without this rank")
        return self.over

    @property
    def is_needed(self) -> bool:
        """Whether somebody may still ask for its results (O2)."""
        return self.over is None and (self.rank is not None or bool(self.results))

    # --- what the agreement reads and decides

    def report(self) -> JobReport:
        """For the flush answer (V3)."""
        roster, ranks = self.roster, (ledgers.report(self.ledger, self.id),)
        return JobReport(roster.job, roster.born, roster.number, fenced=False, ranks=ranks)

    def marks(self) -> RankMarks:
        """For every heartbeat (O2)."""
        return RankMarks(
            self.roster.job,
            self.roster.number,
            self.id,
            self.ledger.started,
            self.ledger.ended,
            self.fingerprint,
            self.synced,
            self.stopped,
        )

    def fence(self, why: Fence) -> None:
        """From here on no completion is delivered: V3, until a view is installed; or V8."""
        self.fences.add(why)

    def lift(self, fence: Fence) -> None:
        """What the fence was for is known."""
        self.fences.discard(fence)

    def follow(self, roster: Roster) -> bool:
        """A view has been installed that has this job; whether the op under way starts anew."""
        if roster.number == self.roster.number:
            self.lift("view change")
            return False
        self.host.roster_settled(self, roster)
        self.roster = roster
        self.concern = None
        self.progress = None
        self.tokens = {}
        self._outcomes = {outcome.op: outcome for outcome in roster.outcomes}
        for outcome in roster.outcomes:
            if outcome.verdict is not None and self._has_returned(outcome.op):
                self.owed = outcome
                call = self.ends[outcome.op].call
                self.ends[outcome.op] = End(call, outcome.verdict, outcome.contributors)
        self.ledger = ledgers.apply_failures(self.ledger, roster.outcomes)
        running = self._running
        if self.owed is not None and running is not None and running not in self._outcomes:
            self.take_back(running)
        self._stop_attempt()
        return True

    def end(self, verdict: Verdict) -> None:
        """The job is over for this trainer: the others go on without it, or not at all."""
        self.over = self.over or verdict
        self._stop_attempt()
        self.results.clear()

    def _stop_attempt(self) -> None:
        if self.op is not None:
            self.op.phase = "stuck"
        self.lift("view change")

    def _has_returned(self, op: OpNumber) -> bool:
        """Whether the trainer took the op for a success."""
        end = self.ends.get(op)
        return end is not None and isinstance(end.outcome, OpResult)

    def see(self, contributors: tuple[TrainerId, ...]) -> None:
        """A call returns that these have taken part in (O5)."""
        self.world = contributors

    # --- what the op asks

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

    def start(self, op: OpNumber, call: Call, *, is_root: bool) -> None:
        """The trainer has called the op, perhaps as a broadcast's root."""
        self._running = op
        self.fingerprint = fingerprint(call)
        self.ledger = ledgers.start(self.ledger, op, call, is_root=is_root)

    def take_back(self, op: OpNumber) -> None:
        """The call is as if it had never been made."""
        self._running = None
        self.fingerprint = 0
        others = {number: r for number, r in self.ledger.ops.items() if number != op}
        self.ledger = replace(self.ledger, ops=others)

    def complete(self, op: Op, result: OpResult) -> None:
        """The op's result is there, if it is for this rank at all, and may be delivered."""
        self._running = None
        self.ledger = ledgers.complete(self.ledger, op.number, op.contributors, holds=op.holds)
        if op.holds:
            self.results[op.number] = result

    def fail(self, outcome: OpOutcome) -> None:
        """The op has failed, here as everywhere."""
        self._running = None
        self.ledger = ledgers.fail(self.ledger, outcome)

    def stabilize(self, mark: int) -> None:
        """Every rank has ended the ops up to `mark`: nobody will ask for their results."""
        if self._running is not None:
            mark = min(mark, self._running - 1)
        if self.concern is not None and self.concern.op >= 0:
            mark = min(mark, self.concern.op - 1)
        if mark <= self.ledger.stable:
            return
        before = self.ledger.stable
        self.ledger = ledgers.stabilize(self.ledger, mark)
        for op in range(before + 1, self.ledger.stable + 1):
            self.results.pop(OpNumber(op), None)
            self._outcomes.pop(OpNumber(op), None)
        self.host.facts_changed()

    def previous_in_ring(self) -> Trainer:
        """Before us; only while we are in the ring."""
        return self.roster.trainers[self.roster.ids.index(self.id) - 1]

    def next_in_ring(self) -> Trainer:
        """After us; only while we are in the ring."""
        place = self.roster.ids.index(self.id) + 1
        return self.roster.trainers[place % self.size]

    def raise_concern(self, verdict: Verdict | None, op: int = -1) -> None:
        """Something that only a view change can settle (O3)."""
        roster = self.roster
        self.concern = Concern(roster.job, roster.born, roster.number, verdict, op)
        self.host.facts_changed()
