"""The jobs in the picture that `pmesh status` shows: their ranks, and who waits for them."""

from collections.abc import Iterator
from typing import NamedTuple

from pmesh.agent import status
from pmesh.agent.jobs import Jobs
from pmesh.agent.membership import Membership
from pmesh.core.quorum import is_in_force
from pmesh.core.views import Roster
from pmesh.ids import JobName, Member, Slot, node_text


class _Waiter(NamedTuple):
    """A trainer that waits, on any machine of the view."""

    job: JobName
    wait_for: int
    shown: status.NewcomerStatus


def describe_jobs(membership: Membership, jobs: Jobs, *, me: Member) -> Iterator[status.JobStatus]:
    """Those that run, and those for which trainers of any machine wait."""
    waiters: dict[JobName, list[_Waiter]] = {}
    for waiter in _waiters(membership, jobs, me):
        waiters.setdefault(waiter.job, []).append(waiter)
    for roster in membership.view.rosters:
        newcomers = tuple(waiter.shown for waiter in waiters.pop(roster.job, []))
        in_force = is_in_force(roster, membership.state.primaries)
        yield _job(roster, newcomers, jobs, in_force=in_force)
    for job, waiting in waiters.items():
        yield status.JobStatus(
            name=job,
            state="waiting",
            wait_for=max(waiter.wait_for for waiter in waiting),
            ranks=(),
            newcomers=tuple(waiter.shown for waiter in waiting),
        )


def _waiters(membership: Membership, jobs: Jobs, me: Member) -> Iterator[_Waiter]:
    inside = {(t.member, t.slot) for roster in membership.view.rosters for t in roster.trainers}
    for seat in membership.view.seats:
        for job, slot, wait_for, program in _waiting_at(seat.member, membership, jobs, me):
            if (seat.member, slot) not in inside:  # heartbeats are older than the view at times
                node = node_text(seat.member.node)
                shown = status.NewcomerStatus(node=node, name=seat.name, program=program)
                yield _Waiter(job, wait_for, shown)


def _waiting_at(
    member: Member, membership: Membership, jobs: Jobs, me: Member
) -> Iterator[tuple[JobName, Slot, int, str | None]]:
    if member == me:
        for candidate in jobs.candidates.values():
            yield candidate.job, candidate.slot, candidate.wait_for, candidate.program
        return
    peer = membership.state.peers.get(member.node)
    for waiting in peer.heartbeat.waiting if peer is not None else ():
        yield waiting.job, waiting.slot, waiting.wait_for, None


def _job(
    roster: Roster, newcomers: tuple[status.NewcomerStatus, ...], jobs: Jobs, *, in_force: bool
) -> status.JobStatus:
    ranks, terms = tuple(_ranks(roster, jobs)), roster.terms
    state, reason = _state_of_job(roster, in_force=in_force)
    return status.JobStatus(
        name=roster.job,
        state=state,
        wait_for=None,
        ranks=ranks,
        newcomers=newcomers,
        roster=roster.number,
        stable=min(rank.completed for rank in ranks),
        terms=status.TermsStatus(
            min_ranks=terms.min_ranks, on_loss=terms.on_loss, quorum=terms.quorum
        ),
        losses=tuple(verdict.message for verdict in roster.losses),
        reason=reason,
    )


def _state_of_job(roster: Roster, *, in_force: bool) -> tuple[status.JobState, str | None]:
    if not roster.quorate:
        return "no_quorum", "the ranks here are not a majority of those that last had one"
    if not in_force:  # V10
        return "no_quorum", "a majority has not been seen to have agreed to the last change"
    count, wanted = len(roster.trainers), roster.terms.min_ranks
    if count < wanted:
        return "below_min_ranks", f"it has {count} of the {wanted} ranks that it wants at least"
    return "running", None


def _ranks(roster: Roster, jobs: Jobs) -> Iterator[status.RankStatus]:
    job = roster.job, roster.born
    here = {r.id: r for r in jobs.ranks if (r.roster.job, r.roster.born) == job}
    for rank, trainer in enumerate(roster.trainers):
        mark = jobs.marks.of(roster, trainer.id)
        yield status.RankStatus(
            rank=rank,
            trainer=trainer.id,
            node=node_text(trainer.member.node),
            name=trainer.name,
            started=-1 if mark is None else mark.started,
            completed=-1 if mark is None else mark.completed,
            stopped=mark is not None and mark.stopped,
            program=here[trainer.id].program if trainer.id in here else None,
            compression=here[trainer.id].compression if trainer.id in here else None,
        )
