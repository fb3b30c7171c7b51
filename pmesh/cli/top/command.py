"""`pmesh top`: reads the status and the events again and again, and shows them until `q`."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pmesh.agent.events import Event
from pmesh.agent.schema import decode_status
from pmesh.cli.event_reader import Reader
from pmesh.cli.top.history import Losses
from pmesh.cli.top.screen import Shown, lines_of
from pmesh.client.control import ask_status
from pmesh.errors import AgentNotRunning, AgentStopped
from pmesh.home_paths import home_directory
from pmesh.terminal.rows import output

LOOK_S: Final = 0.5  # within which a terminal of another size gets another screen
TRAINING_LOOKS: Final = 2  # a second: as often as a person reads a number
LOOKS_AT_REST: Final = 6  # a screen takes some milliseconds of a processor, and little happens
MOST_EVENTS: Final = 200  # more lines than a terminal has
_END_KEYS: Final = b"qQ\x03\x04"  # Ctrl-C and Ctrl-D too, where the terminal sends no signal


class Feed:
    """Reads what the agent of a home says, and keeps what it said before."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._reader = Reader(home)
        self._losses = Losses()
        self._events = deque[Event](maxlen=MOST_EVENTS)
        self._seen: Shown | None = None

    def read(self) -> Shown:
        """Return what is so now; what was so before, and why, if the agent has ended since.

        Raises:
            AgentNotRunning: Nobody listens at its socket, and nobody has before.
            AgentStopped: The agent does not answer, and has not before.
        """
        try:
            status = decode_status(ask_status(self._home))
            self._events.extend(self._reader.read().events)
        except (AgentNotRunning, AgentStopped) as e:
            if self._seen is None:
                raise
            what = "has ended" if isinstance(e, AgentNotRunning) else "does not answer"
            self._seen = replace(
                self._seen, trouble=f"the agent {what}; it was last seen like this"
            )
        else:
            self._losses.note(status.jobs)
            self._seen = Shown(status=status, losses=self._losses, events=tuple(self._events))
        return self._seen


def show_top(home: Path | None) -> int:
    """Show the mesh until `q` or Ctrl-C; without a terminal once."""
    feed, console = Feed(home_directory(home)), output()
    first = feed.read()
    if not console.is_terminal or console.is_dumb_terminal:
        console.print(_picture(first, console, height=None))
        return 0
    with contextlib.suppress(KeyboardInterrupt), _keys() as key_within:
        _show(feed, first, console, key_within)
    return 0


def _show(
    feed: Feed, seen: Shown, console: Console, key_within: Callable[[float], bytes | None]
) -> None:
    with Live(console=console, auto_refresh=False, screen=True) as live:
        for beat in count():
            trains = any(job.state == "running" for job in seen.status.jobs)
            size, light = console.size, beat if trains else None
            live.update(_picture(seen, console, height=size.height, beat=light), refresh=True)
            for _ in range(TRAINING_LOOKS if trains else LOOKS_AT_REST):
                keys = key_within(LOOK_S)
                if keys is not None and (not keys or set(keys) & set(_END_KEYS)):
                    return
                if console.size != size:
                    break
            seen = feed.read()


def _picture(seen: Shown, console: Console, *, height: int | None, beat: int | None = None) -> Text:
    lines = lines_of(seen, width=console.width, height=height, beat=beat)
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


@contextlib.contextmanager
def _keys() -> Generator[Callable[[float], bytes | None]]:
    """Let the terminal send each key at once, and not show it.

    Yields a function that returns the keys which come within so many seconds: None if there are
    none, and no bytes if the terminal is gone.
    """
    if not sys.stdin.isatty():
        yield _no_key_within
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield partial(_key_within, descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_key_within(timeout_s: float) -> None:
    time.sleep(timeout_s)


def _key_within(descriptor: int, timeout_s: float) -> bytes | None:
    ready, _, _ = select.select([descriptor], [], [], timeout_s)
    if not ready:
        return None
    try:
        return os.read(descriptor, 64)
    except OSError:  # the terminal has been closed
        return b""
