"""Turns a view change into events. `pmesh up` and `pmesh events` print the same texts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pmesh.agent.events import EventKind, News
from pmesh.core.jobs.jobs import LEFT
from pmesh.core.topology.graph import (
    Graph,
    cost_of,
    edges_around,
    measured_of,
    slowest_edge,
    times_faster,
)
from pmesh.core.values import Roster, Seat, Trainer, View
from pmesh.core.views.rosters import is_reordered
from pmesh.ids import Epoch, JobName, Member, OpNumber


def describe_change(
    before: View,
    after: View,
    losses: Mapping[Member, str],
    *,
    me: Member,
    name_of: Callable[[Seat], str],
) -> Iterator[News]:
    """Yield the events of a view change; none if the view only settles ops.

    Args:
        before: The previous view.
        after: The installed view.
        losses: Why members were lost, as far as this agent noticed it itself.
        me: This agent, which is marked in the ring.
        name_of: What to call the machine of a seat.
    """
    yield from _describe_members(before, after, losses, name_of)
    if before.members != after.members:
        yield _describe_ring(after, me, name_of)
    yield from _describe_jobs(before, after)


def _describe_members(
    before: View, after: View, losses: Mapping[Member, str], name_of: Callable[[Seat], str]
) -> Iterator[News]:
    old = {seat.member: name_of(seat) for seat in before.seats}
    new = {seat.member: name_of(seat) for seat in after.seats}
    alone = len(new) == 1
    unnoticed = "it continues without this machine" if alone else "the others no longer hear it"
    for member in (member for member in old if member not in new):
        why = losses.get(member, unnoticed)
        name = old[member]
        yield News(kind="peer lost", text=f"{name} is gone: {why}", names=(name,))
    for member in (member for member in new if member not in old):
        yield News(kind="peer joined", text=f"{new[member]} joined", names=(new[member],))


def _describe_ring(view: View, me: Member, name_of: Callable[[Seat], str]) -> News:
    names = tuple(name_of(seat) for seat in view.seats)
    if len(names) == 1:
        text = "alone: no other machine of this mesh is here"
        return News(kind="view", text=text, names=names)
    marked = [name_of(seat) + " (this machine)" * (seat.member == me) for seat in view.seats]
    leader = next(name_of(seat) for seat in view.seats if seat.member.node == view.epoch.leader)
    text = f"ring: {' → '.join(marked)} → {names[0]}; leader {leader}"
    return News(kind="view", text=text, names=names)


def describe_reordered(
    before: View,
    after: View,
    edges_among: Callable[[Iterable[Member]], Graph],
    *,
    name_of: Callable[[Seat], str],
) -> Iterator[News]:
    """Yield an event for each job whose ring now avoids the edge that was its slowest (V13).

    Args:
        before: The previous view.
        after: The installed view.
        edges_among: Returns what is known of the edges between members.
        name_of: What to call the machine of a seat.
    """
    names = {seat.member: name_of(seat) for seat in after.seats}
    for roster in after.rosters:
        old = before.roster_of(roster.job)
        if old is None or not is_reordered(old, roster):
            continue
        ring, graph = [trainer.member for trainer in roster.trainers], edges_among(after.members)
        slow = slowest_edge(graph, [trainer.member for trainer in old.trainers])
        now = slowest_edge(graph, ring)
        if slow is None or now is None or slow in edges_around(ring):
            continue
        faster = times_faster(cost_of(graph, slow), cost_of(graph, now))
        if faster <= 1:
            continue
        ends = tuple(sorted(names[member] for member in slow))
        speed = measured_of(graph, slow).mbit_s
        how = f"at {speed} Mbit/s" if speed > 0 else "which is relayed"
        text = f": its ring is {faster:.1f}x faster: {' - '.join(ends)} {how} is avoided"
        yield _news("view", roster, text, roster.trainers)


def _describe_jobs(before: View, after: View) -> Iterator[News]:
    old: dict[tuple[JobName, Epoch], Roster] = {(r.job, r.born): r for r in before.rosters}
    for roster in after.rosters:
        known = old.pop((roster.job, roster.born), None)
        if known is None:
            yield _describe_new_job(roster, after)
            yield from _describe_state(None, roster)
        elif known != roster:
            yield from _describe_job(known, roster)
    for roster in old.values():
        yield _news("job ended", roster, "has ended", roster.trainers)


def _describe_new_job(roster: Roster, view: View) -> News:
    ranks = _count(roster.trainers)
    if roster.born == view.epoch:
        return _news("job began", roster, f"begins with {ranks}", roster.trainers)
    return _news("job found", roster, f"was running already, with {ranks}", roster.trainers)


def _describe_job(before: Roster, after: Roster) -> Iterator[News]:
    if _goes_on_in(before, after):
        yield from _describe_losses(before, after)
        yield from _describe_entries(before, after)
    else:
        gone = [trainer for trainer in before.trainers if trainer not in after.trainers]
        lost = ", ".join(_names(before, gone))
        text = f"takes the other side's state; {lost} may return by mesh.sync()"
        yield _news("superseded", after, text, gone)
    yield from _describe_state(before, after)
    yield from _describe_failed_ops(before, after)


def _goes_on_in(before: Roster, after: Roster) -> bool:
    """True if both have one history (V9): a trainer follows only one side of a partition."""
    return after.number > before.number and not set(before.trainers).isdisjoint(after.trainers)


def _describe_losses(before: Roster, after: Roster) -> Iterator[News]:
    """Views may have been skipped: both rosters show the lost ranks, the last gives reasons."""
    gone = [trainer for trainer in before.trainers if trainer not in after.trainers]
    explained = {lost for verdict in after.losses for lost in verdict.trainers}
    for verdict in after.losses:
        concerned = [t for t in before.trainers if t.id in verdict.trainers]
        kind: EventKind = "rank left" if verdict.message.endswith(LEFT) else "rank lost"
        yield _news(kind, after, f": {verdict.message}", concerned)
    for trainer in (trainer for trainer in gone if trainer.id not in explained):
        yield _news("rank lost", after, f": {before.describe(trainer.id)} is lost", [trainer])


def _describe_entries(before: Roster, after: Roster) -> Iterator[News]:
    for trainer in (trainer for trainer in after.trainers if trainer.id not in before.ids):
        text = f": {after.describe(trainer.id)} enters, as one of {len(after.trainers)}"
        yield _news("rank entered", after, text, [trainer], op=trainer.enters)


def _describe_state(before: Roster | None, after: Roster) -> Iterator[News]:
    """Say if the ops of the job stop or resume; we assume that an unknown job could run."""
    was_quorate = before is None or before.quorate
    was_enough = before is None or _is_enough(before)
    if was_quorate and not after.quorate:
        text = "waits: the ranks here are not a majority"
        yield _news("quorum lost", after, text, after.trainers)
    if after.quorate and not was_quorate:
        yield _news("quorum regained", after, "has a majority again", after.trainers)
    if was_enough and not _is_enough(after):
        text = f"waits: it has {_count(after.trainers)}, but needs {after.terms.min_ranks}"
        yield _news("job waits", after, text, after.trainers)
    if _is_enough(after) and not was_enough:
        text = f"goes on with {_count(after.trainers)}"
        yield _news("job goes on", after, text, after.trainers)


def _describe_failed_ops(before: Roster, after: Roster) -> Iterator[News]:
    known = {outcome.op for outcome in before.outcomes if outcome.verdict is not None}
    for outcome in after.outcomes:
        if outcome.verdict is not None and outcome.op not in known:
            verdict = outcome.verdict
            text = f": op {outcome.op} failed: {verdict.error}: {verdict.message}"
            blamed = [t for t in before.trainers if t.id in verdict.trainers]
            yield _news("op failed", after, text, blamed, op=outcome.op)


def _is_enough(roster: Roster) -> bool:
    return len(roster.trainers) >= roster.terms.min_ranks


def _news(
    kind: EventKind,
    roster: Roster,
    text: str,
    trainers: Sequence[Trainer],
    *,
    op: OpNumber | None = None,
) -> News:
    """The text follows the job's name, and starts with a verb or a colon."""
    text = f"job {roster.job!r}{text}" if text[0] == ":" else f"job {roster.job!r} {text}"
    return News(kind=kind, text=text, job=roster.job, op=op, names=_names(roster, trainers))


def _names(roster: Roster, trainers: Sequence[Trainer]) -> tuple[str, ...]:
    return tuple(roster.names.get(trainer.member.node, trainer.name) for trainer in trainers)


def _count(trainers: Sequence[Trainer]) -> str:
    return "1 rank" if len(trainers) == 1 else f"{len(trainers)} ranks"
