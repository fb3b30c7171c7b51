"""How fast a job trains, and which of its ranks the others wait for.

A rank that spends less of its time in collective calls than the others is the slowest: it comes
last to each of them, and does not wait.
"""

import math
from collections import deque
from typing import Final

MEMORY_S: Final = 10.0
"""What happened this long ago counts a third: steps take different times, as with a validation."""
_KEPT: Final = 3  # as many changes are kept however old they are: steps may take minutes


class OwnTime:
    """The share of a trainer's time that it spends outside collective calls."""

    def __init__(self) -> None:
        self._own_s = self._called_s = 0.0
        self._since: float | None = None
        self._calls = False

    def percent(self, now: float) -> int | None:
        """Return the share in percent; None before the first call."""
        if self._since is None:
            return None
        self.note(now, calls=self._calls)
        whole = self._own_s + self._called_s
        return round(100 * self._own_s / whole) if whole else None

    def note(self, now: float, *, calls: bool) -> None:
        """Note whether the trainer is in a call from now on."""
        if self._since is not None:
            passed = now - self._since
            fades = math.exp(-passed / MEMORY_S)
            counts_s = MEMORY_S * (1 - fades)  # so an hour in one call counts as ten seconds of it
            self._own_s = self._own_s * fades + counts_s * (not self._calls)
            self._called_s = self._called_s * fades + counts_s * self._calls
        self._since, self._calls = now, calls


class Speed:
    """How fast a count grows, from when it was seen to change."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, int]] = deque()

    def note(self, count: int, now: float) -> None:
        """Note that the count has this value now."""
        changes = self._changes
        if changes and count < changes[-1][1]:  # another history has won, or the job begins again
            changes.clear()
        if not changes or count > changes[-1][1]:
            changes.append((now, count))
        while len(changes) > _KEPT and changes[0][0] < now - MEMORY_S:
            changes.popleft()

    def per_s(self, now: float) -> float | None:
        """Return the speed; None until the count has changed twice.

        It falls once the count has not changed for twice as long as usual.
        """
        if len(self._changes) <= 1:
            return None
        (began, first), (changed, last) = self._changes[0], self._changes[-1]
        usual_s = (changed - began) / (len(self._changes) - 1)
        is_late = now - changed > 2 * usual_s
        return (last - first) / ((now if is_late else changed) - began)
