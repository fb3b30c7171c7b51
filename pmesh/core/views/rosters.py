"""How jobs begin, which trainers are in them, and how view changes affect them (O3, I4, O6, V9)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from pmesh.core.values import MAX_JOBS, MAX_TRAINERS, Primary, Roster, Terms, Trainer, Verdict, View
from pmesh.core.views.outcomes import (
    Knowledge,
    gather,
    lost_results,
    may_reorder,
    op_to_enter,
    resolve_ops,
)
from pmesh.core.views.quorum import Voters, has_majorities, may_run, needed_voters
from pmesh.core.views.room import admit
from pmesh.core.wire.views import Candidate, Flushed, JobReport, KnownPrimary, ViewRequest
from pmesh.ids import Epoch, JobName, Member, OpNumber, Slot, TrainerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A view change whose flush answers have all arrived."""

    epoch: Epoch
    ring: Sequence[Member]
    """The members of the new view, in ring order."""
    answers: Mapping[Member, Flushed]
    view_requests: Sequence[ViewRequest]
    reasons: Mapping[Member, str]
    """Why each lost member was lost, as far as the leader knows."""
    reordered: Collection[JobName] = ()
    """V13: the jobs that are to get a better ring, if that disturbs no op."""


def jobs_to_settle(
    view: View,
    kept: Collection[Member],
    view_requests: Iterable[ViewRequest],
    waiting: Mapping[Member, Sequence[Candidate]],
) -> tuple[JobName, ...]:
    """Return the jobs that need a view change: a rank is lost, an op is stuck, or one can begin."""
    kept = frozenset(kept)  # every message looks up each trainer of each job
    concerned = {(c.job, c.born, c.number) for c in view_requests}
    running = {
        roster.job
        for roster in view.rosters
        if (roster.job, roster.born, roster.number) in concerned
        or _gone(roster, kept)
        or lost_results(roster, kept)
    }
    known = {roster.job for roster in view.rosters}
    ready = {job for job in _ready_jobs(waiting) if job not in known}
    return tuple(sorted([*running, *sorted(ready)[: max(0, MAX_JOBS - len(known))]]))


def jobs_to_vote_on(view: View, known: Collection[KnownPrimary]) -> tuple[JobName, ...]:
    """V10: Return the jobs that may not run; any view change can allow or keep them."""
    return tuple(roster.job for roster in view.rosters if not may_run(roster, known))


def next_rosters(
    base: View, change: Change, *, continuing: Collection[Member]
) -> tuple[Roster, ...]:
    """Return the rosters of the view that `change.epoch` names."""
    change = replace(change, answers=_with_admitted(change.answers, base))
    histories: dict[JobName, list[_History]] = {}
    for view, members in _lineages(base, continuing, change):
        for roster in view.rosters:
            history = _go_on(roster, frozenset(members), change)
            if history is not None:
                histories.setdefault(roster.job, []).append(history)
    # V9: where histories of a job meet, one continues.
    rosters = {job: max(several, key=_History.weight).roster for job, several in histories.items()}
    waiting = {member: change.answers[member].waiting for member in change.ring}
    for job in _ready_jobs(waiting):
        if job not in rosters and len(rosters) < MAX_JOBS:
            rosters[job] = _first_roster(job, change, waiting)
    return tuple(rosters[job] for job in sorted(rosters))


def _with_admitted(answers: Mapping[Member, Flushed], base: View) -> dict[Member, Flushed]:
    """Return the answers with those of the waiting trainers for which there is room."""
    waiting = {member: answer.waiting for member, answer in answers.items()}
    names = {member: answer.said.name for member, answer in answers.items()}
    admitted = admit(base.rosters, waiting, names)
    return {
        member: msgspec.structs.replace(answer, waiting=admitted[member])
        for member, answer in answers.items()
    }


def is_same_history(before: Roster, after: Roster, trainer: Trainer) -> bool:
    """V9: True if a trainer of `before` continues in `after`.

    Both sides of a partition may settle a job. When they meet, the other side's roster has the same
    birth, but another number, or other contents, or has lost this trainer. It never continues ours.
    """
    if after.born != before.born or after.number < before.number:
        return False
    if after.number == before.number:
        return after == before
    return trainer in after.trainers or trainer in after.lost_holders


def is_reordered(before: Roster | None, after: Roster) -> bool:
    """True if the job has the same trainers in another order."""
    return (
        before is not None
        and before.born == after.born
        and before.ids != after.ids
        and set(before.ids) == set(after.ids)
    )


def keep_local_rosters(view: View, member: Member) -> tuple[Roster, ...]:
    """Return the rosters whose trainers are all on this member: they survive leaving the view."""
    return tuple(
        roster
        for roster in view.rosters
        if all(trainer.member == member for trainer in roster.trainers)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _History:
    """A job's roster as it would continue, and its highest stable op."""

    roster: Roster
    stable: int

    def weight(self) -> tuple[int, ...]:
        """V9: where two meet, the heavier continues; V10: the one that last had a quorum."""
        roster = self.roster
        votes = roster.terms.quorum == "majority"
        primary = roster.primary.epoch.counter if votes else 0
        older = -roster.born.counter, -roster.number
        return (roster.quorate, primary, len(roster.trainers), self.stable, *older)


def _lineages(
    base: View, continuing: Collection[Member], change: Change
) -> list[tuple[View, list[Member]]]:
    """Return the base with the members that continue it, and each earlier view of newcomers."""
    found = {base.epoch: (base, list(continuing))}
    for member in change.answers:
        if member not in continuing:
            view = change.answers[member].view
            found.setdefault(view.epoch, (view, []))[1].append(member)
    return list(found.values())


def _go_on(roster: Roster, members: frozenset[Member], change: Change) -> _History | None:
    """Return the roster among these members after the change; None if no rank is left."""
    homes = {trainer.id: trainer.member for trainer in roster.trainers + roster.lost_holders}
    hosts = members & set(homes.values())
    reports = [
        _about_its_own(report, host, homes, roster.next_id)
        for host in hosts
        if (report := _report_on(roster, change.answers[host])) is not None
    ]
    known = gather(reports)
    gone = _gone(roster, members)
    about = [c for c in change.view_requests if _is_about(c, roster)]
    runs = may_run(roster, _known_primaries(change))
    reorders = roster.job in change.reordered and may_reorder(roster, known)
    cause = gone or about or lost_results(roster, members) or not runs or reorders
    if not cause or any(not report.fenced for report in reports):
        # V7: it runs on. V3: a job that is not fenced everywhere waits for the next view, unless a
        # lost rank's agent is all that is left of it.
        runs_on = any(trainer.member in change.answers for trainer in roster.trainers)
        return _History(roster=roster, stable=known.stable) if runs_on else None
    left = {t for c in about if c.op < 0 and c.verdict for t in c.verdict.trainers}
    losses = [_loss(roster, trainer, change.reasons) for trainer in gone]
    losses += [c.verdict for c in about if c.op < 0 and c.verdict]
    staying = [t for t in roster.trainers if t not in gone and t.id not in left]
    if not staying:
        return None
    settled = msgspec.structs.replace(
        roster,
        number=change.epoch.counter,
        trainers=in_ring_order(staying, change.ring),
        losses=_once(losses)[:MAX_TRAINERS],
    )
    outcomes = resolve_ops(roster, settled, known, about)
    holding = {holder for outcome in outcomes for holder in outcome.holders}
    lost_holders = tuple(
        t
        for t in roster.trainers + roster.lost_holders
        if t.id in holding and t not in settled.trainers
    )
    settled = msgspec.structs.replace(settled, outcomes=outcomes, lost_holders=lost_holders)
    settled = _let_in(settled, known, change)
    is_loss = set(settled.ids) < set(roster.ids)  # another roster may mean that a lane broke
    lanes = _lanes_to_keep(roster, settled, reports) if is_loss else ()
    settled = msgspec.structs.replace(settled, lanes=lanes)
    return _History(roster=_vote(settled, change), stable=known.stable)


def _lanes_to_keep(
    before: Roster, after: Roster, reports: Iterable[JobReport]
) -> tuple[tuple[TrainerId, TrainerId], ...]:
    """V4: Return the lanes between ranks that stay which both ends hold.

    If only one end kept a lane, it would use it while the other waited for a new one.
    """
    under = [report for report in reports if report.number == before.number]
    ranks = {rank.trainer: rank for report in under for rank in report.ranks}
    return tuple(
        (sender, receiver)
        for sender in after.ids
        for receiver in after.ids
        if sender in ranks
        and receiver in ranks
        and receiver in ranks[sender].sends_to
        and sender in ranks[receiver].receives_from
    )


def _gone(roster: Roster, kept: Collection[Member]) -> tuple[Trainer, ...]:
    return tuple(trainer for trainer in roster.trainers if trainer.member not in kept)


def _is_about(view_request: ViewRequest, roster: Roster) -> bool:
    return (view_request.job, view_request.born, view_request.number) == (
        roster.job,
        roster.born,
        roster.number,
    )


def _report_on(roster: Roster, answer: Flushed) -> JobReport | None:
    """Return None if the member never installed the roster: then it started nothing under it."""
    return next((r for r in answer.jobs if (r.job, r.born) == (roster.job, roster.born)), None)


def _about_its_own(
    report: JobReport, host: Member, homes: Mapping[TrainerId, Member], next_id: TrainerId
) -> JobReport:
    """Drop reports on other members' trainers and on trainers that do not exist yet.

    A trainer whose home is no longer known was lost; it may be this member's.
    """
    ranks = tuple(
        rank
        for rank in report.ranks
        if rank.trainer < next_id and homes.get(rank.trainer, host) == host
    )
    return msgspec.structs.replace(report, ranks=ranks)


def _loss(roster: Roster, trainer: Trainer, reasons: Mapping[Member, str]) -> Verdict:
    why = reasons.get(trainer.member, "its agent is gone")
    text = f"{roster.describe(trainer.id)} is lost: {why}"
    return Verdict("RankLost", text, (trainer.id,))


def _once(losses: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Keep one loss for each trainer: it may have left, and its machine be lost too."""
    first = {verdict.trainers: verdict for verdict in reversed(list(losses))}
    return tuple(first[trainers] for trainers in sorted(first))


def in_ring_order(trainers: Iterable[Trainer], ring: Sequence[Member]) -> tuple[Trainer, ...]:
    """Order trainers by the view's ring, those of one machine side by side, the oldest first.

    A ring may begin anywhere, so the oldest trainer stays rank 0 as long as it lives.
    """
    ordered = sorted(trainers, key=lambda trainer: (ring.index(trainer.member), trainer.id))
    first = min(range(len(ordered)), key=lambda i: ordered[i].id)
    return tuple(ordered[first:] + ordered[:first])


def _let_in(roster: Roster, known: Knowledge, change: Change) -> Roster:
    """O6: Let the trainers that wait for a running job enter it in a `sync`.

    One that missed the view that let it in still waits, although it is in the job.
    """
    op = op_to_enter(known, roster)
    waiting = {member: change.answers[member].waiting for member in change.ring}
    if op is None:
        return roster
    inside = {(trainer.member, trainer.slot) for trainer in roster.trainers}
    slots = [slot for slot in _slots_waiting(roster.job, waiting) if slot not in inside]
    slots = slots[: MAX_TRAINERS - len(roster.trainers)]
    entering = _enter(slots, op, roster.next_id, change)
    return msgspec.structs.replace(
        roster,
        trainers=in_ring_order([*roster.trainers, *entering], change.ring),
        next_id=TrainerId(roster.next_id + len(entering)),
        terms=_join_terms(roster.terms, roster.job, waiting),
    )


def _vote(roster: Roster, change: Change) -> Roster:
    """V10: Set whether this side has a quorum."""
    needed: tuple[Voters, ...] = ()
    if roster.terms.quorum == "majority":
        needed = needed_voters(roster, _known_primaries(change))
        present = change.answers.keys()
        if _is_overtaken(roster, needed, change) or not has_majorities(present, needed):
            return msgspec.structs.replace(roster, quorate=False)
    primary = Primary(change.epoch, _voters(roster.trainers), needed)
    return msgspec.structs.replace(roster, quorate=True, primary=primary)


def _known_primaries(change: Change) -> set[KnownPrimary]:
    return {primary for answer in change.answers.values() for primary in answer.primaries}


def _is_overtaken(roster: Roster, needed: Iterable[Voters], change: Change) -> bool:
    """V10: True if one of the voters knows a later roster of the job that had a quorum.

    A roster that only other members know was installed by too few voters to come into force.
    """
    voters = {voter for several in needed for voter in several}
    return any(
        (primary.job, primary.born) == (roster.job, roster.born)
        and primary.epoch > roster.primary.epoch
        for voter in voters & change.answers.keys()
        for primary in change.answers[voter].primaries
    )


def _voters(trainers: Iterable[Trainer]) -> tuple[Member, ...]:
    return tuple(trainer.member for trainer in sorted(trainers, key=lambda t: t.id))


def _ready_jobs(waiting: Mapping[Member, Sequence[Candidate]]) -> tuple[JobName, ...]:
    wanted: dict[JobName, list[int]] = {}
    for trainers in waiting.values():
        for trainer in trainers:
            wanted.setdefault(trainer.job, []).append(trainer.wait_for)
    return tuple(sorted(job for job, counts in wanted.items() if len(counts) >= max(counts)))


def _first_roster(
    job: JobName, change: Change, waiting: Mapping[Member, Sequence[Candidate]]
) -> Roster:
    """Ranks follow the view's ring order, with the trainers of one machine side by side.

    The ring begins where a trainer waits that would be rank 0, if one does.
    """
    ring = list(waiting)
    starts = (ring.index(m) for m in ring if any(t.place == 0 and t.job == job for t in waiting[m]))
    start = next(starts, 0)
    turned = {member: waiting[member] for member in ring[start:] + ring[:start]}
    trainers = _enter(_slots_waiting(job, turned)[:MAX_TRAINERS], OpNumber(0), TrainerId(0), change)
    return Roster(
        job=job,
        born=change.epoch,
        number=change.epoch.counter,
        trainers=tuple(trainers),
        primary=Primary(change.epoch, _voters(trainers)),
        next_id=TrainerId(len(trainers)),
        terms=_join_terms(Terms(), job, waiting),
    )


def _slots_waiting(
    job: JobName, waiting: Mapping[Member, Sequence[Candidate]]
) -> list[tuple[Member, Slot]]:
    return [
        (member, trainer.slot)
        for member, theirs in waiting.items()
        for trainer in sorted(theirs, key=lambda t: (t.place < 0, t.place, t.slot))
        if trainer.job == job
    ]


def _enter(
    slots: Iterable[tuple[Member, Slot]], op: OpNumber, first: TrainerId, change: Change
) -> list[Trainer]:
    return [
        Trainer(TrainerId(first + i), member, slot, change.answers[member].said, op)
        for i, (member, slot) in enumerate(slots)
    ]


def _join_terms(terms: Terms, job: JobName, waiting: Mapping[Member, Sequence[Candidate]]) -> Terms:
    for theirs in waiting.values():
        for trainer in theirs:
            if trainer.job == job:
                terms = terms.joined_with(trainer.terms)
    return terms
