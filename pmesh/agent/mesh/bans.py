"""Nodes that get no link for a while."""

import math

from pmesh.ids import NodeId

BANNED_S = 2.0  # after the first message that no honest member would send; doubles each time
LONGEST_BANNED_S = 300.0
MAX_BANNED = 256


class Bans:
    """Nodes that get no link for a while, because they did what no honest member would."""

    def __init__(self) -> None:
        self._bans: dict[NodeId, tuple[float, float]] = {}  # end and length of the latest ban

    def add(self, node: NodeId, *, now: float) -> None:
        """Ban a node, each time for twice as long, unless it has behaved for five minutes."""
        until, lasted_s = self._bans.pop(node, (-math.inf, 0.0))
        again = now < until + LONGEST_BANNED_S
        lasts_s = min(2 * lasted_s, LONGEST_BANNED_S) if again else BANNED_S
        self._bans[node] = now + lasts_s, lasts_s
        if len(self._bans) > MAX_BANNED:
            del self._bans[next(iter(self._bans))]

    def left_s(self, node: NodeId, *, now: float) -> float:
        """Return the seconds until the ban ends; 0 if there is none."""
        until, _ = self._bans.get(node, (now, 0.0))
        return max(0.0, until - now)
