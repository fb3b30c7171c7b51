"""How soon agents agree once their network is healed: one bound, stated and computed here.

The network is healed from the instant on after which no agent stops, all pairs are linked, no agent
gives another one up, and no message and its answer take longer than the round trip. From then on,
all are members of one view, and wait for no other, after `agreement_bound_s` at the latest.

docs/explanation/rules.md says why. The simulation and the state machine of three agents
(tests/core/views/test_agreement_machine.py) hold it against every history.
"""

from typing import Final

from pmesh.core.views.state import (
    GOOD_ROUND_TRIP_S,
    LONGEST_BACK_OFF_S,
    LONGEST_HOLD_OFF_S,
    LONGEST_SKIP_S,
    MOST_PATIENCE,
    MOST_SLOW,
    PATIENCE_S,
)

OLD_WAITS_S: Final = (
    max(LONGEST_SKIP_S, PATIENCE_S * MOST_PATIENCE) + LONGEST_HOLD_OFF_S + LONGEST_BACK_OFF_S
)
"""What was begun before the network healed ends within this: 70 s.

A skip, or the wait for a commit (they run side by side); then a member that this had left out is
held off as one that flaps; and a leader that was refused backs off."""

ROUND_TRIPS: Final = 4
"""What one view takes of them: a heartbeat and the request to join, a proposal that is refused, its
successor, the commit and a heartbeat that shows it."""

LONGEST_ROUND_TRIP_S: Final = 8.0
"""Beyond this the bound is void: a flush and its commit take longer than the longest patience."""


def agreement_bound_s(members: int, round_trip_s: float) -> float:
    """Return the longest time in which healed agents agree.

    Each view that is made joins at least two views or takes a member back in, so `members` views
    are enough. One view takes `PATIENCE_S`, in which heartbeats, repeated requests and a first
    back-off have room, and some round trips.

    >>> agreement_bound_s(3, 0.0)
    76.0
    >>> agreement_bound_s(8, 0.1)
    105.2
    """
    # The timeout that slowness is measured by is at most five round trips (RFC 6298).
    slowness = min(max(1.0, 5 * round_trip_s / GOOD_ROUND_TRIP_S), MOST_SLOW)
    return OLD_WAITS_S + members * (PATIENCE_S * slowness + ROUND_TRIPS * round_trip_s)
