"""`pmesh events`: prints past events and follows new ones."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from rich.text import Text

from pmesh.agent.events import Event, EventKind, EventPage, encode_events
from pmesh.cli.event_reader import Reader, mood_of
from pmesh.errors import AgentNotRunning, AgentStopped
from pmesh.home_paths import home_directory
from pmesh.terminal.lines import complain, say_json
from pmesh.terminal.rows import Rows, output
from pmesh.texts import printable

POLL_INTERVAL_S = 0.5
_KIND_CELLS = max(map(len, get_args(EventKind)))


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
