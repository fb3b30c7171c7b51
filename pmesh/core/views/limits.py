"""Limits on the harm that one bad member can do to the agreement.

A message that no honest member would send is refused before it touches the state: msgspec has
checked each field by itself, `check_message` checks the message as a whole, without the receiver's
state, and `pmesh.core.views.agreement` what depends on that.

A leader's pace: a proposal fences jobs until its commit (V3). A leader that proposes forever, or
never commits, would stop them as long as it leads. Its peers close their links to it, and the next
member leads.

The reach of epoch counters: a promise is final (V1), so an agent that promised the highest possible
counter could never agree to another view. A view with jobs follows counters only in steps. A view
without jobs has nothing to lose: it follows any sound counter, and one from a mesh whose jobs it
may enter. If it was led astray, its members restart as if their agents had been restarted.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import msgspec

from pmesh.core.values import MAX_JOB_BYTES, MAX_ROSTERS_BYTES, Roster, View, decoded, nbytes_of
from pmesh.core.views.state import (
    PATIENCE_S,
    Debt,
    MemberState,
    Promise,
    continuing_members,
    is_acting,
    is_stale,
    slowness,
)
from pmesh.core.wire.views import (
    MAX_REQUESTS_BYTES,
    AgreementMessage,
    Commit,
    Flushed,
    Heartbeat,
    Propose,
    Superseded,
    TellView,
)
from pmesh.errors import ProtocolError
from pmesh.ids import MAX_COUNTER, JobName, Member

WINDOW_S: Final = 2.0
PACE: Final = 32
"""The most proposals that an honest leader makes in a window; further changes wait."""

TOLERATED: Final = 4 * PACE
"""The most proposals in a window that others accept: late messages may arrive together."""

BROKEN_WINDOW_S: Final = 60.0
BROKEN: Final = 24
"""Promises in a minute that a leader may leave without a commit. An honest leader leaves out a
member that does not answer for 1 s, then 2, 4, … 32: three such members together cost 20."""

HELD_UP_S: Final = 30.0
"""Time for many proposals, each without the members that did not answer the last one. With a cut,
stall or sleep every second, honest leaders have needed more than 15 s: one that is refused backs
off for up to 8 s, and one that is not read waits for 5 s and more."""

AWAKE_S: Final = 0.5
"""The most time counted between two heartbeats: our own sleep is not the leader's fault."""


def may_propose(state: MemberState, now: float) -> bool:
    """True if one more proposal keeps within the pace."""
    return len(_promised_to(state, state.me, now - WINDOW_S)) < PACE


def check_pace(state: MemberState, leader: Member, now: float) -> None:
    """Raise ProtocolError if the leader proposes more often than an honest one would."""
    if len(_promised_to(state, leader, now - WINDOW_S)) >= TOLERATED:
        raise ProtocolError(f"more than {TOLERATED} proposals in {WINDOW_S:.0f} s")
    recent = _promised_to(state, leader, now - BROKEN_WINDOW_S)
    if sum(promise.broken for promise in recent) >= BROKEN:
        raise ProtocolError(f"{BROKEN} proposals without a commit in {BROKEN_WINDOW_S:.0f} s")


def note_promise(state: MemberState, leader: Member, now: float) -> tuple[Promise, ...]:
    """Return the remembered promises with one more."""
    before = state.promised_to
    if state.flushed_at is not None and before and before[-1].leader == leader:
        before = (*before[:-1], before[-1]._replace(broken=True))
    return (*before, Promise(now, leader))[-TOLERATED:]


def note_need(state: MemberState, now: float) -> Debt | None:
    """Return which leader owes our view a change, and since when. Call it at each heartbeat."""
    if is_acting(state, now):
        return None
    members = continuing_members(state, now)
    if not is_stale(state, members, now):
        return None
    leader = members[0]
    before = state.debt
    if before is None or before.leader != leader:
        return Debt(leader, now, now)
    waited_s = before.waited_s + min(now - before.at, AWAKE_S) / slowness(state)
    return Debt(leader, before.since, now, waited_s)


def who_holds_up(state: MemberState) -> Debt | None:
    """Return the leader's debt if it made no view for far longer than an honest one can take."""
    debt = state.debt
    return debt if debt is not None and debt.waited_s > HELD_UP_S else None


def _promised_to(state: MemberState, leader: Member, after: float) -> list[Promise]:
    return [p for p in state.promised_to if p.leader == leader and p.at > after]


STEP: Final = 2**20
"""Honest members differ by less than this million proposals. 2^62 is 2^42 such steps away."""

SOUND: Final = 2**32
"""No honest mesh reaches this: it is one view a second for 136 years."""


def is_within_reach(state: MemberState, counter: int, shown: View) -> bool:
    """True if this member may follow the counter that a peer with the view `shown` promised.

    A leader's proposal may be one step further: a lie may have reached only the leader.
    """
    if counter <= state.highest_counter + STEP:
        return True
    most = MAX_COUNTER // 2 if shown.rosters else SOUND
    return not state.view.rosters and counter <= most


def is_led_astray(state: MemberState, *, now: float) -> bool:
    """True if this member must restart because a view with jobs cannot follow its counter.

    Never while a commit may come, and never twice within PATIENCE_S, whatever peers send.
    """
    if state.view.rosters or state.flushed_at is not None:
        return False
    working = [peer for peer in state.peers.values() if peer.view.rosters]
    lowest = min((peer.heartbeat.promised.counter for peer in working), default=SOUND)
    beyond = state.promised.counter > min(SOUND, lowest + STEP)
    return beyond and now - state.installed_at > PATIENCE_S


def check_message(sender: Member, message: AgreementMessage) -> None:
    """Raise ProtocolError if no honest member would send this."""
    match message:
        case Heartbeat():
            _demand(message.view <= message.promised, "a promise below the installed epoch (V1)")
            _check_names(w.job for w in message.waiting)
            _demand(
                nbytes_of(message.view_requests) <= MAX_REQUESTS_BYTES, "too large view requests"
            )
        case TellView() | Superseded():
            _check_view_of(sender, message.view)
        case Propose():
            _check_proposal(sender, message)
        case Flushed():
            _check_flushed(sender, message)
        case Commit():
            _check_commit(sender, message)
        case _:
            pass  # the fields of the others are independent


def check_view(view: View) -> None:
    """Raise ProtocolError if no leader could have committed this view."""
    counter = view.epoch.counter
    _demand_unique([member.node for member in view.members], "machines in a view")
    _demand(view.epoch[1:] in view.members, "a view whose leader has no seat")
    for seat in view.seats:
        _demand(seat.admitted <= view.epoch, "a seat from a later view")
        _demand(seat.previous is None or seat.previous < view.epoch, "a seat from a later view")
    _demand_unique([roster.job for roster in view.rosters], "rosters of one job")
    _check_names(roster.job for roster in view.rosters)
    nbytes = sum(roster.nbytes for roster in view.rosters)
    _demand(nbytes <= MAX_ROSTERS_BYTES, f"rosters of {nbytes} bytes")
    for roster in view.rosters:
        _demand(roster.number <= counter, "a roster from a later view")
        _demand(roster.primary.epoch <= view.epoch, "a quorum from a later view")
        _check_roster(roster, view.members)


def is_taken(view: View) -> bool:
    """True if others take the view for one that a leader could have committed."""
    try:
        check_view(decoded(view))
    except (msgspec.MsgspecError, ProtocolError):
        return False
    return True


def _check_names(jobs: Iterable[JobName]) -> None:
    for job in jobs:
        _demand(len(job.encode()) <= MAX_JOB_BYTES, f"job {job!r}: its name is too long")


def _check_roster(roster: Roster, members: Sequence[Member]) -> None:
    _demand(roster.trainers, f"a roster of job {roster.job!r} without trainers")
    known = roster.trainers + roster.lost_holders
    _demand_unique([trainer.id for trainer in known], "trainers of one number")
    _demand_unique([(t.member, t.slot) for t in roster.trainers], "trainers on one connection")
    _demand(all(t.id < roster.next_id for t in known), "a trainer with an id not yet assigned")
    # V3: a job that is not fenced everywhere keeps a lost trainer until the next view.
    _demand(
        any(trainer.member in members for trainer in roster.trainers),
        f"a roster of job {roster.job!r} with trainers only on machines that have no seat",
    )
    _demand(roster.born.counter <= roster.number, "a roster from before its job began")
    _demand_unique([outcome.op for outcome in roster.outcomes], "outcomes of one op")


def _check_view_of(sender: Member, view: View) -> None:
    """Check a view that the sender claims to have installed (I2)."""
    check_view(view)
    _demand(sender in view.members, "a view without its sender")


def _check_proposal(sender: Member, message: Propose) -> None:
    _demand(message.epoch[1:] == sender, "a proposal in another's name")
    _check_view_of(sender, message.base)
    _demand(message.base.epoch < message.epoch, "a proposal below its base (V1)")
    _demand_unique([member.node for member in message.members], "machines in a proposal")
    _demand(set(message.continuing) <= set(message.members), "a proposal that omits a member")
    kept = [member for member in message.base.by_seniority if member in message.continuing]
    _demand(len(kept) == len(message.continuing), "a proposal that continues a stranger (V2)")
    _demand(kept and kept[0] == sender, "a proposal that its most senior member did not send")


def _check_flushed(sender: Member, message: Flushed) -> None:
    _check_view_of(sender, message.view)
    _demand(message.view.epoch < message.epoch, "a promise of an epoch already installed (V1)")
    _demand_unique([(report.job, report.born) for report in message.jobs], "reports of one job")
    for report in message.jobs:
        _demand_unique([rank.trainer for rank in report.ranks], "reports of one rank")
        for rank in report.ranks:
            _demand_unique([op.op for op in rank.ops], "reports of one op")
    _demand_unique([waiting.slot for waiting in message.waiting], "trainers that wait")
    _check_names(waiting.job for waiting in message.waiting)


def _check_commit(sender: Member, message: Commit) -> None:
    _demand(message.view.epoch[1:] == sender, "a commit in another's name")
    check_view(message.view)
    size = len(message.view.seats)
    fits = len(message.costs) == size and all(len(row) == size for row in message.costs)
    _demand(fits, "a commit whose costs do not fit its members")


def _demand_unique(values: Iterable[Hashable], what: str) -> None:
    listed = list(values)
    _demand(len(set(listed)) == len(listed), f"{what}: one appears twice")


def _demand(holds: object, otherwise: str) -> None:
    if not holds:
        raise ProtocolError(otherwise)
