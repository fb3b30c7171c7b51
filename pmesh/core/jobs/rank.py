"""The state of one rank: its running op, the ended and failed ones, its fences and results.

Two drivers extend this plain state: `pmesh.agent.jobs.ranks` with tasks, lanes and shared memory,
`simulation.ranks` with messages on a timeline. If a method returns results, no rank will ask for
them any more, and its caller releases them.
"""

from collections.abc import Collection
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from pmesh.core.links.health import WIRED
from pmesh.core.ops.kinds import KINDS
from pmesh.core.values import Comparison, OpOutcome, Roster, Trainer, Verdict
from pmesh.core.views import op_log as ledgers
from pmesh.core.views.op_log import Ledger
from pmesh.core.views.quorum import is_in_force
from pmesh.core.wire.calls import Call
from pmesh.core.wire.records import fingerprint
from pmesh.core.wire.trainer import World
from pmesh.core.wire.views import JobReport, KnownPrimary, RankProgress, ViewRequest
from pmesh.ids import OpNumber, Rank, TrainerId

COME_BACK = "mesh.sync() brings it back"

Fence: TypeAlias = Literal["view change", "own stall"]
"""Why a rank delivers no completion: a view change is under way (V3), or it has slept (V8)."""

R = TypeVar("R")
"""The result of an op, as the driver retains it."""


class RankState(Generic[R]):
    """A trainer of a job. Its calls and the views change this state."""

    def __init__(self, roster: Roster, trainer: Trainer) -> None:
        self.trainer = trainer
        self.id = trainer.id
        """The trainer's number within the job."""
        self._take_place(roster)
        self.ledger = Ledger(stable=trainer.enters - 1)
        self.world: tuple[TrainerId, ...] = () if trainer.enters else roster.ids
        """O5: the ranks as the trainer knows them; they change only when a call returns."""
        self.fingerprint = 0
        """The fingerprint of the last call; 0 while there is no call to compare."""
        self.synced = -1
        self.step = 0
        self.own_percent = -1
        """The share of its time that its trainer spends outside calls; -1 while unknown."""
        self.share_percent = -1
        """Its share of the rows of a batch; -1 in a job that deals none."""
        self.reports: dict[str, float] = {}
        """What its trainer has reported last; replaced, and never changed."""
        self.comparison: Comparison | None = None
        """What its trainer has found last of the states of all ranks."""
        self.stopped = False
        """Whether the trainer's process has been stopped, as by SIGSTOP."""
        self.view_request: ViewRequest | None = None
        self.over: Verdict | None = None
        """Why the job has ended for this trainer."""
        self.late_failure: OpOutcome | None = None
        """The failure of an op that had already returned here; the next call raises it (I5)."""
        self.leaving: str | None = None
        """Why the trainer is gone."""
        self.leaving_since = 0.0
        self.moved = 0
        """The bytes that its lanes have moved so far, by the driver's last count."""
        self.patience_s = WIRED.gone_after_s
        """How long the lanes may move nothing before the leader is asked for a view (V6)."""
        self.last_move: tuple[int, float] | None = None
        """`moved`, and when it was seen to change; None while no op waits for the lanes."""
        self.stalled: tuple[OpNumber, int] = OpNumber(-1), 0
        """The last op in which the lanes stood still for too long, and how often they did."""
        self.fences: set[Fence] = set()
        self.in_force = is_in_force(roster, ())
        """Whether the voters that the roster needed are known to have installed it (V10)."""
        self.running: OpNumber | None = None
        """The op that has been called and has not ended."""
        self.results: dict[OpNumber, R] = {}
        """The results that are retained until their ops are stable (O2)."""
        self._names = {t.id: roster.name_of(t) for t in roster.trainers}
        self._outcomes = {outcome.op: outcome for outcome in roster.outcomes}
        self._failed: set[OpNumber] = set()
        """The ops whose failure was raised, or will be as `late_failure`: once each."""

    def __repr__(self) -> str:
        return f"<LocalRank {self.trainer.id} of {self.roster.job!r}, roster {self.roster.number}>"

    def _take_place(self, roster: Roster) -> None:
        self.roster: Roster = roster
        self.rank: Rank | None = roster.rank_of(self.id)
        """The trainer's place in the ring; None if the others go on without it."""
        self.size = len(roster.trainers)
        """How many ranks the ring has."""

    @property
    def may_run(self) -> bool:
        """V10: whether its side has a majority that is known to have installed the roster."""
        return self.roster.quorate and self.in_force

    @property
    def superseded(self) -> Verdict | None:
        """Why the trainer has no part in the job any more, though it may come back (O6)."""
        return self.why_superseded if self.over is None and self.rank is None else self.over

    @property
    def why_superseded(self) -> Verdict:
        """The verdict for a trainer without which the others go on."""
        text = f"job {self.roster.job!r} goes on without this rank; {COME_BACK}"
        return Verdict("HistorySuperseded", text)

    @property
    def is_needed(self) -> bool:
        """Whether the rank takes part, or others may still ask for its results (O2)."""
        return self.over is None and (self.rank is not None or bool(self.results))

    def describe_shortage(self, newcomers: int) -> str:
        """Return why ops wait for more ranks; empty if they don't."""
        roster = self.roster
        if not roster.quorate:
            voters, here = roster.primary.voters, {t.member for t in roster.trainers}
            of = f"{sum(voter in here for voter in voters)} of {len(voters)} ranks"
            return f"this side of a partition has {of}, which is no majority"
        if not self.in_force:
            return "a majority, which has not been seen to have agreed to the last change"
        if self.is_short_of_ranks(newcomers):
            return f"{self.size} of at least {roster.terms.min_ranks} ranks (min_ranks) are here"
        return ""

    def is_short_of_ranks(self, newcomers: int) -> bool:
        """Return whether `min_ranks` is not reached. Newcomers count: a sync must let them in."""
        return self.size + newcomers < self.roster.terms.min_ranks

    def neighbours(self) -> tuple[Trainer, Trainer]:
        """Return the trainers before and after this one in the ring, in which it must be."""
        place = self.roster.ids.index(self.id)
        return self.roster.trainers[place - 1], self.roster.trainers[(place + 1) % self.size]

    # --- what the agreement reads and decides

    def catch_up(self) -> None:
        """Note what the driver has done and not noted yet: it may run ops without being asked.

        Whoever reads or changes how far the rank has come calls this first.
        """

    def recall(self) -> None:
        """Catch up, and from now on do nothing without being asked."""
        self.catch_up()

    def report(self) -> JobReport:
        """Return this rank's report for the flush answer (V3)."""
        self.recall()  # so that it stays true until the fence
        roster, (sends_to, receives_from) = self.roster, self.open_lanes()
        rank = msgspec.structs.replace(
            ledgers.report(self.ledger, self.id), sends_to=sends_to, receives_from=receives_from
        )
        return JobReport(roster.job, roster.born, roster.number, fenced=False, ranks=(rank,))

    def open_lanes(self) -> tuple[tuple[TrainerId, ...], tuple[TrainerId, ...]]:
        """Return to whom and from whom this rank holds a lane; the driver knows."""
        return (), ()

    def progress(self) -> RankProgress:
        """Return how far this rank has come; every heartbeat carries it (O2)."""
        self.catch_up()
        roster, ledger = self.roster, self.ledger
        return RankProgress(
            roster.job,
            roster.number,
            self.id,
            ledger.started,
            ledger.ended,
            self.fingerprint,
            self.synced,
            self.stopped,
            self.step,
            self.own_percent,
            self.share_percent,
            self.reports,
            self.comparison,
        )

    def request_view(self, verdict: Verdict | None, op: int = -1) -> None:
        """Ask the leader for a view change, which alone settles a loss or a stuck op (O3)."""
        self.recall()
        roster = self.roster
        self.view_request = ViewRequest(roster.job, roster.born, roster.number, verdict, op)

    def fence(self, why: Fence) -> None:
        """Deliver no completion from now on (V3, V8)."""
        self.recall()  # V3: after the fence nothing is delivered
        self.fences.add(why)

    def lift(self, fence: Fence) -> None:
        """Remove a fence, whose reason is over."""
        self.fences.discard(fence)

    def learn(self, known: Collection[KnownPrimary]) -> None:
        """Note which rosters with a quorum the agent knows: ours may be in force by them (V10)."""
        self.in_force = self.in_force or is_in_force(self.roster, known)

    def follow(self, roster: Roster) -> bool:
        """Follow the roster of an installed view; return whether the running op starts again."""
        self.recall()
        renumbered = roster.number != self.roster.number
        if renumbered:
            self._settle(roster)
        self.lift("view change")
        return renumbered

    def _settle(self, roster: Roster) -> None:
        self._take_place(roster)
        self.in_force = is_in_force(roster, ())
        self.view_request = None
        self.last_move = None  # the new lanes have had no time to move anything
        self._names |= {t.id: roster.name_of(t) for t in roster.trainers}
        self._outcomes = {outcome.op: outcome for outcome in roster.outcomes}
        self._failed = {
            op for op in self._failed if op in self._outcomes or op > self.ledger.stable
        }
        for outcome in roster.outcomes:
            if outcome.verdict is not None and self._has_returned(outcome.op):
                self.late_failure = outcome
                self._failed.add(outcome.op)
        self.ledger = ledgers.apply_failures(self.ledger, roster.outcomes)
        running = self.running
        if self.late_failure is not None and running is not None and running not in self._outcomes:
            # I5: its trainer will call another op instead, so no rank may count on this one. All
            # that it has sent was under the roster number before.
            self.take_back(running)

    def end(self, verdict: Verdict) -> tuple[R, ...]:
        """End the job for this trainer: the others go on without it, or not at all."""
        self.recall()
        self.over = self.over or verdict
        self.lift("view change")
        released = tuple(self.results.values())
        self.results.clear()
        return released

    def _has_returned(self, op: OpNumber) -> bool:
        """Return whether the trainer took this failed op for a success; it did if it is stable."""
        if op < self.trainer.enters or op in self._failed:
            return False
        report = self.ledger.ops.get(op)
        return op <= self.ledger.stable if report is None else report.completed

    # --- what its trainer sees

    def describe_world(self) -> World:
        """Return the ranks as the trainer sees them (O5)."""
        rank = self.world.index(self.id) if self.id in self.world else -1
        names = tuple(self._names.get(trainer, "a lost machine") for trainer in self.world)
        return World(rank, self.world, names)

    def see(self, contributors: tuple[TrainerId, ...]) -> World | None:
        """Set the world of a call that returns, and return it; None if it is as before (O5)."""
        if contributors == self.world:
            return None
        self.world = contributors
        self._names = {
            t: name for t, name in self._names.items() if t in contributors or t in self.roster.ids
        }
        return self.describe_world()

    # --- the op under way

    def failure_of(self, op: OpNumber) -> OpOutcome | None:
        """Return why the op fails, and for whom; None while it may succeed."""
        if self.over is not None or self.rank is None:
            return OpOutcome(op, self.world, verdict=self.superseded)
        outcome = self._outcomes.get(op)
        return outcome if outcome is not None and outcome.verdict is not None else None

    def result_elsewhere(self, op: OpNumber) -> OpOutcome | None:
        """Return who has the result of an op that others completed; None if it must be run."""
        outcome = self._outcomes.get(op)
        return outcome if outcome is not None and outcome.holders else None

    def world_after(self, failure: OpOutcome) -> tuple[TrainerId, ...]:
        """Return the ranks of the world after a failed op.

        O5: if a later op has ended elsewhere already, as a broadcast may at its root, it has ended
        in the world in which all must call it.
        """
        later = [o for o in self._outcomes.values() if o.op > failure.op and o.holders]
        return min(later, key=lambda o: o.op, default=failure).contributors

    def start(self, op: OpNumber, call: Call) -> None:
        """Note that the trainer has called the op."""
        self.running = op
        self.fingerprint = fingerprint(call)
        is_root = call.kind == "broadcast" and self.world[call.root] == self.id
        self.ledger = ledgers.start(self.ledger, op, call, is_root=is_root)
        if call.kind == "sync":
            self.synced = op

    def take_back(self, op: OpNumber) -> None:
        """Forget the running call as if it had not been made."""
        self.running = None
        self.fingerprint = 0
        others = {number: r for number, r in self.ledger.ops.items() if number != op}
        self.ledger = msgspec.structs.replace(self.ledger, ops=others)

    def complete(
        self, op: OpNumber, result: R, contributors: tuple[TrainerId, ...], *, holds: bool = True
    ) -> None:
        """Record that the op has completed, and keep its result, which may be delivered."""
        self.running = None
        self.ledger = ledgers.complete(self.ledger, op, contributors, holds=holds)
        self.results[op] = result

    def complete_barriers(self, last: OpNumber, call: Call, result: R) -> tuple[R, ...]:
        """Record that ops up to the last have completed, all among the ranks of the roster.

        Each was a barrier, so this one and the last one are all that others may ask for (O2).

        Args:
            last: the number of the last one.
            call: that call.
            result: its result, to be kept.

        Returns:
            The results of the ops before, to be released.
        """
        self.ledger = ledgers.pass_barriers(self.ledger, last, call, self.roster.ids)
        self.fingerprint = fingerprint(call)
        self._outcomes = {}
        released = tuple(self.results.values())
        self.results = {last: result}
        return released

    def pass_barrier(self, op: OpNumber, kind: str) -> None:
        """O2: a barrier ends once all ranks have started it, so all ops before it are stable."""
        if self.size == 1:
            self.stabilize(op)
        elif KINDS[kind].barrier:
            self.stabilize(op - 1)

    def fail(self, outcome: OpOutcome) -> None:
        """Record that the op has failed, as it does at every rank."""
        self.running = None
        self._failed.add(outcome.op)
        self.ledger = ledgers.fail(self.ledger, outcome)

    def stabilize(self, mark: int) -> tuple[R, ...]:
        """Return the results up to op `mark`, to be released: every rank has ended these ops."""
        if self.running is not None:  # a view may have failed it before its trainer knows
            mark = min(mark, self.running - 1)
        if (
            self.view_request is not None and self.view_request.op >= 0
        ):  # I5: the leader asks who called what
            mark = min(mark, self.view_request.op - 1)
        self.ledger = ledgers.stabilize(self.ledger, mark)
        stable = self.ledger.stable
        if self._outcomes:
            self._outcomes = {op: o for op, o in self._outcomes.items() if op > stable}
        return tuple(map(self.results.pop, [op for op in self.results if op <= stable]))
