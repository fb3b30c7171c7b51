"""Simulated time: callbacks in the order in which they are due; nothing ever waits."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TypeVarTuple

_Arguments = TypeVarTuple("_Arguments")


class Timeline:
    """A clock that jumps from one callback to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start."""
        self._count = 0
        self._due: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []

    def after(
        self, delay_s: float, callback: Callable[[*_Arguments], None], *arguments: *_Arguments
    ) -> None:
        """Call back in `delay_s` seconds; what is due together runs in the order of the calls."""
        self.at(self.now + delay_s, callback, *arguments)

    def at(
        self, due: float, callback: Callable[[*_Arguments], None], *arguments: *_Arguments
    ) -> None:
        """Call back when `now` is exactly `due`."""
        self._count += 1  # breaks ties, so that the same seed gives the same history
        heappush(self._due, (due, self._count, callback, arguments))

    def run_until(self, end: float) -> None:
        """Run everything that is due before `end`, and then be there."""
        due = self._due
        while due and due[0][0] < end:
            self.now, _, callback, arguments = heappop(due)
            callback(*arguments)
        self.now = end
