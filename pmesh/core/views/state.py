"""What one member knows: its own standing in the agreement, and what it has heard of its peers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pmesh.core.values import View
from pmesh.core.wire.link import (
    AgreementMessage,
    Concern,
    Flushed,
    Heartbeat,
    JobReport,
    KnownPrimary,
    Propose,
    RankMarks,
    Waiting,
)
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId

PATIENCE_S = 2.0
"""How long an installed view may take to reach everyone, and a flush to end in a commit (V6)."""

FLUSH_DEADLINE_S = 1.0
"""How long a leader waits for a flush answer: half of PATIENCE_S, so that it can try again."""

SKIP_S = 1.0
"""How long who did not answer is left out of proposals; twice as long each time in a row."""

LONGEST_SKIP_S = 32.0

JOIN_REQUEST_S = 1.0
"""How long a request to be taken in counts; it is repeated four times as often."""

NOTICE_S = 0.2
"""Who has lost its leader waits at most this long for the others to say that they have lost it too:
they mostly notice within milliseconds, and would veto before."""

BACK_OFF_S = 0.4
"""At most this long a refused leader waits, so that two do not refuse each other for ever."""


MOST_PROMISES = 64
"""How many epochs a member remembers that it promised since its last install: each took its leader
at least a round trip, and PATIENCE_S is soon over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the local agent knows at this instant: arguments, since the core reads nothing."""

    reports: tuple[JobReport, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    concerns: tuple[Concern, ...] = ()
    marks: tuple[RankMarks, ...] = ()
    round_trips: Mapping[Incarnation, int] = field(default_factory=dict[Incarnation, int])
    """Microseconds, for each peer that has been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What a peer last said of itself."""

    member: Member
    heartbeat: Heartbeat
    view: View
    """The view that the heartbeat names."""


class Promise(NamedTuple):
    """An epoch that was promised to a leader, perhaps ourselves."""

    at: float
    leader: Member
    broken: bool = False
    """The leader has asked for another instead of a commit."""


class Skip(NamedTuple):
    """A member did not answer a proposal."""

    until: float
    lasts_s: float


class Debt(NamedTuple):
    """A leader owes a view to this member, or to another of its view."""

    leader: Member
    waited_s: float
    at: float


class JoinRequest(NamedTuple):
    """A member of a lighter view has asked to be taken in."""

    asked_at: float
    whole: bool
    """Only together with all of its view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A leader's attempt at the next view."""

    message: Propose
    answers: Mapping[Member, Flushed]
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """One member's standing. Times are the local monotonic clock, in seconds."""

    me: Member
    name: str
    view: View
    promised: Epoch
    promises: tuple[Epoch, ...] = ()
    """All that it has promised since it installed its view; the last ones, if they are many."""
    flushed_at: float | None = None
    """Since when a promise waits for its commit; None when none does."""
    installed_at: float = 0.0
    highest_counter: int = 0
    """What the next proposal must exceed, as far as this member has promised or was refused."""
    peers: Mapping[NodeId, Peer] = field(default_factory=dict[NodeId, Peer])
    """Who is heard: `pmesh.core.links.health` says when one is no longer."""
    told: Mapping[NodeId, View] = field(default_factory=dict[NodeId, View])
    """The last view that each peer showed."""
    unplaced: Mapping[NodeId, Heartbeat] = field(default_factory=dict[NodeId, Heartbeat])
    """Heartbeats that name a view not seen yet."""
    joining: Mapping[Member, JoinRequest] = field(default_factory=dict[Member, JoinRequest])
    """Who asked to be taken in."""
    skipped: Mapping[Member, Skip] = field(default_factory=dict[Member, Skip])
    """Who did not answer a proposal, and is left out for a while."""
    promised_to: tuple[Promise, ...] = ()
    """The last promises, in views before this one, too."""
    owed: Debt | None = None
    losses: Mapping[Member, str] = field(default_factory=dict[Member, str])
    """Why each lost member was lost, for messages."""
    proposal: Proposal | None = None
    primaries: tuple[KnownPrimary, ...] = ()
    """V10: what makes a vote one: not to have forgotten with whom the job has gone on."""
    quiet_until: float = 0.0
    noticing_until: float = 0.0
    """Until then the others may still have to notice that our leader is gone."""
    asked_to_join_at: float = 0.0
    met_at: float | None = None
    """Since when a heavier view has been there to join; None while there is none."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on the link to a member."""

    to: Member
    message: AgreementMessage


@dataclass(frozen=True, slots=True)
class Fence:
    """From this instant nothing of these jobs' current rosters reaches a trainer (V3)."""

    jobs: tuple[JobName, ...]


@dataclass(frozen=True, slots=True)
class Install:
    """The view is in force. Once the jobs have followed it, time is to pass again."""

    view: View


Action = Send | Fence | Install


@dataclass(frozen=True, slots=True)
class Step:
    """The next state, and what is to be done, in this order."""

    state: MemberState
    actions: tuple[Action, ...] = ()


def hears_me(state: MemberState, member: Member) -> bool:
    """V5: healthy means that it hears me and says so."""
    peer = state.peers.get(member.node)
    return (
        peer is not None and peer.member == member and state.me.incarnation in peer.heartbeat.heard
    )


def hear_each_other(state: MemberState, a: Member, b: Member) -> bool:
    """V5: whether both say that they hear the other, as far as their heartbeats tell."""
    return all(
        at == state.me
        or (at.node in state.peers and of.incarnation in state.peers[at.node].heartbeat.heard)
        for at, of in ((a, b), (b, a))
    )


def follows(state: MemberState, member: Member, now: float) -> bool:
    """Whether a heard member is still of our line of views (V2).

    Just after an install it may not have heard of it yet: evidence older than that never expels.
    """
    peer = state.peers[member.node]
    fresh = peer.heartbeat.promised <= state.view.epoch and now - state.installed_at < PATIENCE_S
    of_our_line = (state.view.epoch, state.view.previous_epoch_of(member))
    return fresh or peer.view.epoch in of_our_line or state.me in peer.view.members


def continuing_members(state: MemberState, now: float) -> tuple[Member, ...]:
    """Those of our view that go on with us, the most senior first."""
    return tuple(
        member
        for member in state.view.by_seniority
        if member == state.me or (hears_me(state, member) and follows(state, member, now))
    )


def is_acting(state: MemberState, now: float) -> bool:
    """Whether we are the most senior of our view that goes on, and so lead it.

    The first of `continuing_members` is the same; this is asked at each message.
    """
    order = state.view.by_seniority
    seniors = order[: order.index(state.me)]
    return not any(hears_me(state, senior) and follows(state, senior, now) for senior in seniors)


def needs_epoch(state: MemberState, now: float) -> bool:
    """V6: who promised and hears no more of it asks for a new epoch."""
    return state.flushed_at is not None and now - state.flushed_at > PATIENCE_S


def is_stale(state: MemberState, kept: tuple[Member, ...], now: float) -> bool:
    """Someone missed the last install, or was left flushed: the same members need a new epoch."""
    overdue = now - state.installed_at > PATIENCE_S
    return state.flushed_at is not None or any(
        state.peers[member.node].heartbeat.needs_epoch
        or (overdue and state.peers[member.node].view.epoch != state.view.epoch)
        for member in kept
        if member != state.me
    )


def heartbeat_of(state: MemberState, facts: Facts, now: float) -> Heartbeat:
    """What this member says of itself; clock fields are the driver's."""
    return Heartbeat(
        view=state.view.epoch,
        promised=state.promised,
        flushed=state.flushed_at is not None,
        acting=is_acting(state, now),
        needs_epoch=needs_epoch(state, now),
        heard={
            peer.member.incarnation: facts.round_trips.get(peer.member.incarnation, 0)
            for peer in state.peers.values()
        },
        waiting=facts.waiting,
        concerns=facts.concerns,
        marks=facts.marks,
        in_force=_in_force(state),
    )


def _in_force(state: MemberState) -> tuple[KnownPrimary, ...]:
    here = {(roster.job, roster.born) for roster in state.view.rosters}
    return tuple(k for k in state.primaries if k.in_force and (k.job, k.born) in here)
