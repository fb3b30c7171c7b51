"""Limits on the harm that one bad member can do to the agreement.

A leader's pace: a proposal fences jobs until its commit (V3). A leader that proposes forever, or
never commits, would stop them as long as it leads. Its peers close their links to it, and the next
member leads.

The reach of epoch counters: a promise is final (V1), so an agent that promised the highest possible
counter could never agree to another view. A view with jobs follows counters only in steps. A view
without jobs has nothing to lose: it follows any sound counter, and one from a mesh whose jobs it
may enter. If it was led astray, its members restart as if their agents had been restarted.
"""

from typing import Final

from pmesh.core.values import View
from pmesh.core.views.state import (
    PATIENCE_S,
    Debt,
    MemberState,
    Promise,
    continuing_members,
    is_acting,
    is_stale,
)
from pmesh.errors import ProtocolError
from pmesh.ids import MAX_COUNTER, Member

WINDOW_S: Final = 2.0
PACE: Final = 32
"""The most proposals that an honest leader makes in a window; further changes wait."""

TOLERATED: Final = 4 * PACE
"""The most proposals in a window that others accept: late messages may arrive together."""

BROKEN_WINDOW_S: Final = 60.0
BROKEN: Final = 24
"""Promises in a minute that a leader may leave without a commit. An honest leader leaves out a
member that does not answer for 1 s, then 2, 4, … 32: three such members together cost 20."""

HELD_UP_S: Final = 15.0
"""Time for many proposals, each without the members that did not answer the last one. With a cut,
stall or sleep every second, honest leaders have needed more than 6 s."""

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
        return Debt(leader, 0.0, now)
    return Debt(leader, before.waited_s + min(now - before.at, AWAKE_S), now)


def who_holds_up(state: MemberState) -> Member | None:
    """Return the leader if it made no view for far longer than an honest one can take."""
    debt = state.debt
    return debt.leader if debt is not None and debt.waited_s > HELD_UP_S else None


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
