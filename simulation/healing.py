"""Holds the agents of a history against the bound on how soon healed agents agree."""

from pmesh.core.views.bound import LONGEST_ROUND_TRIP_S, agreement_bound_s
from simulation.invariants import Violation


class Healing:
    """Since when the network has been healed, as `pmesh.core.views.bound` says what that is."""

    def __init__(self) -> None:
        self.since = 0.0
        """When a fault happened, a member was given up or all agreed, whichever was last."""
        self._round_trip_s = 0.0

    def begin(self, now: float) -> None:
        """A fault has happened, or somebody has given a member up: the bound counts anew."""
        self.since, self._round_trip_s = now, 0.0

    def measured(self, round_trip_s: float | None) -> None:
        """A message and its answer have taken this long; None if the echo shows nothing."""
        self._round_trip_s = max(self._round_trip_s, round_trip_s or 0.0)

    def check(self, *, agreed: bool, members: int, now: float) -> None:
        """Raise a Violation if all should be members of one view by now."""
        if agreed:
            self.begin(now)
            return
        bound_s = agreement_bound_s(members, self._round_trip_s)
        within = self._round_trip_s <= LONGEST_ROUND_TRIP_S
        if within and now - self.since > bound_s:
            raise Violation(f"no agreement {now - self.since:.1f} s after all was well: {bound_s}")
