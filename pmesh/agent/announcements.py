"""What `pmesh up` prints when the view changes: who joined, who is gone and why, the ring."""

from collections.abc import Iterator, Mapping

from pmesh.core.views import Roster, View
from pmesh.ids import Epoch, JobName, Member


def describe_change(
    before: View, after: View, losses: Mapping[Member, str], *, me: Member
) -> Iterator[str]:
    """A line for each thing that a person would want to know.

    Args:
        before: what was installed.
        after: what is installed now.
        losses: why members were lost, as far as this agent has noticed itself.
        me: this agent, which does not join itself.
    """
    old = {seat.member: seat.name for seat in before.seats}
    new = {seat.member: seat.name for seat in after.seats}
    for member in (member for member in old if member not in new):
        yield f"{old[member]} is gone: {losses.get(member, 'the others no longer hear it')}"
    for member in (member for member in new if member not in old):
        yield f"{new[member]} joined"
    if before.members != after.members:
        yield _describe_ring(after, me)
    yield from _describe_jobs(before, after)


def _describe_ring(view: View, me: Member) -> str:
    if len(view.seats) == 1:
        return "alone: no other machine of this mesh is here"
    names = [seat.name + " (this machine)" * (seat.member == me) for seat in view.seats]
    leader = next(seat.name for seat in view.seats if seat.member[0] == view.epoch.leader)
    return f"ring: {' → '.join(names)} → {view.seats[0].name}; leader {leader}"


def _describe_jobs(before: View, after: View) -> Iterator[str]:
    old: dict[tuple[JobName, Epoch], Roster] = {(r.job, r.born): r for r in before.rosters}
    for roster in after.rosters:
        known = old.pop((roster.job, roster.born), None)
        if known is None:
            yield f"job {roster.job!r} begins with {len(roster.trainers)} ranks"
        for verdict in roster.lost[len(known.lost) if known else 0 :]:
            yield f"job {roster.job!r}: {verdict.message}"
    for job, _ in old:
        yield f"job {job!r} has ended"
