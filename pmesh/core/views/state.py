"""What one member knows: its own state in the agreement, and what its peers reported."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pmesh.core.topology.graph import UNKNOWN, Costs
from pmesh.core.values import SignedName, View
from pmesh.core.wire.views import (
    MAX_WAITING,
    AgreementMessage,
    Candidate,
    Flushed,
    Heartbeat,
    JobReport,
    KnownPrimary,
    MeasuredEdge,
    Propose,
    RankProgress,
    ViewRequest,
)
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId

GOOD_ROUND_TRIP_S = 0.25
"""V11: The deadlines below are for networks whose round trips end within this."""

MOST_SLOW = 4.0
"""V11: The most that round trips alone prolong them: a peer can pretend that it is slow."""

MOST_PATIENCE = 16.0
"""V11: The most that slow round trips and failures prolong the wait for a commit: to 32 s."""

MOST_FAILURES = 4
"""V11: The most failures that count: more would double nothing."""

UNREAD_S = 5.0
"""V11: How long a leader waits for a member that it hears to read its proposal; doubled each time
in a row."""

PATIENCE_S = 2.0
"""How long an installed view may take to reach everyone, and a flush to end in a commit (V6)."""

FLUSH_DEADLINE_S = 1.0
"""How long a leader waits for a flush answer: half of PATIENCE_S, so that it can try again."""

SKIP_S = 1.0
"""How long proposals leave out a member that did not answer; doubled each time in a row."""

LONGEST_SKIP_S = 32.0

JOIN_REQUEST_S = 1.0
"""How long a join request is valid; it is repeated four times in that time."""

NOTICE_S = 0.2
"""A member that lost its leader waits at most this long for the others to report the same: they
mostly notice within milliseconds, and would veto before."""

BACK_OFF_S = 0.4
"""The longest wait of a refused leader, so that two leaders do not refuse each other forever."""

LONGEST_BACK_OFF_S = 8.0
"""V11: Refusals double it up to this: who differs in whom it hears does not for longer (V12)."""

HOLD_OFF_S = 1.0
"""V11: How long a leader does not let a member back in that was lost twice; doubled each time."""

LONGEST_HOLD_OFF_S = 30.0

STEADY_S = 60.0
"""V11: One loss is forgotten each time that a member was not lost for this long."""

MOST_FLAPPING = 256
"""The most members whose losses are remembered: whoever has the mesh key can invent them."""

RING_PAUSE_S = 60.0
"""V13: The least time between two views that are made for a better ring alone."""

RING_RETRY_S = 10.0
"""V13: How soon a leader tries again if the op under way was over before all had flushed."""

MOST_PROMISES = 64
"""The most promised epochs that a member remembers since its last install: each took its leader at
least a round trip, and PATIENCE_S is soon over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the local agent knows at this instant, passed in because the core performs no I/O."""

    reports: Callable[[], tuple[JobReport, ...]] = lambda: ()
    """Returns what a flush answers; only a flush asks, as the ranks are recalled for it."""
    waiting: tuple[Candidate, ...] = ()
    view_requests: tuple[ViewRequest, ...] = ()
    progress: tuple[RankProgress, ...] = ()
    edges: Mapping[Incarnation, MeasuredEdge] = field(
        default_factory=dict[Incarnation, MeasuredEdge]
    )
    """To each measured peer."""
    timeout_s: float = 0.0
    """The longest retransmission timeout among the links, as in RFC 6298."""
    silent: tuple[Incarnation, ...] = ()
    """The peers that have been silent for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The last heartbeat of a peer."""

    member: Member
    heartbeat: Heartbeat
    view: View
    """The view that the heartbeat names."""


class Promise(NamedTuple):
    """An epoch that was promised to a leader, perhaps ourselves."""

    at: float
    leader: Member
    broken: bool = False
    """True if the leader proposed again instead of committing."""


class Skip(NamedTuple):
    """A member did not answer a proposal."""

    until: float
    lasts_s: float


class MemberFlaps(NamedTuple):
    """How often a process start of a member was lost lately, and when it was lost last."""

    losses: int
    lost_at: float

    def left(self, now: float) -> int:
        """Return the losses that are not forgotten yet."""
        return max(0, self.losses - int((now - self.lost_at) / STEADY_S))

    @property
    def held_off_until(self) -> float:
        """V11: The first loss costs nothing: a machine was cut off, or slept."""
        if self.losses <= 1:
            return self.lost_at
        return self.lost_at + min(HOLD_OFF_S * 2.0 ** (self.losses - 2), LONGEST_HOLD_OFF_S)


class Debt(NamedTuple):
    """A leader owes this member's view a change."""

    leader: Member
    since: float
    at: float
    """When it was last noted."""
    waited_s: float = 0.0
    """V11: A second of a slow network counts as less than one."""


class PendingJoin(NamedTuple):
    """A request of a member of a lighter view to join ours."""

    asked_at: float
    whole: bool
    """True if it wants to join only together with all of its view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A leader's attempt at the next view."""

    message: Propose
    answers: Mapping[Member, Flushed]
    made_at: float
    reordered: tuple[JobName, ...] = ()
    """V13: the jobs that are to get a better ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """The state of one member. Times are seconds of the local monotonic clock."""

    me: Member
    said: SignedName
    view: View
    promised: Epoch
    promises: tuple[Epoch, ...] = ()
    """The last MOST_PROMISES epochs that it promised since it installed its view."""
    flushed_at: float | None = None
    """When it promised an epoch whose commit is still missing; None if there is none."""
    installed_at: float = 0.0
    highest_counter: int = 0
    """The highest counter that it promised or was refused for; the next proposal must exceed it."""
    peers: Mapping[NodeId, Peer] = field(default_factory=dict[NodeId, Peer])
    """The peers that are heard; `pmesh.core.links.health` decides when one no longer is."""
    shown: Mapping[NodeId, View] = field(default_factory=dict[NodeId, View])
    """The last view that each peer showed."""
    unplaced: Mapping[NodeId, Heartbeat] = field(default_factory=dict[NodeId, Heartbeat])
    """Heartbeats that name a view not seen yet."""
    timeout_s: float = 0.0
    """`Facts.timeout_s` at the last heartbeat."""
    failures: int = 0
    """V11: One more for each promise without a commit, one less for each view."""
    refusals: int = 0
    """V11: How many of its proposals were refused since it installed its view."""
    flaps: Mapping[Member, MemberFlaps] = field(default_factory=dict[Member, MemberFlaps])
    """V11: The members that views left out lately."""
    joining: Mapping[Member, PendingJoin] = field(default_factory=dict[Member, PendingJoin])
    skipped: Mapping[Member, Skip] = field(default_factory=dict[Member, Skip])
    """Members that did not answer a proposal; proposals leave them out for a while."""
    promised_to: tuple[Promise, ...] = ()
    """The last promises, including those in earlier views."""
    debt: Debt | None = None
    losses: Mapping[Member, str] = field(default_factory=dict[Member, str])
    """Why each lost member was lost, for error messages."""
    proposal: Proposal | None = None
    primaries: tuple[KnownPrimary, ...] = ()
    """V10: the primary rosters that it knows; a vote is valid only if it remembers them."""
    quiet_until: float = 0.0
    noticing_until: float = 0.0
    """Until then the other members may not have noticed that our leader is gone."""
    asked_to_join_at: float = 0.0
    reorder: tuple[JobName, ...] = ()
    """V13: the jobs whose rings can get much better, as its leader sees it."""
    weighed: Costs = ()
    """The costs for which `reorder` was found."""
    steady_until: float = 0.0
    """V13: before this time no view is made for a better ring alone."""
    met_at: float | None = None
    """When it first heard a heavier view that it can join; None while there is none."""


@dataclass(frozen=True, slots=True)
class SendOnLink:
    """Send a message on the link to a member."""

    to: Member
    message: AgreementMessage


@dataclass(frozen=True, slots=True)
class FenceJobs:
    """From now on nothing of these jobs' current rosters may reach a trainer (V3)."""

    jobs: tuple[JobName, ...]


@dataclass(frozen=True, slots=True)
class Install:
    """The view is in force. The driver calls `pass_time` once the jobs have followed it."""

    view: View


MemberAction = SendOnLink | FenceJobs | Install


@dataclass(frozen=True, slots=True)
class MemberStep:
    """The next state, and the actions to carry out in this order."""

    state: MemberState
    actions: tuple[MemberAction, ...] = ()


def slowness(state: MemberState) -> float:
    """V11: Return how many times as long as on a good network messages take, from 1 on."""
    return min(max(1.0, state.timeout_s / GOOD_ROUND_TRIP_S), MOST_SLOW)


def patience(state: MemberState) -> float:
    """V11: Return how many times as long as on a good network to wait for a commit, or to join."""
    slow = max(1.0, state.timeout_s / GOOD_ROUND_TRIP_S)
    return min(slow * 2.0**state.failures, MOST_PATIENCE)


def has_read(state: MemberState, member: Member, sent_at: float) -> bool:
    """V11: True if the member has read all that we sent it before this time.

    A link delivers in order, so a heartbeat that echoes a later one shows it.
    """
    peer = state.peers.get(member.node)
    return peer is not None and peer.heartbeat.echo_us > sent_at * 1e6


def is_vouched_for(state: MemberState, node: NodeId, silent: Collection[NodeId]) -> bool:
    """V12: True if a member that is not silent to us has heard the peer lately."""
    peer = state.peers.get(node)
    return peer is not None and any(
        peer.member.incarnation in other.heartbeat.heard
        and peer.member.incarnation not in other.heartbeat.silent
        for other in state.peers.values()
        if other.member.node not in {node, *silent}
    )


def hears_me(state: MemberState, member: Member) -> bool:
    """V5: True if the member is healthy: it hears us and says so."""
    peer = state.peers.get(member.node)
    return (
        peer is not None and peer.member == member and state.me.incarnation in peer.heartbeat.heard
    )


def hear_each_other(state: MemberState, a: Member, b: Member) -> bool:
    """V5: True if the heartbeats of both say that they hear the other."""
    return all(
        at == state.me
        or (at.node in state.peers and of.incarnation in state.peers[at.node].heartbeat.heard)
        for at, of in ((a, b), (b, a))
    )


def follows(state: MemberState, member: Member, now: float) -> bool:
    """V2: True if a heard member is still in our lineage of views.

    Just after an install it may not know of it yet: evidence from before the install never expels.
    """
    peer = state.peers[member.node]
    fresh = peer.heartbeat.promised <= state.view.epoch and not _is_install_overdue(state, now)
    of_our_line = (state.view.epoch, state.view.previous_epoch_of(member))
    return fresh or peer.view.epoch in of_our_line or state.me in peer.view.members


def continuing_members(state: MemberState, now: float) -> tuple[Member, ...]:
    """Return the members of our view that continue with us, the most senior first."""
    return tuple(
        member
        for member in state.view.by_seniority
        if member == state.me or (hears_me(state, member) and follows(state, member, now))
    )


def is_acting(state: MemberState, now: float) -> bool:
    """True if we are the most senior continuing member of our view, and so lead it.

    We are then the first of `continuing_members`; this is cheaper, and called for each message.
    """
    order = state.view.by_seniority
    seniors = order[: order.index(state.me)]
    return not any(hears_me(state, senior) and follows(state, senior, now) for senior in seniors)


def needs_epoch(state: MemberState, now: float) -> bool:
    """V6: True if we promised an epoch whose commit is overdue, or can no longer come."""
    if state.flushed_at is None:
        return False
    return is_commit_overdue(state, now) or _is_given_up(state, state.promised)


def is_commit_overdue(state: MemberState, now: float) -> bool:
    """V6: True if the commit of the promised epoch has not come in time."""
    promised_at = state.flushed_at
    return promised_at is not None and now - promised_at > PATIENCE_S * patience(state)


def _is_given_up(state: MemberState, epoch: Epoch) -> bool:
    """V1: True if the leader of a promised epoch will not commit it any more, as far as we heard.

    It commits an epoch only while that is the highest that it has promised, and a link delivers in
    order: a commit would have come before the heartbeat that shows that the leader has promised
    more, has restarted, or has dropped its proposal and needs another epoch itself.
    """
    if epoch[1:] == state.me:
        return state.proposal is None
    leader = state.peers.get(epoch.leader)
    return leader is not None and (
        leader.member.incarnation != epoch.incarnation
        or leader.heartbeat.promised > epoch
        or (leader.heartbeat.promised == epoch and leader.heartbeat.needs_epoch)
    )


def is_stale(state: MemberState, kept: tuple[Member, ...], now: float) -> bool:
    """True if a member missed the last install or its commit: all of them need a new epoch."""
    overdue = _is_install_overdue(state, now)
    return state.flushed_at is not None or any(
        state.peers[member.node].heartbeat.needs_epoch
        or (overdue and state.peers[member.node].view.epoch != state.view.epoch)
        for member in kept
        if member != state.me
    )


def _is_install_overdue(state: MemberState, now: float) -> bool:
    """True if by now all members should have installed our view."""
    return now - state.installed_at > PATIENCE_S * patience(state)


def heartbeat_of(state: MemberState, facts: Facts, now: float) -> Heartbeat:
    """Return the heartbeat of this member; the driver sets the clock fields."""
    return Heartbeat(
        view=state.view.epoch,
        promised=state.promised,
        flushed=state.flushed_at is not None,
        acting=is_acting(state, now),
        needs_epoch=needs_epoch(state, now),
        heard={
            peer.member.incarnation: facts.edges.get(peer.member.incarnation, UNKNOWN)
            for peer in state.peers.values()
        },
        waiting=facts.waiting,
        view_requests=facts.view_requests,
        progress=facts.progress[:MAX_WAITING],
        in_force=_in_force(state),
        silent=facts.silent,
    )


def _in_force(state: MemberState) -> tuple[KnownPrimary, ...]:
    here = {(roster.job, roster.born) for roster in state.view.rosters}
    return tuple(k for k in state.primaries if k.in_force and (k.job, k.born) in here)
