"""Prints lines: none that another machine has written can control the terminal, or begin a line.

`pmesh.terminal.rows` does the same for tables; tests find every other way to print.
"""

import contextlib
import json
import signal
import sys
from collections.abc import Callable
from typing import TextIO, cast

from pmesh.errors import PmeshError
from pmesh.texts import printable


def say(*lines: str) -> None:
    """Print each line to standard output without buffering, even to a pipe or a file."""
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
    sys.stdout.flush()


def say_json(data: bytes) -> None:
    r"""Print JSON of one line; what a terminal would obey is escaped, as in "\u009b"."""
    text = data.decode()
    sys.stdout.write("".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text) + "\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """Print one line to standard error."""
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()


def announce(text: str) -> None:
    """Print as `say` does, or drop the line: an agent outlives a full disk and a lost terminal."""
    with contextlib.suppress(OSError):
        say(text)


def dropping_lines(stream: TextIO, written: Callable[[], None] = lambda: None) -> TextIO:
    """Wrap the stream of an agent's log; it drops lines that can't be written.

    `written` is called after each; an OSError of its own is ignored, too.
    """
    return cast("TextIO", _DroppingLines(stream, written))


class _DroppingLines:
    """The part of a stream that loggers use."""

    def __init__(self, stream: TextIO, written: Callable[[], None]) -> None:
        self._stream = stream
        self._written = written
        self.isatty = stream.isatty

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._written()
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def complain_of(error: PmeshError) -> None:
    complain(f"{type(error).__name__}: {error}")


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a command; a closed terminal does too, except under `nohup`."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return tuple(s for s in signals if signal.getsignal(s) != signal.SIG_IGN)
