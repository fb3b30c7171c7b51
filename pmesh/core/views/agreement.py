"""How members agree on views: one frozen state, and functions from an input to the next state.

The inputs are a message from a peer (`receive`), the loss of a peer (`lose`) and the passing of
time (`pass_time`). Each returns the next state and the actions to carry out. The leader's half is
`pmesh.core.views.leader`. docs/explanation/rules.md states the rules V1 to V13.
"""

from dataclasses import dataclass, replace
from typing import assert_never

import msgspec

from pmesh.core.values import SignedName, View
from pmesh.core.views import leader, limits, quorum
from pmesh.core.views.limits import STEP, check_message, is_within_reach
from pmesh.core.views.room import fit_answer
from pmesh.core.views.rosters import is_reordered, keep_local_rosters
from pmesh.core.views.state import (
    BACK_OFF_S,
    FLUSH_DEADLINE_S,
    JOIN_REQUEST_S,
    LONGEST_BACK_OFF_S,
    LONGEST_SKIP_S,
    MOST_FAILURES,
    MOST_FLAPPING,
    MOST_PROMISES,
    NOTICE_S,
    PATIENCE_S,
    RING_PAUSE_S,
    SKIP_S,
    UNREAD_S,
    Facts,
    FenceJobs,
    Install,
    MemberAction,
    MemberFlaps,
    MemberState,
    MemberStep,
    Peer,
    PendingJoin,
    SendOnLink,
    Skip,
    continuing_members,
    follows,
    has_read,
    hear_each_other,
    hears_me,
    is_commit_overdue,
    patience,
    slowness,
)
from pmesh.core.wire.link import Leaving
from pmesh.core.wire.views import (
    AgreementMessage,
    AskToJoin,
    AskView,
    Commit,
    Flushed,
    Heartbeat,
    JobReport,
    Propose,
    Refuse,
    Superseded,
    TellView,
    Veto,
)
from pmesh.errors import ProtocolError
from pmesh.ids import Epoch, Member, NodeId


def first_state(me: Member, said: SignedName, *, now: float) -> MemberState:
    """Return the state of a process that has just started: alone in its own view."""
    epoch = Epoch(1, *me)
    view = View.of_one(me, said, epoch)
    return MemberState(
        me=me, said=said, view=view, promised=epoch, installed_at=now, highest_counter=1
    )


def receive(
    state: MemberState, sender: Member, message: AgreementMessage, facts: Facts, *, now: float
) -> MemberStep:
    """Handle a message from an authenticated peer.

    Raises ProtocolError if no honest member would send it.
    """
    check_message(sender, message)
    return _consider(_receive(state, sender, message, facts, now), facts, now)


def lose(state: MemberState, node: NodeId, why: str, facts: Facts, *, now: float) -> MemberStep:
    """Handle a lost peer: its connection closed and a redial failed, or it fell silent (V6)."""
    peer = state.peers.get(node)
    losses = state.losses
    if peer is not None and peer.member in state.view.members:
        losses = {**losses, peer.member: why}
    proposal = state.proposal
    if proposal is not None and any(member.node == node for member in proposal.message.members):
        proposal = None  # it gets no answer, and may omit members that saw the loss before us
    led_us = peer is not None and _is_senior(state, peer.member)
    state = replace(
        state,
        proposal=proposal,
        noticing_until=now + NOTICE_S * patience(state) if led_us else state.noticing_until,
        shown={other: view for other, view in state.shown.items() if other != node},
        unplaced={other: beat for other, beat in state.unplaced.items() if other != node},
        losses=losses,
    )
    return _consider(MemberStep(_without(state, node)), facts, now)


def _is_senior(state: MemberState, member: Member) -> bool:
    order = state.view.by_seniority
    return member in order[: order.index(state.me)]


def pass_time(state: MemberState, facts: Facts, *, now: float) -> MemberStep:
    """Check the deadlines. Call it at each heartbeat (0.2 s): they are at least five times that."""
    state = replace(state, debt=limits.note_need(state, now), timeout_s=facts.timeout_s)
    state = leader.weigh_rings(_give_up_on_silent(state, now), facts, now)
    return _consider(MemberStep(state), facts, now)


def _receive(  # noqa: C901, PLR0911 - one arm for each message
    state: MemberState, sender: Member, message: AgreementMessage, facts: Facts, now: float
) -> MemberStep:
    match message:
        case Heartbeat():
            return _receive_heartbeat(state, sender, message, now)
        case AskView():
            return MemberStep(state, (SendOnLink(sender, TellView(state.view)),))
        case TellView():
            return _receive_view(state, sender, message.view, now)
        case AskToJoin():
            request = PendingJoin(now, message.whole)
            return MemberStep(replace(state, joining={**state.joining, sender: request}))
        case Propose():
            return _receive_proposal(state, sender, message, facts, now)
        case Flushed():
            return MemberStep(leader.collect(state, sender, message))
        case Refuse() | Veto():
            return MemberStep(_withdraw(state, sender, message, now))
        case Superseded():
            return _leave_if_superseded(state, sender, message.view, now)
        case Commit():
            return _receive_commit(state, message, now)
        case Leaving():
            return MemberStep(state)  # the driver calls `lose`: it knows that the link ends
        case _:
            assert_never(message)


def _receive_heartbeat(
    state: MemberState, sender: Member, beat: Heartbeat, now: float
) -> MemberStep:
    view = _known_view(state, sender.node, beat.view)
    if view is None:
        unplaced = {**state.unplaced, sender.node: beat}
        return MemberStep(
            replace(state, unplaced=unplaced), (SendOnLink(sender, AskView(beat.view)),)
        )
    if not _is_credible(state, beat.promised.counter, view):
        return MemberStep(_without(state, sender.node))
    peer = Peer(member=sender, heartbeat=beat, view=view)
    state = replace(state, peers={**state.peers, sender.node: peer})
    if (
        state.flushed_at is not None
        and view.epoch == state.promised > state.view.epoch
        and (view.epoch[1:] == sender or view.epoch.leader not in (*state.peers, state.me.node))
    ):
        # V6: we missed the commit. Its leader shows the view; if that is gone, any member does. Of
        # our own commits we miss none.
        return _install(state, view, now)
    return _leave_if_superseded(_confirm_primaries(state), sender, view, now)


def _is_credible(state: MemberState, counter: int, shown: View) -> bool:
    """True if the counter is within reach.

    Raises ProtocolError if it is not and the shown view has jobs: honest members of such a view
    follow no such counter. A peer without jobs may have been led astray; it restarts once it hears
    us.
    """
    if is_within_reach(state, counter, shown):
        return True
    if shown.rosters:
        raise ProtocolError(f"an epoch counter of {counter}, which no honest member reaches")
    return False


def _without(state: MemberState, node: NodeId) -> MemberState:
    return replace(state, peers={other: p for other, p in state.peers.items() if other != node})


def _known_view(state: MemberState, node: NodeId, epoch: Epoch) -> View | None:
    """Return the view of this epoch: ours, or one that the node itself has shown or shared with us.

    An epoch names one view (I1), but another node may have shown a forged one under its name.
    """
    views = [state.view]
    if node in state.shown:
        views.append(state.shown[node])
    if node in state.peers:
        views.append(state.peers[node].view)
    return next((view for view in views if view.epoch == epoch), None)


def _receive_view(state: MemberState, sender: Member, view: View, now: float) -> MemberStep:
    state = replace(state, shown={**state.shown, sender.node: view})
    beat = state.unplaced.get(sender.node)
    if beat is None or beat.view != view.epoch:
        return MemberStep(state)
    unplaced = {node: b for node, b in state.unplaced.items() if node != sender.node}
    return _receive_heartbeat(replace(state, unplaced=unplaced), sender, beat, now)


def _receive_proposal(
    state: MemberState, sender: Member, message: Propose, facts: Facts, now: float
) -> MemberStep:
    if state.me not in message.members:
        raise ProtocolError("a proposal sent to a machine that it leaves out")
    if message.epoch == state.promised:  # delivered twice
        return MemberStep(state)
    limits.check_pace(state, sender, now)
    answer = _objection(state, sender, message, now)
    if answer is not None:
        return MemberStep(state, (SendOnLink(sender, answer),))
    return _flush(replace(state, proposal=None), sender, message, facts, now)


def _objection(
    state: MemberState, sender: Member, message: Propose, now: float
) -> Refuse | Veto | Superseded | None:
    if message.epoch < state.promised:  # V1: a proposal must exceed the promise
        return Refuse(message.epoch, state.promised)
    # One step beyond what we heard: a lie may have reached only the leader.
    if not _is_credible(state, message.epoch.counter - STEP, message.base):
        return Veto(message.epoch)
    if state.me not in message.continuing:
        return Veto(message.epoch) if message.base.weight <= state.view.weight else None
    if not _of_one_line(state, sender, message):
        return Superseded(state.view)
    return Veto(message.epoch) if _passes_over_a_senior(state, sender, message, now) else None


def _of_one_line(state: MemberState, sender: Member, message: Propose) -> bool:
    """V2: the proposer is in our view, or its view records ours as our previous one."""
    ours = message.base.previous_epoch_of(state.me)
    return sender in state.view.members or ours == state.view.epoch


def _passes_over_a_senior(state: MemberState, sender: Member, message: Propose, now: float) -> bool:
    """True if a junior leaves out a senior that we hear. Only the most senior survivor leads."""
    order = state.view.by_seniority
    seniors = order[: order.index(sender)] if sender in order else ()
    return any(
        senior != state.me
        and senior not in message.members
        and hears_me(state, senior)
        and follows(state, senior, now)
        for senior in seniors
    )


def _flush(
    state: MemberState, sender: Member, message: Propose, facts: Facts, now: float
) -> MemberStep:
    """V1: promise the epoch. V3: deliver nothing of the jobs concerned from now on."""
    same_base = message.base.epoch == state.view.epoch
    reports = facts.reports()
    jobs = tuple(r.job for r in reports if r.job in message.jobs or not same_base)
    reports = tuple(_fenced(report) if report.job in jobs else report for report in reports)
    answer = Flushed(
        epoch=message.epoch,
        said=state.said,
        view=state.view,
        jobs=reports,
        waiting=facts.waiting,
        primaries=state.primaries,
    )
    if _came_to_nothing(state, sender, message, now):
        state = replace(state, failures=min(state.failures + 1, MOST_FAILURES))
    state = replace(
        state,
        promised=message.epoch,
        promises=(*state.promises, message.epoch)[-MOST_PROMISES:],
        highest_counter=max(state.highest_counter, message.epoch.counter),
        promised_to=limits.note_promise(state, sender, now),
        flushed_at=now,
    )
    if sender == state.me:
        return MemberStep(leader.begin(state, message, answer, now), (FenceJobs(jobs),))
    return MemberStep(state, (FenceJobs(jobs), SendOnLink(sender, fit_answer(answer))))


def _came_to_nothing(state: MemberState, sender: Member, message: Propose, now: float) -> bool:
    """V11: True if a commit of another leader is overdue, or we leave out a member that we hear."""
    if is_commit_overdue(state, now) and state.promised.leader != state.me.node:
        return True
    left_out = set(state.view.members).difference(message.continuing)
    return sender == state.me and any(hears_me(state, member) for member in left_out)


def _fenced(report: JobReport) -> JobReport:
    return msgspec.structs.replace(report, fenced=True)


def _withdraw(state: MemberState, sender: Member, answer: Refuse | Veto, now: float) -> MemberState:
    if isinstance(answer, Refuse):
        peer = state.peers.get(sender.node)
        shown = state.view if peer is None else peer.view
        if _is_credible(state, answer.promised.counter, shown):
            seen = max(state.highest_counter, answer.promised.counter)
            state = replace(state, highest_counter=seen)
    if state.proposal is None or state.proposal.message.epoch != answer.epoch:
        return state
    # V11: whom it leaves out, others may hear for seconds yet (V12).
    doubled_s = BACK_OFF_S * slowness(state) * 2.0 ** min(state.refusals, 20)
    back_off_s = min(doubled_s, LONGEST_BACK_OFF_S)
    return replace(
        state,
        proposal=None,
        refusals=state.refusals + 1,
        quiet_until=now + back_off_s * _jitter(state),
    )


def _jitter(state: MemberState) -> float:
    """Return a number from 0 to 1 that depends on the random incarnation, so leaders differ."""
    mixed = (state.me.incarnation ^ state.highest_counter * 0x9E3779B97F4A7C15) % 1009
    return mixed / 1009  # the golden ratio and a prime: neighbouring inputs give different results


def _leave_if_superseded(state: MemberState, sender: Member, view: View, now: float) -> MemberStep:
    """V2: continue alone if our view went on without us, and nobody of it continues with us."""
    proof = (
        view.epoch > state.view.epoch
        and state.me not in view.members
        and _has_gone_on(state, sender, view)
        and not _others_continue(state, sender, now)
    )
    if not proof:
        return MemberStep(state)
    counter = max(state.highest_counter, state.promised.counter) + 1
    epoch = Epoch(counter, *state.me)
    kept = keep_local_rosters(state.view, state.me)
    alone = View.of_one(state.me, state.said, epoch, kept)
    return _install(replace(state, promised=epoch), alone, now)


def _has_gone_on(state: MemberState, member: Member, later: View) -> bool:
    """True if it has been in one lineage from our view on: its admission is the same in both."""
    ours, theirs = state.view.seat_of(member), later.seat_of(member)
    return ours is not None and theirs is not None and ours.admitted == theirs.admitted


def _others_continue(state: MemberState, sender: Member, now: float) -> bool:
    """True if more than the sender is left of our view: if it lies, it parts nobody else."""
    return not {state.me, sender}.issuperset(continuing_members(state, now))


def _receive_commit(state: MemberState, message: Commit, now: float) -> MemberStep:
    view = message.view
    if state.me not in view.members:
        raise ProtocolError("a commit sent to a machine that it leaves out")
    if view.epoch != state.promised or state.flushed_at is None:  # V1: only what was promised
        return MemberStep(state)
    if leader.ring_order(view.members, message.costs) != view.members:
        raise ProtocolError("a commit whose ring does not follow from its costs")
    return _install(state, view, now)


def _install(state: MemberState, view: View, now: float) -> MemberStep:
    """I2: install only a higher epoch, and only a view that includes us."""
    if view.epoch <= state.view.epoch or state.me not in view.members:
        raise ProtocolError(f"a view that can't follow: {view.epoch.counter}")
    reordered = any(is_reordered(state.view.roster_of(r.job), r) for r in view.rosters)
    state = replace(
        state,
        view=view,
        reorder=(),
        weighed=(),
        steady_until=now + RING_PAUSE_S if reordered else state.steady_until,
        promises=(),
        flushed_at=None,
        failures=max(0, state.failures - _is_success(state.view, view)),
        refusals=0,
        flaps=_note_losses(state, view, now),
        debt=None,
        installed_at=now,
        proposal=None,
        primaries=quorum.remember(state.primaries, view),
        highest_counter=view.epoch.counter,  # counters seen elsewhere before do not matter
        joining={m: asked for m, asked in state.joining.items() if m not in view.members},
        losses={m: why for m, why in state.losses.items() if m in view.members},
    )
    return MemberStep(_confirm_primaries(state), (Install(view),))


def _note_losses(state: MemberState, view: View, now: float) -> dict[Member, MemberFlaps]:
    """V11: Return how often members were lost lately, with those that this view leaves out."""
    flaps = {member: f for member, f in state.flaps.items() if f.left(now) > 0}
    for member in sorted(set(state.view.members).difference(view.members)):
        before = flaps.pop(member, None)
        flaps[member] = MemberFlaps(1 if before is None else before.left(now) + 1, now)
    return dict(list(flaps.items())[-MOST_FLAPPING:])


def _is_success(before: View, view: View) -> bool:
    """V11: True if the agreement was not bought with the loss of a member."""
    return len(view.seats) > 1 and set(before.members) <= set(view.members)


def _confirm_primaries(state: MemberState) -> MemberState:
    """V10: note rosters in force, from the views that peers installed or from their heartbeats."""
    if all(quorum.is_in_force(roster, state.primaries) for roster in state.view.rosters):
        return state
    installed = {peer.member: peer.view.epoch for peer in state.peers.values()}
    installed[state.me] = state.view.epoch
    reported = {known for peer in state.peers.values() for known in peer.heartbeat.in_force}
    known = quorum.confirm(state.primaries, state.view, installed, reported)
    return state if known is state.primaries else replace(state, primaries=known)


def _give_up_on_silent(state: MemberState, now: float) -> MemberState:
    """V6: leave a member out for a while if its flush answer misses the deadline."""
    proposal = state.proposal
    if proposal is None:
        return state
    waited_s = now - proposal.made_at
    earlier = {m: s for m, s in state.skipped.items() if s.until + LONGEST_SKIP_S > now}
    silent = dict[Member, Skip]()
    for member in proposal.message.members:
        before = earlier.get(member)
        lasts_s = SKIP_S if before is None else min(2 * before.lasts_s, LONGEST_SKIP_S)
        if has_read(state, member, proposal.made_at) or not hears_me(state, member):
            limit_s = FLUSH_DEADLINE_S * slowness(state)
        else:  # V11: what is still under way is a matter of the network, and not of the member
            limit_s = UNREAD_S * slowness(state) * lasts_s / SKIP_S
        if member not in proposal.answers and waited_s >= limit_s:
            silent[member] = Skip(now + lasts_s, lasts_s)
    if not silent:
        return state
    return replace(state, proposal=None, skipped={**earlier, **silent})


def _consider(step: MemberStep, facts: Facts, now: float) -> MemberStep:
    """Commit, propose or ask to join if it is time; called after every input.

    It waits when a view was installed just now: the facts about the jobs are known once they have
    followed it (V3), and then the driver calls `pass_time`.
    """
    if any(isinstance(action, Install) for action in step.actions):
        return step
    state, actions = step.state, list[MemberAction](step.actions)
    message = leader.propose(state, facts, now)
    if message is not None:
        flushed = _flush(state, state.me, message, facts, now)
        others = [member for member in message.members if member != state.me]
        state = flushed.state
        actions += [*flushed.actions, *(SendOnLink(member, message) for member in others)]
    commit = leader.decide(state, facts)
    if commit is not None:
        actions += [SendOnLink(m, commit) for m in commit.view.members if m != state.me]
        installed = _install(state, commit.view, now)
        state = installed.state
        actions += installed.actions
    asked = _ask_to_join(state, now)
    return MemberStep(asked.state, (*actions, *asked.actions))


def _ask_to_join(state: MemberState, now: float) -> MemberStep:
    """V9: a member of a lighter view asks the leader of the heaviest view that it hears."""
    leaders = [
        peer
        for peer in state.peers.values()
        if peer.heartbeat.acting
        and not peer.heartbeat.flushed
        and hears_me(state, peer.member)
        and state.me not in peer.view.members
        and peer.view.weight > state.view.weight
    ]
    met_at = None
    if leaders:
        met_at = now if state.met_at is None else state.met_at
    if met_at != state.met_at:
        state = replace(state, met_at=met_at)
    if met_at is None or state.proposal is not None:
        return MemberStep(state)
    best = max(leaders, key=lambda peer: peer.view.weight)
    whole = _can_come_whole(state, best.view, now)
    asked_lately = now - state.asked_to_join_at < JOIN_REQUEST_S * slowness(state) / 4
    if asked_lately or not (whole or now - met_at >= PATIENCE_S * patience(state)):
        return MemberStep(state)
    state = replace(state, asked_to_join_at=now)
    return MemberStep(state, (SendOnLink(best.member, AskToJoin(state.view.epoch, whole)),))


def _can_come_whole(state: MemberState, view: View, now: float) -> bool:
    """V9: True if all members that continue with us and all of the other view hear each other.

    If only some of them joined first, a job among them would be split.
    """
    ours = continuing_members(state, now)
    return all(hear_each_other(state, mine, theirs) for mine in ours for theirs in view.members)


@dataclass(frozen=True, slots=True)
class StallGuard:
    """V8: after an agent slept, it checks that its view is still the view of all its members.

    The others may have continued without it. So it delivers nothing until every member of its view
    has confirmed, in answer to something sent since, that it has the same view.
    """

    awake_us: int = 0
    """When the agent last woke up, on its monotonic clock."""
    unconfirmed: frozenset[Member] = frozenset()
    """The members that have not confirmed the view yet; it is trusted once there are none."""

    def receive(self, state: MemberState, sender: Member, beat: Heartbeat) -> "StallGuard":
        """A heartbeat confirms the view that it names if it answers one sent since we woke up."""
        if beat.view != state.view.epoch or beat.echo_us < self.awake_us:
            return self
        return replace(self, unconfirmed=self.unconfirmed - {sender})

    def install(self, before: MemberState, view: View) -> "StallGuard":
        """Follow a new view.

        If it was promised before the sleep, the others may have installed and left it long ago.
        """
        promised_at = before.flushed_at
        if promised_at is not None and promised_at * 1e6 < self.awake_us:
            return replace(self, unconfirmed=_others(before, view))
        return replace(self, unconfirmed=self.unconfirmed.intersection(view.members))


def wake(state: MemberState, *, now_us: int) -> StallGuard:
    """V8: distrust the view: the agent slept so long that a member may have given it up."""
    return StallGuard(now_us, _others(state, state.view))


def _others(state: MemberState, view: View) -> frozenset[Member]:
    return frozenset(view.members) - {state.me}
