"""One rank that lives on a simulated agent: its op, what its lanes brought, how its ops ended."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pmesh.core.jobs.attempt import OpState
from pmesh.core.jobs.progress import of_job
from pmesh.core.jobs.rank import RankState
from pmesh.core.values import Roster, Trainer, Verdict
from pmesh.core.views.op_log import Ledger, pass_barriers
from pmesh.core.wire.calls import Call
from pmesh.ids import OpNumber, TrainerId
from simulation.lane_messages import OpResult, Token

if TYPE_CHECKING:
    from simulation.agents import SimulatedAgent
    from simulation.local_jobs import LocalJobs
    from simulation.repeats import RepeatedCalls


@dataclass(frozen=True, slots=True)
class End:
    """How an op has ended for a trainer."""

    call: Call
    outcome: OpResult | Verdict
    world: tuple[TrainerId, ...]
    """Who rank i is from then on (O5)."""
    staged: int = -1
    """The number of the roster of the last attempt here, whose residual is committed now (O9)."""


@dataclass(slots=True, kw_only=True)
class SimulatedOp(OpState):
    """An op, and how far it has come."""

    phase: Literal["waiting", "ring", "fetching", "stuck", "timed out", "ready"] = "waiting"
    result: OpResult | None = None
    staged: int = -1
    """The number of the roster of the last attempt: what it rounds away is kept meanwhile."""
    sent: set[TrainerId] = field(default_factory=set[TrainerId])
    """Whose tokens the last attempt has handed on."""
    asked: int = 0
    """How many holders have been asked for its result."""
    asked_at: float = 0.0
    broken_at: float | None = None
    """When a lane that it needs has ended."""


class SimulatedRank(RankState[OpResult | None]):
    """A trainer of a job, connected here. It retains None where an op has left it no result."""

    def __init__(
        self,
        host: "SimulatedAgent",
        jobs: "LocalJobs",
        roster: Roster,
        trainer: Trainer,
        value: Callable[[OpNumber], int],
    ) -> None:
        super().__init__(roster, trainer)
        self.host = host
        self.jobs = jobs
        self.value = value
        """What its trainer puts into an op: no two trainers or ops put in the same."""
        self.op: SimulatedOp | None = None
        self.replied: Callable[[Verdict | None], None] | None = None
        """Called when the call that is under way has ended: with which error."""
        self.tokens: dict[OpNumber, dict[TrainerId, Token]] = {}
        self.ends: dict[OpNumber, End] = {}
        """How each op ended here, for ever: what the invariants are checked on."""
        self.repeats: RepeatedCalls | None = None
        """What it runs without being asked, if it does."""

    @property
    def true_ledger(self) -> Ledger:
        """The ledger as it will be once the rank has caught up."""
        ended = {} if self.repeats is None else self.repeats.ended
        if not ended:
            return self.ledger
        last = max(ended)
        return pass_barriers(self.ledger, last, ended[last][0], self.roster.ids)

    @property
    def next_op(self) -> OpNumber:
        """The number of the op that its trainer calls next."""
        return OpNumber(self.true_ledger.started + 1)

    @property
    def has_all_here(self) -> bool:
        """Whether all of several ranks are at this agent."""
        return self.size > 1 and len({trainer.member for trainer in self.roster.trainers}) == 1

    def beside(self) -> Iterator["SimulatedRank"]:
        """Return the ranks of its job at this agent, this one too."""
        return of_job(self.jobs.ranks, self.roster)

    def mates(self) -> "list[SimulatedRank]":
        """Return the ranks that meet in an op at this agent, in the ring's order."""
        here = [other for other in self.beside() if other.rank is not None]
        return sorted(here, key=lambda other: other.rank or 0)

    def catch_up(self) -> None:
        """Note what the rank has run by itself."""
        if self.repeats is not None:
            self.repeats.catch_up()

    def recall(self) -> None:
        """Also run nothing by itself from now on."""
        if self.repeats is not None:
            self.repeats.recall()

    def follow(self, roster: Roster) -> bool:
        """Under another number the attempt is over; what had returned may fail late (I5)."""
        if roster.number != self.roster.number:
            self.host.roster_settled(self, roster)
        before = set(self._failed)
        renumbered = super().follow(roster)
        for outcome in roster.outcomes:
            if outcome.verdict is not None and outcome.op in self._failed - before:
                call = self.ends[outcome.op].call
                self.ends[outcome.op] = End(call, outcome.verdict, self.world_after(outcome))
        if renumbered:
            self.tokens = {}
            self._stop_attempt()
        return renumbered

    def end(self, verdict: Verdict) -> tuple[OpResult | None, ...]:
        """The attempt is over."""
        self._stop_attempt()
        return super().end(verdict)

    def _stop_attempt(self) -> None:
        if self.op is not None:
            self.op.phase = "stuck"

    def stabilize(self, mark: int) -> tuple[OpResult | None, ...]:
        """The agent has something else to say."""
        before = self.ledger.stable
        released = super().stabilize(mark)
        if self.ledger.stable > before:
            self.host.facts_changed()
        return released

    def request_view(self, verdict: Verdict | None, op: int = -1) -> None:
        """The agent has something else to say."""
        super().request_view(verdict, op)
        self.host.facts_changed()
