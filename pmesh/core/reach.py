"""How far ahead an epoch counter may be, so that no member can use the counters up.

A promise can't be taken back (V1): an agent that has promised the highest counter there is could
never agree to a view again. So a view with jobs follows counters only in steps. A view without jobs
has nothing to lose: it follows any sound counter, and one from a mesh whose jobs it may enter; and
where it was led astray its members begin anew, as if their agents had been restarted.
"""

from typing import Final

from pmesh.core.standing import PATIENCE_S, State
from pmesh.core.views import View
from pmesh.ids import MAX_COUNTER

STEP: Final = 2**20
"""Honest members differ by less: a million proposals. 2^62 is 2^42 such steps away."""

SOUND: Final = 2**32
"""No honest mesh gets here: a view a second for 136 years."""


def is_within_reach(state: State, counter: int, shown: View) -> bool:
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


def is_led_astray(state: State, *, now: float) -> bool:
    """Whether this member must begin anew, since a view with jobs can't follow it.

    Not while a commit may come, and not twice in PATIENCE_S, whoever provokes it.
    """
    if state.view.rosters or state.flushed_at is not None:
        return False
    working = [peer for peer in state.peers.values() if peer.view.rosters]
    lowest = min((peer.heartbeat.promised.counter for peer in working), default=SOUND)
    beyond = state.promised.counter > min(SOUND, lowest + STEP)
    return beyond and now - state.installed_at > PATIENCE_S
