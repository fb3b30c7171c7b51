"""The leader's half of the agreement: which members to keep, when to propose, what to commit."""

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from pmesh.core.topology.graph import (
    Costs,
    Heard,
    cost_of,
    edges_around,
    is_much_better,
    measure_costs,
    measured_graph,
    measured_of,
    slowest_edge,
)
from pmesh.core.topology.ring import ONE_RING, plan_ring
from pmesh.core.values import MAX_JOBS, MAX_MEMBERS, Roster, Seat, View
from pmesh.core.views import room, rosters
from pmesh.core.views.limits import is_taken, is_within_reach, may_propose
from pmesh.core.views.state import (
    JOIN_REQUEST_S,
    RING_RETRY_S,
    Facts,
    MemberState,
    PendingJoin,
    Proposal,
    continuing_members,
    hear_each_other,
    hears_me,
    is_acting,
    is_stale,
    needs_epoch,
    patience,
)
from pmesh.core.wire.views import Candidate, Commit, Flushed, Propose, ViewRequest
from pmesh.ids import Epoch, JobName, Member


def propose(state: MemberState, facts: Facts, now: float) -> Propose | None:
    """Return the proposal that this member should make now; None if there is no reason for one."""
    if state.proposal is not None or now < state.quiet_until or not is_acting(state, now):
        return None
    if not may_propose(state, now):
        return None
    if _someone_else_leads(state, now) or _others_may_still_hear_our_leader(state, now):
        return None
    kept = _clique(state, (state.me,), continuing_members(state, now)[1:], now)
    joined = _clique(state, kept, _candidates(state, now), now)[len(kept) : MAX_MEMBERS]
    joined = _with_room(state, _whole_views(state, joined, now))
    jobs = rosters.jobs_to_settle(
        state.view,
        kept,
        known_view_requests(state, facts),
        _known_waiting(state, facts, kept + joined),
    )
    jobs += _jobs_to_reorder(state, facts)
    if not (len(kept) < len(state.view.seats) or joined or jobs or is_stale(state, kept, now)):
        return None
    jobs = tuple(sorted({*jobs, *rosters.jobs_to_vote_on(state.view, state.primaries)}))[:MAX_JOBS]
    epoch = Epoch(highest_counter(state) + 1, *state.me)
    return Propose(epoch, state.view, kept + joined, kept, jobs)


def highest_counter(state: MemberState) -> int:
    """V1: Return the highest known counter within reach; a proposal takes a higher one."""
    promised = [
        peer.heartbeat.promised.counter
        for peer in state.peers.values()
        if is_within_reach(state, peer.heartbeat.promised.counter, peer.view)
    ]
    return max([state.highest_counter, *promised])


def collect(state: MemberState, sender: Member, answer: Flushed) -> MemberState:
    """Record a flush answer to our proposal; late and foreign answers change nothing."""
    proposal = state.proposal
    if (
        proposal is None
        or answer.epoch != proposal.message.epoch
        or state.promised != answer.epoch
        or sender not in proposal.message.members
    ):
        return state
    return replace(state, proposal=replace(proposal, answers={**proposal.answers, sender: answer}))


def begin(state: MemberState, message: Propose, own_answer: Flushed, now: float) -> MemberState:
    """Return the state of a leader that waits for flush answers."""
    answers = {state.me: own_answer}
    reordered = tuple(job for job in state.reorder if job in message.jobs)
    proposal = Proposal(message=message, answers=answers, made_at=now, reordered=reordered)
    steady_until = now + RING_RETRY_S if reordered else state.steady_until
    return replace(state, proposal=proposal, reorder=(), steady_until=steady_until)


def weigh_rings(state: MemberState, facts: Facts, now: float) -> MemberState:
    """V13: Find the jobs whose slowest edge gets much better in the ring that is best now.

    Every edge of that ring must have been measured: what is only assumed is no reason.
    """
    view = state.view
    only_one = len(view.members) <= ONE_RING
    if only_one or not view.rosters or now < state.steady_until or not is_acting(state, now):
        return replace(state, reorder=(), weighed=()) if state.weighed else state
    heard = reports(state, facts)
    costs = measure_costs(view.members, heard)
    if costs == state.weighed:
        return state
    graph, ring = measured_graph(view.members, heard), ring_order(view.members, costs)

    def gets_better(roster: Roster) -> bool:
        before = [trainer.member for trainer in roster.trainers]
        if not set(before) <= set(view.members):
            return False  # another view is on its way
        after = [trainer.member for trainer in rosters.in_ring_order(roster.trainers, ring)]
        slow, fast = slowest_edge(graph, before), slowest_edge(graph, after)
        if slow is None or fast is None:
            return False
        known = all(measured_of(graph, edge).mbit_s for edge in edges_around(after))
        return known and is_much_better(cost_of(graph, slow), cost_of(graph, fast))

    reorder = tuple(roster.job for roster in view.rosters if gets_better(roster))
    return replace(state, reorder=reorder, weighed=costs)


def _jobs_to_reorder(state: MemberState, facts: Facts) -> tuple[JobName, ...]:
    """V13: Return the jobs that can get a better ring now: ranks change places within an op."""
    if not state.reorder:
        return ()
    heard = (progress for peer in state.peers.values() for progress in peer.heartbeat.progress)
    busy = {p.job for p in (*facts.progress, *heard) if p.started > p.completed}
    return tuple(job for job in state.reorder if job in busy)


def reports(state: MemberState, facts: Facts) -> Heard:
    """Return what this member and its peers have measured of their edges."""
    theirs = {peer.member: peer.heartbeat.heard for peer in state.peers.values()}
    return theirs | {state.me: facts.edges}


def decide(state: MemberState, facts: Facts) -> Commit | None:
    """Return the commit once every member of the proposal has flushed."""
    proposal = state.proposal
    if proposal is None or len(proposal.answers) < len(proposal.message.members):
        return None
    answers, epoch = proposal.answers, proposal.message.epoch
    base = _base(state, answers)
    continuing = _continuing(base, answers)
    costs = measure_costs(answers, reports(state, facts))
    ring = ring_order(tuple(answers), costs)
    seats = tuple(_seat(member, base, continuing, answers[member], epoch) for member in ring)
    change = rosters.Change(
        epoch=epoch,
        ring=ring,
        answers=answers,
        view_requests=known_view_requests(state, facts),
        reasons=state.losses,
        reordered=proposal.reordered,
    )
    view = View(epoch, seats, ())
    # A roster that no other would take can only be one that a lying rank has spoilt: its job ends.
    after = [
        roster
        for roster in rosters.next_rosters(base, change, continuing=continuing)
        if is_taken(msgspec.structs.replace(view, rosters=(roster,)))
    ]
    kept = room.fit(after, {roster.job: roster for roster in base.rosters})
    return Commit(msgspec.structs.replace(view, rosters=kept), costs)


def ring_order(members: tuple[Member, ...], costs: Costs) -> tuple[Member, ...]:
    """Return the ring that follows from the costs: the leader plans it and the others check it."""
    return plan_ring(members, costs)


def known_view_requests(state: MemberState, facts: Facts) -> tuple[ViewRequest, ...]:
    """Return the view requests of this member and of the peers that it hears, in a fixed order."""
    theirs = (
        view_request
        for _, peer in sorted(state.peers.items())
        for view_request in peer.heartbeat.view_requests
        if _is_concerned(state, peer.member, view_request)
    )
    return (*facts.view_requests, *theirs)


def _is_concerned(state: MemberState, member: Member, view_request: ViewRequest) -> bool:
    """True if the member takes part in the job: no member can disturb the jobs of others."""
    roster = next((r for r in state.view.rosters if r.job == view_request.job), None)
    return roster is None or any(t.member == member for t in roster.trainers + roster.lost_holders)


def _known_waiting(
    state: MemberState, facts: Facts, members: tuple[Member, ...]
) -> Mapping[Member, tuple[Candidate, ...]]:
    waiting = {
        member: facts.waiting if member == state.me else state.peers[member.node].heartbeat.waiting
        for member in members
    }
    return room.admit(state.view.rosters, waiting, room.names_in(state.view, members))


def _someone_else_leads(state: MemberState, now: float) -> bool:
    """True if we promised a leader that is still there: its commit may come.

    Its proposal shows that it hears us, before its next heartbeat can say so.
    """
    if (
        state.flushed_at is None
        or needs_epoch(state, now)
        or state.promised.leader == state.me.node
    ):
        return False
    leader = state.peers.get(state.promised.leader)
    return leader is not None and leader.member.incarnation == state.promised.incarnation


def _others_may_still_hear_our_leader(state: MemberState, now: float) -> bool:
    """True while they would veto us for leaving it out; most notice its loss in milliseconds."""
    if now >= state.noticing_until:
        return False
    order = state.view.by_seniority
    seniors = {member.incarnation for member in order[: order.index(state.me)]}
    others = continuing_members(state, now)[1:]
    return any(seniors & state.peers[other.node].heartbeat.heard.keys() for other in others)


def _clique(
    state: MemberState, kept: tuple[Member, ...], candidates: tuple[Member, ...], now: float
) -> tuple[Member, ...]:
    """V5: Add greedily, in the given order, each candidate that all kept members hear mutually."""
    skipped = {member for member, skip in state.skipped.items() if skip.until > now}
    answering = tuple(member for member in candidates if member not in skipped)
    # The usual case, checked first: this runs for each message, and checking each pair is slow.
    if _all_hear_all(state, kept + answering):
        return kept + answering
    for member in answering:
        if all(hear_each_other(state, member, other) for other in kept):
            kept = (*kept, member)
    return kept


def _all_hear_all(state: MemberState, members: tuple[Member, ...]) -> bool:
    everyone = {member.incarnation for member in members}
    return all(
        member == state.me
        or everyone.difference(state.peers[member.node].heartbeat.heard) <= {member.incarnation}
        for member in members
    )


def _candidates(state: MemberState, now: float) -> tuple[Member, ...]:
    """Return the members of lighter views that asked to join, then the others of those views.

    V9: a job that runs among them must join whole.
    """
    asked = [member for member in sorted(_requests(state, now)) if _may_join(state, member, now)]
    views = {state.peers[member.node].view.epoch for member in asked}
    others = [
        peer.member
        for _, peer in sorted(state.peers.items())
        if peer.view.epoch in views
        and peer.member not in asked
        and _may_join(state, peer.member, now)
    ]
    return (*asked, *others)


def _requests(state: MemberState, now: float) -> dict[Member, PendingJoin]:
    lasts_s = JOIN_REQUEST_S * patience(state)
    return {m: asked for m, asked in state.joining.items() if now - asked.asked_at < lasts_s}


def _whole_views(state: MemberState, joined: tuple[Member, ...], now: float) -> tuple[Member, ...]:
    """V9: Return the members whose whole view can join, or that no longer wait for that."""
    views = {member: state.peers[member.node].view for member in joined}
    requests = _requests(state, now)
    impatient = {
        view.epoch
        for member, view in views.items()
        if member in requests and not requests[member].whole
    }
    return tuple(
        member
        for member, view in views.items()
        if view.epoch in impatient or set(view.members) <= set(joined)
    )


def _with_room(state: MemberState, joined: tuple[Member, ...]) -> tuple[Member, ...]:
    """Return the members for whose jobs our view has room; the others stay apart with theirs."""
    ours = {(roster.job, roster.born) for roster in state.view.rosters}
    jobs, left = len(ours), room.ADMITTED_BYTES - sum(r.lasting_bytes for r in state.view.rosters)
    members: dict[Epoch, list[Member]] = {}
    for member in joined:
        members.setdefault(state.peers[member.node].view.epoch, []).append(member)
    kept = set[Epoch]()
    for epoch, several in members.items():
        theirs = [
            roster.lasting_bytes
            for roster in state.peers[several[0].node].view.rosters
            if (roster.job, roster.born) not in ours
        ]
        share = room.SHARE_BYTES * len(several)
        if sum(theirs) <= min(left, share) and len(theirs) <= max(0, MAX_JOBS - jobs):
            kept.add(epoch)
            jobs, left = jobs + len(theirs), left - sum(theirs)
    return tuple(m for m in joined if state.peers[m.node].view.epoch in kept)


def _may_join(state: MemberState, member: Member, now: float) -> bool:
    flaps = state.flaps.get(member)
    return (
        hears_me(state, member)
        and (flaps is None or now >= flaps.held_off_until)
        and state.view.seat_of(member) is None
        and state.view.weight > state.peers[member.node].view.weight
    )


def _base(state: MemberState, answers: Mapping[Member, Flushed]) -> View:
    """V2: Return the highest view among the answers that has the leader as a continuing member.

    The leader must have promised its epoch, or no other member could have included it. What it has
    committed itself, it has installed first: in its name another can only make one up.
    """
    base = state.view
    for answer in answers.values():
        view = answer.view
        ours = view.previous_epoch_of(state.me) == state.view.epoch
        promised = view.epoch in state.promises and view.epoch[1:] != state.me
        if view.epoch > base.epoch and ours and promised:
            base = view
    return base


def _continuing(base: View, answers: Mapping[Member, Flushed]) -> list[Member]:
    """V2: Return the members that installed the base, or the view the base records before it."""
    return [
        member
        for member in base.by_seniority
        if member in answers
        and answers[member].view.epoch in (base.epoch, base.previous_epoch_of(member))
    ]


def _seat(
    member: Member, base: View, continuing: list[Member], answer: Flushed, epoch: Epoch
) -> Seat:
    seat = base.seat_of(member)
    if seat is None or member not in continuing:
        return Seat(member, answer.said, epoch, None)
    return Seat(member, answer.said, seat.admitted, answer.view.epoch)
