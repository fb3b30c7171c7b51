"""Numbers of the last hour, which the page charts; their memory is bounded."""

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple

SLOT_S: Final = 5.0  # an hour is 720 points, more than a chart has pixels on a phone
KEPT_SLOTS: Final = 720
MOST_CHARTS: Final = 64  # with 720 points each they take 5 MB


class Reading(NamedTuple):
    """A number of a job, as it is now."""

    job: str
    name: str
    value: float
    """Finite."""


class Chart(NamedTuple):
    """What is known of one number over time."""

    job: str
    name: str
    slots: list[int]
    """When, in units of `SLOT_S`, ascending. A number that was unknown for a while has a gap."""
    values: list[float]


class ChartHistory:
    """Keeps a value of each number for each slot of the last hour."""

    def __init__(self) -> None:
        self._charts: dict[tuple[str, str], deque[tuple[int, float]]] = {}

    def note(self, slot: int, readings: Iterable[Reading]) -> None:
        """Keep these readings; the last one of a slot counts, and slots never decrease.

        Beyond `MOST_CHARTS` numbers, the one whose last reading is the oldest is dropped.
        """
        for reading in readings:
            key = reading.job, reading.name
            points = self._charts.pop(key, None) or deque(maxlen=KEPT_SLOTS)
            if points and points[-1][0] == slot:
                points.pop()
            points.append((slot, reading.value))
            self._charts[key] = points  # last: the order is that of the last reading
        for key, points in [*self._charts.items()]:
            while points and points[0][0] <= slot - KEPT_SLOTS:
                points.popleft()
            if not points:
                del self._charts[key]
        for key in [*islice(self._charts, max(0, len(self._charts) - MOST_CHARTS))]:
            del self._charts[key]

    def charts(self) -> list[Chart]:
        """Return all that is kept."""
        return [
            Chart(job, name, [slot for slot, _ in points], [value for _, value in points])
            for (job, name), points in self._charts.items()
        ]
