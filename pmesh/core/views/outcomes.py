"""How a view change resolves the ops that are not yet stable: completed, failed, or run again."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pmesh.core.jobs.op_log import NONE_YET
from pmesh.core.ops.kinds import BOUND_KINDS
from pmesh.core.values import OpOutcome, Roster, Verdict
from pmesh.core.wire.link import Concern, JobReport, OpReport
from pmesh.ids import OpNumber, TrainerId

Reports = Mapping[OpNumber, Mapping[TrainerId, OpReport]]
"""What is known of each op that is not stable, by whom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What the flush answers tell of one job."""

    ops: Reports
    highest: int
    """The highest op that anybody has started; -1 before the first."""
    stable: int
    """The highest op that has ended at all ranks, or that a newcomer had no part in."""
    marks: Mapping[TrainerId, int]
    """Up to which op each has told it so; of who has told nothing, none."""


def gather(reports: Sequence[JobReport]) -> Knowledge:
    """Read the flush answers of one job."""
    ops: dict[OpNumber, dict[TrainerId, OpReport]] = {}
    marks: dict[TrainerId, int] = {}
    for rank in (rank for report in reports for rank in report.ranks):
        marks[rank.trainer] = rank.stable
        for op in rank.ops:
            ops.setdefault(op.op, {})[rank.trainer] = op
    stable = max(marks.values(), default=NONE_YET)
    return Knowledge(ops=ops, highest=max([stable, *ops]), stable=stable, marks=marks)


def resolve_ops(
    before: Roster,
    after: Roster,
    known: Knowledge,
    concerns: Sequence[Concern],
) -> tuple[OpOutcome, ...]:
    """The outcome of every op that has one; the others run on, or again (O1).

    Args:
        before: the roster under which the ops were called.
        after: the roster that is being settled, without those who are lost.
        known: what its trainers, and those lost ones whose agents live, have told.
        concerns: what is asked of the leader about this roster.
    """
    stuck = {OpNumber(c.op): c.verdict for c in concerns if c.op >= 0 and c.verdict}
    if after.losses and after.terms.on_loss == "raise":
        stuck |= dict.fromkeys(_ops_that_a_loss_fails(known), after.losses[0])
    # O3: what has failed stays so, also for those who missed the view that said it, or come to it
    # yet: until each of those who had a part in it knows that all have ended it.
    outcomes = [
        outcome
        for outcome in before.outcomes
        if outcome.verdict and not all(_stable_marks(outcome.op, after, known))
    ]
    settled = {outcome.op for outcome in outcomes}
    for number in sorted((known.ops.keys() | stuck.keys()) - settled):
        reports = known.ops.get(number, {})
        verdict = stuck.get(number)
        outcome: OpOutcome | None
        is_past = _is_past(number, before, known)
        if not is_past and _is_torn(before, after, number, reports):
            verdict = verdict or _roster_changed(after, number)
            outcome = OpOutcome(number, _who_was_in(after, number), verdict=verdict)
        else:
            if not is_past and _is_out_of_reach(after, number, reports):
                verdict = verdict or _gone_with_its_holders(after, number)
            outcome = _resolve_op(after, number, reports, verdict)
        if outcome is not None:
            outcomes.append(outcome)
    return tuple(outcomes)


def outcome_of(roster: Roster, op: OpNumber) -> OpOutcome | None:
    """How the last view change resolved the op; None: it runs on, or again."""
    return next((outcome for outcome in roster.outcomes if outcome.op == op), None)


def op_to_enter(known: Knowledge, after: Roster) -> OpNumber | None:
    """O6: the `sync` that is under way, with which newcomers may begin; None if there is none.

    Whoever has called it has ended all ops before, so that the others can fetch these, and the
    newcomer misses nothing. Nobody has its result, so it runs again, with the newcomer.
    """
    number = OpNumber(known.highest)
    reports = known.ops.get(number, {})
    is_sync = reports and all(report.call.kind == "sync" for report in reports.values())
    return number if is_sync and outcome_of(after, number) is None else None


def lost_results(roster: Roster, kept: Collection[object]) -> tuple[OpNumber, ...]:
    """Ops whose every holder is gone, perhaps after its rank was lost: nobody can fetch them."""
    members = {t.id: t.member for t in roster.trainers + roster.witnesses}
    return tuple(
        outcome.op
        for outcome in roster.outcomes
        if outcome.holders and not any(members.get(h) in kept for h in outcome.holders)
    )


def _ops_that_a_loss_fails(known: Knowledge) -> list[OpNumber]:
    """Where a loss is to raise: the ops under way, and if there is none, the next one."""
    under_way = [
        number
        for number, reports in known.ops.items()
        if not any(report.completed or report.verdict for report in reports.values())
    ]
    return under_way or [OpNumber(known.highest + 1)]


def _resolve_op(
    after: Roster, op: OpNumber, reports: Mapping[TrainerId, OpReport], stuck: Verdict | None
) -> OpOutcome | None:
    """One verdict for all (O3). None: nobody has an end of it, so it runs again (O1)."""
    in_order = [report for _, report in sorted(reports.items())]
    for report in in_order:
        if report.verdict is not None:
            return OpOutcome(op, report.contributors, verdict=report.verdict)
    holders = _holders(after, reports)
    asked = {t: r for t, r in sorted(reports.items()) if t in after.ids or t in holders}
    if len({report.call for report in asked.values()}) > 1:
        return OpOutcome(op, _who_was_in(after, op), verdict=_mismatch(after, op, asked))  # I5
    if holders:  # I4: what one survivor completed, every survivor completes.
        contributors = next(report.contributors for report in in_order if report.completed)
        return OpOutcome(op, contributors, holders=holders)
    if stuck is None and len(_who_was_in(after, op)) < len(after.trainers):
        stuck = _gone_with_its_holders(after, op)
    return None if stuck is None else OpOutcome(op, _who_was_in(after, op), verdict=stuck)


def _stable_marks(op: OpNumber, roster: Roster, known: Knowledge) -> Iterator[bool]:
    """For which ranks the op is stable, of those who had a part in it (O6)."""
    return (known.marks.get(t.id, NONE_YET) >= op for t in roster.trainers if t.enters <= op)


def _is_past(op: OpNumber, roster: Roster, known: Knowledge) -> bool:
    """O2: for somebody it is stable, and so it has ended also where it is not reported any more."""
    completed = (report.completed for report in known.ops.get(op, {}).values())
    return any(_stable_marks(op, roster, known)) and all(completed)


def _is_torn(
    before: Roster, after: Roster, op: OpNumber, reports: Mapping[TrainerId, OpReport]
) -> bool:
    """O4: whether an op that is bound to its ranks has ended at some of them, or has lost some."""
    told = reports.values()
    if not any(r.call.kind in BOUND_KINDS for r in told) or any(r.verdict for r in told):
        return False
    if len({report.call for report in told}) > 1:
        return False  # a mismatch, which says more
    ended = {trainer for trainer, report in reports.items() if report.completed}
    left = set(_who_was_in(after, op))
    return not left <= ended and (bool(ended) or left != set(_who_was_in(before, op)))


def _is_out_of_reach(after: Roster, op: OpNumber, reports: Mapping[TrainerId, OpReport]) -> bool:
    """O6: some ranks have ended it and may be in a later op, so it can't run again; others lack it.

    So it is with a broadcast whose root is lost, and with it all whom it had brought anything.
    """
    ended = {trainer for trainer in _who_was_in(after, op) if _has_ended(reports.get(trainer))}
    return 0 < len(ended) < len(_who_was_in(after, op)) and not _holders(after, reports)


def _has_ended(report: OpReport | None) -> bool:
    return report is not None and report.completed


def _roster_changed(after: Roster, op: OpNumber) -> Verdict:
    lost = tuple(trainer for loss in after.losses for trainer in loss.trainers)
    why = "; ".join(loss.message for loss in after.losses) or "its ring was built anew"
    text = f"op {op} of job {after.job!r} depends on who takes part, and did not end at all: {why}"
    return Verdict("RosterChanged", text, lost)


def _who_was_in(roster: Roster, op: OpNumber) -> tuple[TrainerId, ...]:
    """O6: who has entered later had no part in it, and is not in the world that follows it (O5)."""
    return tuple(trainer.id for trainer in roster.trainers if trainer.enters <= op)


def _gone_with_its_holders(roster: Roster, op: OpNumber) -> Verdict:
    """O6: it can't run with those who have ended it, nor with those who have entered since."""
    text = f"op {op} of job {roster.job!r} can't run again: its result is lost, and others went on"
    text = "; ".join([text, *(loss.message for loss in roster.losses)])
    lost = (trainer for loss in roster.losses for trainer in loss.trainers)
    return Verdict("RankLost", text, tuple(lost))


def _holders(after: Roster, reports: Mapping[TrainerId, OpReport]) -> tuple[TrainerId, ...]:
    """Who has the result of an op that has completed somewhere; nobody if it may run again.

    Ranks, or if none has it, lost trainers whose agents live (O2). Where only ranks have completed
    that a broadcast brings nothing to, its root, who is about to complete (I4).
    """
    told = sorted(reports.items())
    holding = [t for t, report in told if report.completed and report.holds]
    if not holding and any(report.completed for _, report in told):
        return tuple(t for t, report in told if report.is_root and t in after.ids)
    return tuple(t for t in holding if t in after.ids) or tuple(holding)


def _mismatch(roster: Roster, op: OpNumber, asked: Mapping[TrainerId, OpReport]) -> Verdict:
    said = "; ".join(
        f"rank {rank} ({trainer.name}): "
        f"{asked[trainer.id].call if trainer.id in asked else 'not called yet'}"
        for rank, trainer in enumerate(roster.trainers)
        if trainer.enters <= op
    )
    return Verdict("OpMismatch", f"op {op} of job {roster.job!r} differs: {said}", tuple(asked))
