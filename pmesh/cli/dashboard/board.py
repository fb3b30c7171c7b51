"""What the pages are sent: one thread puts updates up, and one for each page sends them on."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from pmesh.agent.events import EventPage
from pmesh.agent.schema import Status
from pmesh.charts.rules.history import SLOT_S, Chart, ChartHistory, ChartReading
from pmesh.cli.dashboard.picture import (
    ShownEvent,
    Update,
    line_of,
    picture_of,
    readings_of,
)
from pmesh.errors import PmeshError
from pmesh.texts import printable

WATCHED_S: Final = 1.0
AT_REST_S: Final = 3.0  # while there is no job: a status costs the agent a millisecond or two
UNWATCHED_S: Final = SLOT_S  # while no page is open, only the history needs a status
MOST_LINES: Final = 200


class Board:
    """The last update, and all that a page needs when it opens.

    Args:
        status: Asks the agent.
        events: Returns each event of the agent once.
        clock: Monotonic, in seconds.

    `status` and `events` raise PmeshError while no agent answers.
    """

    def __init__(
        self,
        status: Callable[[], Status],
        events: Callable[[], EventPage],
        clock: Callable[[], float],
    ) -> None:
        self._status, self._events, self._clock = status, events, clock
        self._history = ChartHistory()
        self._lines = deque[ShownEvent](maxlen=MOST_LINES)
        self._last = Update(whole=False, slot=0, gone=None, picture=None, charts=(), lines=())
        self._number = 0
        self._pages = 0
        self._changed = threading.Condition()  # of the last update, and how many pages are open

    def watch(self) -> None:
        """Ask the agent again and again, and when a page opens; often only while one is open."""
        while True:
            self.refresh()
            with self._changed:
                before = self._pages
                self._changed.wait_for(
                    lambda: self._pages > before,  # noqa: B023 - it is called here
                    self._pause_s(),
                )

    def _pause_s(self) -> float:
        if not self._pages:
            return UNWATCHED_S
        picture = self._last.picture
        return WATCHED_S if picture is not None and picture.jobs else AT_REST_S

    def refresh(self) -> None:
        """Ask the agent once, and put up an update."""
        readings: list[ChartReading] = []
        lines: list[ShownEvent] = []
        picture, gone = self._last.picture, None
        try:
            status = self._status()
            lines = [line_of(event) for event in self._events().events]
            picture, readings = picture_of(status), [*readings_of(status)]
        except PmeshError as e:
            gone = printable(str(e))
        slot = int(self._clock() // SLOT_S)
        with self._changed:
            self._history.note(slot, readings)
            self._lines += lines
            self._last = Update(
                whole=False,
                slot=slot,
                gone=gone,
                picture=picture,
                charts=[Chart(r.job, r.name, [slot], [r.value]) for r in readings],
                lines=lines,
            )
            self._number += 1
            self._changed.notify_all()

    def stream(self, write: Callable[[bytes], object]) -> None:
        """Write server-sent events, whole and then what changes, until `write` raises OSError.

        A page that was too slow for one update gets the next one whole.
        """
        sent = -1
        try:
            with self._changed:
                self._pages += 1
                self._changed.notify_all()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._number != sent)  # noqa: B023 - it is called here
                    is_next = sent == self._number - 1
                    update = self._last if is_next else self._whole()
                    sent = self._number
                write(b"data: %b\n\n" % msgspec.json.encode(update))
        finally:
            with self._changed:
                self._pages -= 1

    def _whole(self) -> Update:
        charts, lines = self._history.charts(), [*self._lines]
        return msgspec.structs.replace(self._last, whole=True, charts=charts, lines=lines)
