"""`pmesh events`: prints past events and follows new ones."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import msgspec
from rich.text import Text

from pmesh.agent.events import Event, EventKind, EventPage, decode_events, encode_events
from pmesh.client.control import ask_events
from pmesh.errors import AgentNotRunning, AgentStopped
from pmesh.home_paths import home_directory
from pmesh.terminal.lines import complain, say_json
from pmesh.terminal.rows import Rows, output
from pmesh.texts import printable

POLL_INTERVAL_S = 0.5
_KIND_CELLS = max(map(len, get_args(EventKind)))

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


def show_events(home: Path | None, *, follow: bool, as_json: bool) -> int:
    """Print the events that the agent has kept; with `follow`, continue until Ctrl-C."""
    reader = Reader(home_directory(home))
    console = output()
    for page in _follow(reader) if follow else [reader.read()]:
        if as_json:
            say_json(encode_events(page))
        elif console.is_terminal and not follow:
            console.print(_table(page))
        else:
            for event in page.events:
                console.print(event_line(event), soft_wrap=True)
        sys.stdout.flush()
    return 0


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


def _follow(reader: Reader) -> Iterator[EventPage]:
    """Like `tail -F`, continue with the next agent when one ends."""
    yield reader.read()
    answers = True
    while True:
        time.sleep(POLL_INTERVAL_S)
        try:
            page = reader.read()
        except (AgentNotRunning, AgentStopped) as e:
            if answers:
                complain(f"{e}; waiting for the next agent")
            answers = False
            continue
        answers = True
        if page.events:
            yield page


def _table(page: EventPage) -> Rows:
    rows = [(_time(event), kind_text(event), Text(printable(event.text))) for event in page.events]
    return Rows(("time", "event", "what happened"), rows)


def event_line(event: Event) -> Text:
    """Return it as one line."""
    kind = kind_text(event)
    kind.pad_right(_KIND_CELLS - kind.cell_len)
    return Text.assemble(_time(event), "  ", kind, "  ", printable(event.text))


def _time(event: Event) -> Text:
    local = event.time.astimezone()
    return Text(f"{local:%Y-%m-%d %H:%M:%S}.{local.microsecond // 1000:03}", "dim")


def kind_text(event: Event) -> Text:
    return Text(event.kind, {"bad": "red", "good": "green", "": ""}[mood_of(event.kind)])
