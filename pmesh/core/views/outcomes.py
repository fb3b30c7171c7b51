"""How a view change resolves the ops that are not yet stable: completed, failed, or run again."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pmesh.core.ops.kinds import BOUND_KINDS
from pmesh.core.values import OpOutcome, Roster, Verdict
from pmesh.core.views.op_log import NONE_YET
from pmesh.core.wire.views import JobReport, OpReport, ViewRequest
from pmesh.ids import OpNumber, TrainerId

Reports = Mapping[OpNumber, Mapping[TrainerId, OpReport]]
"""For each op that is not stable, the report of each trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """The content of the flush answers about one job."""

    ops: Reports
    highest: int
    """The highest op that any rank has started; -1 before the first."""
    stable: int
    """The highest op that has ended at all ranks, or that a newcomer had no part in."""
    marks: Mapping[TrainerId, int]
    """The stable mark that each rank reported; a rank without a report is missing."""


def gather(reports: Sequence[JobReport]) -> Knowledge:
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
    view_requests: Sequence[ViewRequest],
) -> tuple[OpOutcome, ...]:
    """Return the outcome of every op that has one; the others run on, or again (O4).

    Args:
        before: the roster under which the ops were called.
        after: the new roster, without the lost trainers.
        known: reports of its trainers, and of lost trainers whose agents live.
        view_requests: requests to the leader about this roster.
    """
    stuck = {OpNumber(c.op): c.verdict for c in view_requests if c.op >= 0 and c.verdict}
    if after.losses and after.terms.on_loss == "raise":
        stuck |= dict.fromkeys(_ops_that_a_loss_fails(known), after.losses[0])
    # O3: a failed op stays failed, even for ranks that missed the view that failed it or have yet
    # to call it, until each of its participants knows that all have ended it.
    outcomes = [
        outcome
        for outcome in before.outcomes
        if outcome.verdict and not all(_stable_marks(outcome.op, after, known))
    ]
    settled = {outcome.op for outcome in outcomes}
    for number in sorted((known.ops.keys() | stuck.keys()) - settled):
        reports = _that_matter(known.ops.get(number, {}), before)
        verdict = stuck.get(number)
        if not reports and verdict is None:
            continue
        outcome: OpOutcome | None
        is_past = _is_past(number, before, reports, known)
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


def _that_matter(
    reports: Mapping[TrainerId, OpReport], before: Roster
) -> Mapping[TrainerId, OpReport]:
    """Leave out what trainers that are lost already had only begun.

    They will not run it again, and the ranks that are left may be past it, with newcomers that had
    no part in it.
    """
    return {
        trainer: report
        for trainer, report in reports.items()
        if trainer in before.ids or report.completed or report.verdict is not None
    }


def outcome_of(roster: Roster, op: OpNumber) -> OpOutcome | None:
    """Return how the last view change resolved the op; None if it runs on, or again."""
    return next((outcome for outcome in roster.outcomes if outcome.op == op), None)


def op_to_enter(known: Knowledge, after: Roster) -> OpNumber | None:
    """O6: Return the `sync` in progress, in which newcomers may enter; None if there is none.

    A rank that called it has ended all earlier ops, so the others can fetch these and the newcomer
    misses nothing. No rank has its result yet, so it runs again with the newcomer. If this view
    fails an earlier op, no rank makes that `sync` next: they compare their calls (O10).
    """
    number = OpNumber(known.highest)
    reports = known.ops.get(number, {})
    is_sync = reports and all(report.call.kind == "sync" for report in reports.values())
    failed = [outcome.op for outcome in after.outcomes if outcome.verdict]
    is_news = any(r.verdict is None for op in failed for r in known.ops.get(op, {}).values())
    return number if is_sync and not is_news and outcome_of(after, number) is None else None


def may_reorder(roster: Roster, known: Knowledge) -> bool:
    """V13: True if the ranks can change places without failing an op that is bound to them (O4).

    The op under way must be one that runs again in the new order: all ranks see that order when it
    returns, and so before they call an op that depends on it.
    """
    reports = known.ops.get(OpNumber(known.highest), {}).values()
    return (
        bool(reports)
        and outcome_of(roster, OpNumber(known.highest)) is None
        and not any(r.completed or r.verdict or r.call.kind in BOUND_KINDS for r in reports)
        and not any(_is_torn(roster, roster, op, given) for op, given in known.ops.items())
    )


def lost_results(roster: Roster, kept: Collection[object]) -> tuple[OpNumber, ...]:
    """Return the ops that cannot be fetched any more: every holder of the result is gone."""
    members = {t.id: t.member for t in roster.trainers + roster.lost_holders}
    return tuple(
        outcome.op
        for outcome in roster.outcomes
        if outcome.holders and not any(members.get(h) in kept for h in outcome.holders)
    )


def _ops_that_a_loss_fails(known: Knowledge) -> list[OpNumber]:
    """Return the ops at which a loss raises: those in progress, or the next one."""
    under_way = [
        number
        for number, reports in known.ops.items()
        if not any(report.completed or report.verdict for report in reports.values())
    ]
    return under_way or [OpNumber(known.highest + 1)]


def _resolve_op(
    after: Roster, op: OpNumber, reports: Mapping[TrainerId, OpReport], stuck: Verdict | None
) -> OpOutcome | None:
    """Return one outcome for all ranks (O3), or None if it ended at none: it runs again (O4)."""
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
    """Yield for each participant of the op (O6) whether it knows the op to be stable."""
    return (known.marks.get(t.id, NONE_YET) >= op for t in roster.trainers if t.enters <= op)


def _is_past(
    op: OpNumber, roster: Roster, reports: Mapping[TrainerId, OpReport], known: Knowledge
) -> bool:
    """O2: True if the op is stable for some rank: it has ended even where no report names it."""
    completed = (report.completed for report in reports.values())
    return any(_stable_marks(op, roster, known)) and all(completed)


def _is_torn(
    before: Roster, after: Roster, op: OpNumber, reports: Mapping[TrainerId, OpReport]
) -> bool:
    """O4: True if an op that is bound to its ranks ended at only some of them, or lost some."""
    given = reports.values()
    if not any(r.call.kind in BOUND_KINDS for r in given) or any(r.verdict for r in given):
        return False
    if len({report.call for report in given}) > 1:
        return False  # the OpMismatch error says more
    ended = {trainer for trainer, report in reports.items() if report.completed}
    left = set(_who_was_in(after, op))
    return not left <= ended and (bool(ended) or left != set(_who_was_in(before, op)))


def _is_out_of_reach(after: Roster, op: OpNumber, reports: Mapping[TrainerId, OpReport]) -> bool:
    """O6: True if only some ranks ended the op and none has its result.

    It cannot run again, since those ranks may be in a later op. One case is a broadcast that lost
    its root and all ranks that the root had reached.
    """
    ended = {trainer for trainer in _who_was_in(after, op) if _has_ended(reports.get(trainer))}
    return 0 < len(ended) < len(_who_was_in(after, op)) and not _holders(after, reports)


def _has_ended(report: OpReport | None) -> bool:
    return report is not None and report.completed


def _roster_changed(after: Roster, op: OpNumber) -> Verdict:
    lost = tuple(trainer for loss in after.losses for trainer in loss.trainers)
    why = "; ".join(loss.message for loss in after.losses) or "its ring was rebuilt"
    text = f"op {op} of job {after.job!r} did not end at every rank it is bound to: {why}"
    return Verdict("RosterChanged", text, lost)


def _who_was_in(roster: Roster, op: OpNumber) -> tuple[TrainerId, ...]:
    """O6: ranks that entered later had no part in the op and are not in its world (O5)."""
    return tuple(trainer.id for trainer in roster.trainers if trainer.enters <= op)


def _gone_with_its_holders(roster: Roster, op: OpNumber) -> Verdict:
    """O6: the op cannot run with ranks that ended it, nor with ranks that entered since."""
    text = f"op {op} of job {roster.job!r} cannot run again: its result is lost, and others went on"
    text = "; ".join([text, *(loss.message for loss in roster.losses)])
    lost = (trainer for loss in roster.losses for trainer in loss.trainers)
    return Verdict("RankLost", text, tuple(lost))


def _holders(after: Roster, reports: Mapping[TrainerId, OpReport]) -> tuple[TrainerId, ...]:
    """Return the trainers that have the op's result; none if it may run again.

    These are ranks, or if no rank has it, lost trainers whose agents live (O2). If only ranks that
    receive no result have completed, it is the root, which is about to complete (I4).
    """
    ordered = sorted(reports.items())
    holding = [t for t, report in ordered if report.completed and report.holds]
    if not holding and any(report.completed for _, report in ordered):
        return tuple(t for t, report in ordered if report.is_root and t in after.ids)
    return tuple(t for t in holding if t in after.ids) or tuple(holding)


def _mismatch(roster: Roster, op: OpNumber, asked: Mapping[TrainerId, OpReport]) -> Verdict:
    said = "; ".join(
        f"rank {rank} ({roster.name_of(trainer)}): "
        f"{asked[trainer.id].call if trainer.id in asked else 'not called yet'}"
        for rank, trainer in enumerate(roster.trainers)
        if trainer.enters <= op
    )
    return Verdict("OpMismatch", f"op {op} of job {roster.job!r} differs: {said}", tuple(asked))
