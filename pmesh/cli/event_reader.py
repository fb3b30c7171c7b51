"""Reads each event of a home once, and says whether it is good news."""

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from pmesh.agent.events import Event, EventKind, EventPage, decode_events
from pmesh.client.control import ask_events

_BAD: frozenset[EventKind] = frozenset(
    {
        "internal error",
        "turned away",
        "key refused",
        "network loop",
        "peer lost",
        "rank lost",
        "trainer stopped",
        "job waits",
        "quorum lost",
        "superseded",
        "states differ",
        "op failed",
    }
)
_GOOD: frozenset[EventKind] = frozenset(
    {
        "peer joined",
        "job began",
        "job goes on",
        "rank entered",
        "trainer continued",
        "quorum regained",
    }
)
Mood: TypeAlias = Literal["good", "bad", ""]


def mood_of(kind: EventKind) -> Mood:
    """Say whether an event is good or bad news; empty if it is neither."""
    return "bad" if kind in _BAD else "good" if kind in _GOOD else ""


class Reader:
    """Reads each event of the agents of one home once."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._incarnation = ""
        self._after = -1

    def read(self) -> EventPage:
        """Return all new events.

        Raises:
            AgentNotRunning: Nobody listens at its socket.
            AgentStopped: The agent ended, or does not answer.
        """
        events: list[Event] = []
        while True:
            page = decode_events(ask_events(self._home, self._after))
            asked_another = page.incarnation != self._incarnation and self._after >= 0
            self._incarnation = page.incarnation
            if asked_another:  # a new agent counts from 0, so this page may lack its first events
                self._after = -1
                events.clear()
                continue
            events += page.events
            self._after = events[-1].number if events else self._after
            if self._after + 1 >= page.next:
                return msgspec.structs.replace(page, events=tuple(events))
