"""The design's invariants I1 to I5 over a whole simulated cluster; the first breach raises."""

from collections.abc import Callable, Iterable

from pmesh.core.messages import AskResult
from pmesh.core.views import Roster, Verdict, View
from pmesh.ids import Epoch, JobName, Member, OpNumber, Rank
from pmesh.testing.jobs import LocalJob
from pmesh.testing.lane_messages import OpResult


class Violation(AssertionError):  # noqa: N818 - what is found, as in "I3 violation"
    """An invariant of the design does not hold."""


class Invariants:
    """Watches what agents install and how ops end."""

    def __init__(self, jobs: Callable[[], Iterable[LocalJob]]) -> None:
        """`jobs` gives the local jobs of all live agents."""
        self.installs = 0
        self.ops_ended = 0
        self.ops_failed = 0
        self.resets = 0
        """How often a member of a view with others had to begin anew, as a newcomer or alone."""
        self._jobs = jobs
        self._views: dict[Epoch, View] = {}
        self._last: dict[Member, View] = {}
        self._promised: dict[Member, Epoch] = {}
        self._results: dict[tuple[JobName, Epoch, OpNumber], OpResult] = {}
        self._ends: dict[tuple[JobName, Epoch, OpNumber, Rank], OpResult | Verdict] = {}

    def promised(self, member: Member, epoch: Epoch) -> None:
        """V1: a promise is never taken back."""
        if epoch < self._promised.get(member, epoch):
            raise Violation(f"V1: {member} promises {epoch} after {self._promised[member]}")
        self._promised[member] = epoch

    def installed(self, member: Member, view: View) -> None:
        """I1 and I2, and V1: nothing is installed below a promise; V2: the lineage is true."""
        self.installs += 1
        if self._views.setdefault(view.epoch, view) != view:
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
        self._last[member] = view

    def _check_lineage(self, view: View) -> None:
        """V2: all who continue come from one base, or from what it says they had before it."""
        before = {s.member: s.previous for s in view.seats if s.previous is not None}
        if before:
            base = self._views[max(before.values())]
            for member, epoch in before.items():
                if epoch not in (base.epoch, base.previous_epoch_of(member)):
                    raise Violation(f"V2: {member} continues from {epoch} beside {base.epoch}")

    def ended(self, job: LocalJob, rank: Rank, op: OpNumber) -> None:
        """I3, whoever sees whom: one op has one result. Then what `agree` checks, for this op."""
        outcome = job.ends[rank, op]
        self.ops_ended += 1
        if isinstance(outcome, OpResult):
            key = (job.roster.job, job.roster.born, op)
            if self._results.setdefault(key, outcome) != outcome:
                raise Violation(f"I3: {key}: {outcome} at rank {rank}, {self._results[key]} before")
        else:
            self.ops_failed += 1
        earlier = self._ends.setdefault((job.roster.job, job.roster.born, op, rank), outcome)
        told_late = isinstance(outcome, Verdict) and outcome.error == "OpMismatch"  # I5 allows it
        if earlier != outcome and not told_late:
            raise Violation(f"I4: op {op} at rank {rank} ends as {outcome} after {earlier}")
        self._compare(job, [op])

    def agree(self, job: LocalJob) -> None:
        """I4 and I5: ranks under one roster ended the same ops in the same way."""
        self._compare(job, sorted({op for ledger in job.ledgers.values() for op in ledger.ops}))

    def lost_result(self, job: LocalJob, ask: AskResult) -> None:
        """O2: whoever is named as a holder has the result."""
        raise Violation(f"O2: rank {ask.holder} of {job.roster.job} no longer has op {ask.op}")

    def _compare(self, job: LocalJob, ops: list[OpNumber]) -> None:
        for other in self._jobs():
            if not _same(job.roster, other.roster):
                continue
            for op in ops:
                ends = [
                    (rank, at.ends[rank, op])
                    for at in (job, other)
                    for rank in at.trainers
                    if (rank, op) in at.ends
                ]
                if any(end != ends[0][1] for _, end in ends):
                    raise Violation(f"{_broken(ends)}: {job.roster.job} op {op}: {ends}")


def _broken(ends: list[tuple[Rank, OpResult | Verdict]]) -> str:
    """Results beside verdicts break I4; verdicts that differ, I5."""
    return "I4" if any(isinstance(end, OpResult) for _, end in ends) else "I5"


def _same(roster: Roster, other: Roster) -> bool:
    return (
        roster.number == other.number
        and roster.job == other.job
        and roster.born == other.born
        and roster == other
    )
