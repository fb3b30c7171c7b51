"""Which jobs begin, and how a view change resolves the ops of those that run (O3, I4)."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from pmesh.core.messages import Call, Concern, Flushed, JobReport, OpReport, Waiting
from pmesh.core.views import OpOutcome, Roster, Trainer, Verdict, View
from pmesh.ids import Epoch, JobName, Member, OpNumber, Rank


def jobs_to_settle(
    view: View,
    kept: Collection[Member],
    concerns: Iterable[Concern],
    waiting: Mapping[Member, Sequence[Waiting]],
) -> tuple[JobName, ...]:
    """The jobs that a view change can help: a rank is lost, an op is stuck, or one may begin."""
    concerned = {(c.job, c.born, c.number) for c in concerns}
    running = {
        roster.job
        for roster in view.rosters
        if (roster.job, roster.born, roster.number) in concerned
        or _gone_ranks(roster, kept)
        or _lost_results(roster, kept)
    }
    known = {roster.job for roster in view.rosters}
    ready = {job for job in _ready_jobs(waiting) if job not in known}
    return tuple(sorted(running | ready))


def next_rosters(
    base: View,
    epoch: Epoch,
    *,
    ring: Sequence[Member],
    continuing: Collection[Member],
    answers: Mapping[Member, Flushed],
    concerns: Sequence[Concern],
    reasons: Mapping[Member, str],
) -> tuple[Roster, ...]:
    """The rosters of the view that `epoch` names, from the flush answers of its members."""
    rosters: dict[JobName, Roster] = {}
    for roster in base.rosters:
        after = _continue_roster(
            roster,
            epoch,
            continuing=continuing,
            answers=answers,
            concerns=concerns,
            reasons=reasons,
        )
        if len(after.lost_ranks) < len(after.trainers):  # a job without ranks has ended
            rosters[after.job] = after
    newcomers = [member for member in answers if member not in continuing]
    for roster in _whole_rosters(newcomers, answers):
        rosters.setdefault(roster.job, roster)
    waiting = {member: answers[member].waiting for member in ring}
    for job in _ready_jobs(waiting):
        if job not in rosters:
            rosters[job] = _first_roster(job, epoch, waiting, answers)
    return tuple(rosters[job] for job in sorted(rosters))


def outcome_of(roster: Roster, op: OpNumber) -> OpOutcome | None:
    """How the last view change resolved the op; None: it runs on, or again."""
    return next((outcome for outcome in roster.outcomes if outcome.op == op), None)


def is_same_history(before: Roster, after: Roster, rank: Rank) -> bool:
    """Whether a rank that follows `before` goes on in `after` (V9).

    The two sides of a partition may both settle a job. Where they meet, the other side's roster has
    the same birth, but another number, or the same number and other contents, or counts this very
    rank as lost; it never continues ours.
    """
    if after.born != before.born or after.number < before.number:
        return False
    if after.number == before.number:
        return after == before
    return rank not in after.lost_ranks or rank in before.lost_ranks


def keep_local_rosters(view: View, member: Member) -> tuple[Roster, ...]:
    """The rosters that need nobody else: they outlive a fall out of the view."""
    return tuple(
        roster
        for roster in view.rosters
        if all(trainer.member == member for trainer in roster.trainers)
    )


def _gone_ranks(roster: Roster, kept: Collection[Member]) -> tuple[Rank, ...]:
    return tuple(
        Rank(i)
        for i, trainer in enumerate(roster.trainers)
        if i not in roster.lost_ranks and trainer.member not in kept
    )


def _lost_results(roster: Roster, kept: Collection[Member]) -> tuple[OpNumber, ...]:
    """Ops whose every holder is gone, perhaps after its rank was lost: nobody can fetch them."""
    return tuple(
        outcome.op
        for outcome in roster.outcomes
        if outcome.holders
        and not any(roster.trainers[holder].member in kept for holder in outcome.holders)
    )


def _ready_jobs(waiting: Mapping[Member, Sequence[Waiting]]) -> tuple[JobName, ...]:
    wanted: dict[JobName, list[int]] = {}
    for trainers in waiting.values():
        for trainer in trainers:
            wanted.setdefault(trainer.job, []).append(trainer.wait_for)
    return tuple(sorted(job for job, counts in wanted.items() if len(counts) >= max(counts)))


def _first_roster(
    job: JobName,
    epoch: Epoch,
    waiting: Mapping[Member, Sequence[Waiting]],
    answers: Mapping[Member, Flushed],
) -> Roster:
    """Ranks are the view's ring order restricted to the job, a machine's trainers side by side."""
    trainers = [
        Trainer(member, trainer.slot)
        for member, theirs in waiting.items()
        for trainer in sorted(theirs, key=lambda t: t.slot)
        if trainer.job == job
    ]
    names = tuple(answers[trainer.member].name for trainer in trainers)
    return Roster(job, epoch, epoch.counter, tuple(trainers), names)


def _whole_rosters(newcomers: Sequence[Member], answers: Mapping[Member, Flushed]) -> list[Roster]:
    """The running jobs that newcomers bring along with all ranks and results (V9)."""
    found: list[Roster] = []
    for member in newcomers:
        view = answers[member].view
        together = [other for other in newcomers if answers[other].view.epoch == view.epoch]
        found += [
            roster
            for roster in view.rosters
            if not _gone_ranks(roster, together) and not _lost_results(roster, together)
        ]
    return sorted(found, key=lambda roster: (-len(roster.trainers), roster.born))


def _continue_roster(
    roster: Roster,
    epoch: Epoch,
    *,
    continuing: Collection[Member],
    answers: Mapping[Member, Flushed],
    concerns: Sequence[Concern],
    reasons: Mapping[Member, str],
) -> Roster:
    gone = _gone_ranks(roster, continuing)
    about = [
        c for c in concerns if (c.job, c.born, c.number) == (roster.job, roster.born, roster.number)
    ]
    hosts = {trainer.member for trainer in roster.trainers} & set(continuing)
    reports = {host: _report_on(roster, answers[host]) for host in hosts}
    cause = gone or about or _lost_results(roster, continuing)
    if not cause or any(r is not None and not r.fenced for r in reports.values()):
        return roster  # V7: it runs on; V3: what is not fenced everywhere waits for the next view
    lost = [_loss(roster, rank, reasons) for rank in gone]
    lost += [concern.verdict for concern in about if concern.op < 0 and concern.verdict]
    settled = msgspec.structs.replace(roster, number=epoch.counter, lost=roster.lost + tuple(lost))
    outcomes = _resolve_ops(settled, [r for r in reports.values() if r is not None], about)
    return msgspec.structs.replace(settled, outcomes=outcomes)


def _report_on(roster: Roster, answer: Flushed) -> JobReport | None:
    """None: the member never installed the roster, so it has started nothing under it."""
    return next((r for r in answer.jobs if (r.job, r.born) == (roster.job, roster.born)), None)


def _loss(roster: Roster, rank: Rank, reasons: Mapping[Member, str]) -> Verdict:
    member = roster.trainers[rank].member
    why = reasons.get(member, "its agent is gone")
    return Verdict("RankLost", f"rank {rank} ({roster.names[rank]}) is lost: {why}", (rank,))


def _resolve_ops(
    roster: Roster, reports: Sequence[JobReport], concerns: Sequence[Concern]
) -> tuple[OpOutcome, ...]:
    known: dict[OpNumber, dict[Rank, OpReport]] = {}
    for report in reports:
        for rank_report in report.ranks:
            for op in rank_report.ops:
                known.setdefault(op.op, {})[rank_report.rank] = op
    stuck = {OpNumber(c.op): c.verdict for c in concerns if c.op >= 0 and c.verdict}
    outcomes: list[OpOutcome] = []
    for number in sorted(known.keys() | stuck.keys()):
        outcome = _resolve_op(roster, number, known.get(number, {}), stuck.get(number))
        if outcome is not None:
            outcomes.append(outcome)
    return tuple(outcomes)


def _resolve_op(
    roster: Roster, op: OpNumber, reports: Mapping[Rank, OpReport], stuck: Verdict | None
) -> OpOutcome | None:
    """One verdict for all (O3). None: nobody has an end of it, so it runs again (O1)."""
    failed = [report.verdict for _, report in sorted(reports.items()) if report.verdict]
    if failed:
        return OpOutcome(op, verdict=failed[0])
    calls = {rank: report.call for rank, report in sorted(reports.items())}
    if len(set(calls.values())) > 1:
        return OpOutcome(op, verdict=_mismatch(roster, op, calls))  # I5
    # I4: what one survivor completed, every survivor completes.
    holders = tuple(rank for rank, report in sorted(reports.items()) if report.completed)
    if holders:
        return OpOutcome(op, holders=holders)
    verdict = roster.lost[0] if roster.lost else stuck
    return None if verdict is None else OpOutcome(op, verdict=verdict)


def _mismatch(roster: Roster, op: OpNumber, calls: Mapping[Rank, Call]) -> Verdict:
    said = "; ".join(
        f"rank {rank} ({name}): {calls.get(Rank(rank), 'not called yet')}"
        for rank, name in enumerate(roster.names)
        if rank in calls or rank not in roster.lost_ranks
    )
    return Verdict("OpMismatch", f"op {op} of job {roster.job!r} differs: {said}", tuple(calls))
