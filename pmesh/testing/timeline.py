"""Simulated time: callbacks in the order in which they are due; nothing ever waits."""

import heapq
from collections.abc import Callable
from typing import TypeVarTuple

_Arguments = TypeVarTuple("_Arguments")


class Timeline:
    """A clock that jumps from one callback to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start."""
        self._count = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def after(
        self, delay_s: float, callback: Callable[[*_Arguments], None], *arguments: *_Arguments
    ) -> None:
        """Call back in `delay_s` seconds; what is due together runs in the order of the calls."""
        self._count += 1  # breaks ties, so that the same seed gives the same history
        entry = (self.now + delay_s, self._count, lambda: callback(*arguments))
        heapq.heappush(self._due, entry)

    def run_until(self, end: float) -> None:
        """Run everything that is due before `end`, and then be there."""
        while self._due and self._due[0][0] < end:
            self.now, _, callback = heapq.heappop(self._due)
            callback()
        self.now = end
