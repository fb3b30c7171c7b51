"""The design's invariants over a whole simulated cluster; the first breach raises `Violation`.

V10 is checked over a whole history: all rosters of a job under which ops have run lie on one line.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TypeAlias

from pmesh.core.ops.kinds import BOUND_KINDS
from pmesh.core.values import OpOutcome, Roster, Trainer, Verdict, View
from pmesh.core.views.outcomes import outcome_of
from pmesh.core.wire.lanes import AskResult
from pmesh.ids import Epoch, JobName, Member, OpNumber
from simulation.lane_messages import OpResult
from simulation.network import Timeline
from simulation.ranks import End, SimulatedRank


class Violation(AssertionError):  # noqa: N818 - what is found, as in "I3 violation"
    """An invariant of the design does not hold."""


Run: TypeAlias = tuple[JobName, Epoch]
"""A job, from its beginning to its end."""


class Descent:
    """Of each job that asks for a majority: which roster with a quorum follows which."""

    def __init__(self) -> None:
        self._followed: dict[Run, dict[Epoch, set[Epoch]]] = {}
        self._running: dict[Run, set[Epoch]] = {}
        """Those under which ops have run, or might have."""

    def agreed(self, view: View, last: Mapping[Member, View]) -> None:
        """Somebody installs a view; `last` is what each member had installed until now."""
        for roster in view.rosters:
            followed = self._followed.setdefault(_run_of(roster), {})
            asks = roster.terms.quorum == "majority"
            if asks and roster.primary.epoch == view.epoch and view.epoch not in followed:
                # The first to install it: all are flushed, and have hardly installed another since.
                before = [last[m].roster_of(roster.job) for m in view.members if m in last]
                followed[view.epoch] = {b.primary.epoch for b in before if b and _may_be(b, roster)}

    def goes_on(self, roster: Roster) -> None:
        """Ops of the roster may run."""
        if roster.terms.quorum == "majority":
            self._running.setdefault(_run_of(roster), set()).add(roster.primary.epoch)

    def check(self) -> None:
        """Of two under which ops have run, the later one follows from the earlier one."""
        for run, epochs in self._running.items():
            for low, high in pairwise(sorted(epochs)):
                if low not in self._before(run, high):
                    raise Violation(f"V10: {run}: two sides have gone on, {low} and {high}")

    def _before(self, run: Run, epoch: Epoch) -> set[Epoch]:
        found, todo = set[Epoch](), [epoch]
        while todo:
            for earlier in self._followed[run].get(todo.pop(), ()):
                if earlier not in found:
                    found.add(earlier)
                    todo.append(earlier)
        return found


def _run_of(roster: Roster) -> Run:
    return roster.job, roster.born


def _may_be(before: Roster, roster: Roster) -> bool:
    """Whether a roster is the one that another has been voted on to follow."""
    return _run_of(before) == _run_of(roster) and before.primary.voters in roster.primary.needed[:1]


class Invariants:
    """Watches what agents install and how ops end."""

    def __init__(self, timeline: Timeline, ranks: Callable[[], Iterable[SimulatedRank]]) -> None:
        """`ranks` gives all ranks of all live agents."""
        self._timeline = timeline
        self.installs = 0
        self.ops_ended = 0
        self.ops_failed = 0
        self.resets = 0
        """How often a member of a view with others had to begin anew, as a newcomer or alone."""
        self.entered = 0
        """How many trainers have entered a running job."""
        self.superseded = 0
        self.descent = Descent()
        self._ranks = ranks
        self._views: dict[Epoch, View] = {}
        self._last: dict[Member, View] = {}
        self._promised: dict[Member, Epoch] = {}
        self._ends: dict[tuple[JobName, Epoch, OpNumber, Trainer], End] = {}
        self._left_out: dict[tuple[Member, Epoch], float] = {}
        self._slept: dict[Member, tuple[float, float]] = {}
        self._failed: dict[tuple[JobName, Epoch, OpNumber], int] = {}
        """The number of the first roster in which an op has failed."""

    # --- views

    def promised(self, member: Member, epoch: Epoch) -> None:
        """V1: a promise is never taken back."""
        if epoch < self._promised.get(member, epoch):
            raise Violation(f"V1: {member} promises {epoch} after {self._promised[member]}")
        self._promised[member] = epoch

    def installed(self, member: Member, view: View) -> None:
        """I1 and I2, and V1: nothing is installed below a promise; V2: the lineage is true."""
        self.installs += 1
        first = self._views.setdefault(view.epoch, view)
        if first is not view and first != view:
            raise Violation(f"I1: two views {view.epoch}")
        last = self._last.get(member)
        if member not in view.members or (last is not None and view.epoch <= last.epoch):
            raise Violation(f"I2: {member} installs {view.epoch} after {last}")
        if view.epoch < self._promised.get(member, view.epoch):
            raise Violation(f"V1: {member} installs {view.epoch} below its promise")
        previous = view.previous_epoch_of(member)
        if last is not None and previous not in (None, last.epoch):
            raise Violation(f"V2: {member} installs {view} after {last.epoch}")
        self._check_lineage(view)
        self.resets += last is not None and previous is None and len(last.seats) > 1
        self.descent.agreed(view, self._last)
        if last is not None and previous is not None:
            for other in set(last.members) - set(view.members):
                self._left_out.setdefault((other, last.epoch), self._timeline.now)
        self._last[member] = view

    def slept(self, member: Member, since: float) -> None:
        """A member wakes up, after so long that others may have gone on without it."""
        self._slept[member] = since, self._timeline.now

    def _check_lineage(self, view: View) -> None:
        """V2: all who continue come from one base, or from what it says they had before it."""
        before = {s.member: s.previous for s in view.seats if s.previous is not None}
        if before:
            base = self._views[max(before.values())]
            for member, epoch in before.items():
                if epoch not in (base.epoch, base.previous_epoch_of(member)):
                    raise Violation(f"V2: {member} continues from {epoch} beside {base.epoch}")

    # --- ops

    def began(self, rank: SimulatedRank) -> None:
        """O6: whoever is there has ended all ops before a newcomer's first, and none after."""
        enters = rank.trainer.enters
        if not enters:
            return
        self.entered += 1
        for other in self._beside(rank):
            if other.rank is None:
                continue  # a lost holder
            first = max(other.trainer.enters, other.ledger.ended + 1)
            if any(outcome_of(other.roster, OpNumber(op)) is None for op in range(first, enters)):
                raise Violation(f"O6: {rank.id} enters at {enters}, {other.id} has not come so far")
            end = other.ends.get(enters)
            if end is not None and isinstance(end.outcome, OpResult) and rank.id not in end.world:
                raise Violation(f"O6: {rank.id} enters at {enters}, {other.id} has completed it")

    def called(self, rank: SimulatedRank, op: OpNumber) -> None:
        """O6 and O5: a newcomer begins with the sync; rank i is the same trainer for all."""
        if rank.trainer.enters and not rank.ends and not _fails(rank, op):
            call = rank.ledger.ops[op].call
            if (op, call.kind) != (rank.trainer.enters, "sync"):
                raise Violation(f"O6: {rank.id} enters at {rank.trainer.enters} with {op} {call}")
            return
        for other in self._beside(rank):
            same_op = other.op is not None and other.op.number == op
            if same_op and other.ends and other.world and rank.world not in ((), other.world):
                raise Violation(f"O5: {rank.id} sees {rank.world}, {other.id} {other.world}")

    def ended(self, rank: SimulatedRank, op: OpNumber) -> None:
        """I4: what has ended has ended. I3 and I5: so it has for those beside us."""
        end = rank.ends[op]
        self.ops_ended += 1
        self.ops_failed += isinstance(end.outcome, Verdict)
        if rank.superseded is not None:
            raise Violation(f"O6: {rank.id} ends op {op}, and the others go on without it")
        if isinstance(end.outcome, OpResult):
            if not rank.may_run:
                raise Violation(f"V10: {rank.id} completes op {op} without a quorum")
            if rank.fences:
                raise Violation(f"V3, V8: {rank.id} completes op {op} behind a fence")
            self.goes_on(rank)
            _check_residual(rank, end, end.outcome)
        self._check_sleep(rank, op)
        key = (rank.roster.job, rank.roster.born, op, rank.trainer)
        earlier = self._ends.setdefault(key, end)
        if earlier != end:
            raise Violation(f"I4: op {op} at {rank.id} ends as {end} after {earlier}")
        self._compare(rank, [op])

    def goes_on(self, rank: SimulatedRank) -> None:
        """V10: its ops may run, as far as its agent knows."""
        self.descent.goes_on(rank.roster)

    def _check_sleep(self, rank: SimulatedRank, op: OpNumber) -> None:
        """V8: a rank that has slept ends nothing in a view that was left meanwhile, without it."""
        member = rank.trainer.member
        since, until = self._slept.get(member, (0.0, 0.0))
        left_at = self._left_out.get((member, self._last[member].epoch))
        result = isinstance(rank.ends[op].outcome, OpResult)
        if result and left_at is not None and since < left_at < until:
            raise Violation(f"V8: {rank.id} ends op {op}, and was left behind while it slept")

    def agree(self, rank: SimulatedRank) -> None:
        """I3, I4 and I5: ranks under one roster have ended the same ops in the same way."""
        self._compare(rank, sorted(op for op in rank.ledger.ops if op in rank.ends))
        for outcome in rank.roster.outcomes:
            if rank.id not in outcome.holders or outcome.op <= rank.ledger.stable:
                continue
            if rank.results.get(outcome.op) is None:
                raise Violation(f"O2: {rank.id} is named to hold op {outcome.op}")

    def settled(self, rank: SimulatedRank, after: Roster, view: View) -> None:
        """I4 and O2: what one who goes on has completed, the settled roster says is complete."""
        if view.previous_epoch_of(rank.trainer.member) is None:
            return
        if rank.roster.born != after.born or not set(rank.roster.trainers) & set(after.trainers):
            return  # V9: another history of the job goes on
        outcomes = {outcome.op: outcome for outcome in after.outcomes}
        self._note_failures(after)
        for op, report in rank.true_ledger.ops.items():
            if not (report.completed and report.holds):
                continue  # it can't serve what it lacks: then the op may fail, also here
            if rank.id not in after.ids and not self._is_lacked(op, after):
                continue  # its trainer is lost, and the others have ended it: perhaps as failed
            outcome = outcomes.get(op)
            if outcome is not None and outcome.verdict and report.call.kind in BOUND_KINDS:
                self._check_torn(outcome, after)  # raised by the next call
            elif outcome is None or (
                outcome.holders and outcome.contributors != report.contributors
            ):
                raise Violation(f"I4: {rank.id} has completed op {op}, resolved as {outcome}")
        living = set(after.ids)
        for outcome in after.outcomes:
            if living & set(outcome.holders) and not set(outcome.holders) <= living:
                raise Violation(f"O2: a lost holder beside living ones: {outcome}")

    def lost_result(self, rank: SimulatedRank, ask: AskResult) -> None:
        """O2: whoever is named as a holder has the result for as long as somebody lacks it."""
        asker = next((other for other in self._beside(rank) if other.id == ask.receiver), None)
        if asker is not None and ask.op not in asker.ends:
            raise Violation(f"O2: {ask.holder} of {rank.roster.job} no longer has op {ask.op}")

    def finish(self) -> None:
        """When a history is over: what all have seen, from the beginning."""
        for rank in self._ranks():
            self._compare(rank, sorted(rank.ends))
        self.descent.check()

    # --- inside

    def _beside(self, rank: SimulatedRank) -> Iterable[SimulatedRank]:
        """The other ranks that live under the same roster."""
        for other in self._ranks():
            if other is not rank and _same(rank.roster, other.roster):
                yield other

    def _is_lacked(self, op: OpNumber, roster: Roster) -> bool:
        """Whether some rank of the roster has not ended the op."""
        return any(
            op not in rank.ends and rank.trainer.enters <= op
            for rank in self._ranks()
            if rank.id in roster.ids
            and (rank.roster.job, rank.roster.born) == (roster.job, roster.born)
        )

    def _note_failures(self, roster: Roster) -> None:
        for outcome in roster.outcomes:
            if outcome.verdict:
                self._failed.setdefault((roster.job, roster.born, outcome.op), roster.number)

    def _check_torn(self, outcome: OpOutcome, roster: Roster) -> None:
        """O4: an op that is bound to its ranks fails only if some of them have not ended it."""
        op = outcome.op
        if self._failed[roster.job, roster.born, op] < roster.number:
            return  # a rank that had not ended it was there when an earlier view settled it
        ended = {
            rank.id
            for rank in self._ranks()
            if (rank.roster.job, rank.roster.born) == (roster.job, roster.born)
            and op in rank.ends
            and isinstance(rank.ends[op].outcome, OpResult)
        }
        if all(t.id in ended for t in roster.trainers if t.enters <= op):
            raise Violation(f"O4: op {op} has ended at all, and fails as {outcome}")

    def _compare(self, rank: SimulatedRank, ops: list[OpNumber]) -> None:
        for other in self._beside(rank):
            for op in ops:
                ours, theirs = rank.ends[op], other.ends.get(op)
                if theirs is None or (theirs.outcome, theirs.world) == (ours.outcome, ours.world):
                    continue
                told_late = ours.call != theirs.call or _is_torn(ours, theirs)
                if told_late and not _is_stable(op, rank, other):
                    continue  # I5 and O4: where one had returned, its next call raises it
                raise Violation(f"{_broken(ours, theirs)}: op {op} at {rank.id}: {ours}; {theirs}")


def _check_residual(rank: SimulatedRank, end: End, result: OpResult) -> None:
    """O9: what a rank keeps of its last attempt is what that result lacks, also if it fetched it.

    So a trainer need not know which attempt it was.
    """
    if end.call.kind == "all_reduce" and end.staged != result.number:
        raise Violation(f"O9: {rank.id} keeps the residual of {end.staged}, and got {result}")


def _is_stable(op: OpNumber, *ranks: SimulatedRank) -> bool:
    return all(op <= rank.ledger.stable for rank in ranks)


def _is_torn(ours: End, theirs: End) -> bool:
    """O4: what is bound to its ranks fails everywhere if it has not ended everywhere."""
    one_failed = isinstance(ours.outcome, Verdict) != isinstance(theirs.outcome, Verdict)
    return one_failed and ours.call.kind in BOUND_KINDS


def _fails(rank: SimulatedRank, op: OpNumber) -> bool:
    return rank.failure_of(op) is not None


def _broken(ours: End, theirs: End) -> str:
    """Results that differ break I3; results beside verdicts I4; verdicts that differ, I5."""
    results = isinstance(ours.outcome, OpResult) + isinstance(theirs.outcome, OpResult)
    if ours.outcome == theirs.outcome:
        return "O5"
    return ("I5", "I4", "I3")[results]


def _same(roster: Roster, other: Roster) -> bool:
    return roster is other or (
        roster.number == other.number
        and roster.job == other.job
        and roster.born == other.born
        and roster == other
    )
