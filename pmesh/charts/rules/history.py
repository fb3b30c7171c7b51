"""Numbers of the last hour, which are charted; their memory is bounded."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple

SLOT_S: Final = 5.0  # an hour is 720 points, more than a chart has pixels on a phone
KEPT_SLOTS: Final = 720
MOST_CHARTS: Final = 64  # with 720 points each they take 0.8 MB


class ChartReading(NamedTuple):
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


class _Points:
    """The slots and values of one number; arrays, of which Python's collector knows nothing."""

    def __init__(self) -> None:
        self.slots, self.values = array("q"), array("d")

    def drop(self, count: int) -> None:
        """Forget the first ones."""
        del self.slots[:count], self.values[:count]


class ChartHistory:
    """Keeps a value of each number for each slot of the last hour."""

    def __init__(self) -> None:
        self._charts: dict[tuple[str, str], _Points] = {}

    def note(self, slot: int, readings: Iterable[ChartReading]) -> None:
        """Keep these readings; the last one of a slot counts, and slots never decrease.

        Beyond `MOST_CHARTS` numbers, the one whose last reading is the oldest is dropped.
        """
        for reading in readings:
            key = reading.job, reading.name
            points = self._charts.pop(key, None) or _Points()
            if points.slots and points.slots[-1] == slot:
                points.values[-1] = reading.value
            else:
                points.slots.append(slot)
                points.values.append(reading.value)
            self._charts[key] = points  # last: the order is that of the last reading
        for key, points in [*self._charts.items()]:
            points.drop(bisect_right(points.slots, slot - KEPT_SLOTS))
            if not points.slots:
                del self._charts[key]
        for key in [*islice(self._charts, max(0, len(self._charts) - MOST_CHARTS))]:
            del self._charts[key]

    def charts(self) -> list[Chart]:
        """Return all that is kept."""
        return [
            Chart(job, name, points.slots.tolist(), points.values.tolist())
            for (job, name), points in self._charts.items()
        ]
