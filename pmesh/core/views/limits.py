"""Limits on what one bad member can do to the agreement.

A leader's pace: a proposal fences jobs until its commit (V3). A leader that proposes without end,
or never commits, would stop them for as long as it leads. It loses its links, and the next one
leads.

The reach of epoch counters: a promise can't be taken back (V1), so an agent that has promised the
highest counter there is could never agree to a view again. A view with jobs follows counters only
in steps. A view without jobs has nothing to lose: it follows any sound counter, and one from a mesh
whose jobs it may enter. Where it was led astray, its members begin anew, as if their agents had
been restarted.
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
"""Proposals that an honest leader makes in a window; what else there is to settle waits."""

TOLERATED: Final = 4 * PACE
"""Proposals in a window that others take of a leader: messages may be late, and come together."""

BROKEN_WINDOW_S: Final = 60.0
BROKEN: Final = 24
"""Promises in a minute that a leader may leave without a commit. Who does not answer an honest one
is left out for 1 s, then 2, 4, … 32: three such members together cost 20."""

HELD_UP_S: Final = 15.0
"""Time for many proposals, each without those who did not answer the last one. Where cuts, stalls
and sleeps follow each other every second, honest leaders have needed more than 6 s."""

AWAKE_S: Final = 0.5
"""Counted between two heartbeats at most: that we slept is nobody's fault."""


def may_propose(state: MemberState, now: float) -> bool:
    """Whether we keep to the pace with one more proposal."""
    return len(_promised_to(state, state.me, now - WINDOW_S)) < PACE


def check_pace(state: MemberState, leader: Member, now: float) -> None:
    """Raises ProtocolError if the leader asks for more than an honest one would."""
    if len(_promised_to(state, leader, now - WINDOW_S)) >= TOLERATED:
        raise ProtocolError(f"more than {TOLERATED} proposals in {WINDOW_S:.0f} s")
    recent = _promised_to(state, leader, now - BROKEN_WINDOW_S)
    if sum(promise.broken for promise in recent) >= BROKEN:
        raise ProtocolError(f"{BROKEN} proposals without a commit in {BROKEN_WINDOW_S:.0f} s")


def note_promise(state: MemberState, leader: Member, now: float) -> tuple[Promise, ...]:
    """What is remembered of promises once there is one more."""
    before = state.promised_to
    if state.flushed_at is not None and before and before[-1].leader == leader:
        before = (*before[:-1], before[-1]._replace(broken=True))
    return (*before, Promise(now, leader))[-TOLERATED:]


def note_need(state: MemberState, now: float) -> Debt | None:
    """Who leaves us, or another of our view, without a view that is needed; for each heartbeat."""
    if is_acting(state, now):
        return None
    members = continuing_members(state, now)
    if not is_stale(state, members, now):
        return None
    leader = members[0]
    before = state.owed
    if before is None or before.leader != leader:
        return Debt(leader, 0.0, now)
    return Debt(leader, before.waited_s + min(now - before.at, AWAKE_S), now)


def who_holds_up(state: MemberState) -> Member | None:
    """The leader, if it has made no view for far longer than an honest one can take."""
    owed = state.owed
    return owed.leader if owed is not None and owed.waited_s > HELD_UP_S else None


def _promised_to(state: MemberState, leader: Member, after: float) -> list[Promise]:
    return [p for p in state.promised_to if p.leader == leader and p.at > after]


STEP: Final = 2**20
"""Honest members differ by less: a million proposals. 2^62 is 2^42 such steps away."""

SOUND: Final = 2**32
"""No honest mesh gets here: a view a second for 136 years."""


def is_within_reach(state: MemberState, counter: int, shown: View) -> bool:
    """Whether this member may follow a counter that it is told of.

    What a leader then proposes may be one step further: a lie may have reached it alone.

    Args:
        state: this member's.
        counter: that of an epoch which a peer has promised, or proposes.
        shown: the view that the peer has installed.
    """
    if counter <= state.highest_counter + STEP:
        return True
    most = MAX_COUNTER // 2 if shown.rosters else SOUND
    return not state.view.rosters and counter <= most


def is_led_astray(state: MemberState, *, now: float) -> bool:
    """Whether this member must begin anew, since a view with jobs can't follow it.

    Not while a commit may come, and not twice in PATIENCE_S, whoever provokes it.
    """
    if state.view.rosters or state.flushed_at is not None:
        return False
    working = [peer for peer in state.peers.values() if peer.view.rosters]
    lowest = min((peer.heartbeat.promised.counter for peer in working), default=SOUND)
    beyond = state.promised.counter > min(SOUND, lowest + STEP)
    return beyond and now - state.installed_at > PATIENCE_S
