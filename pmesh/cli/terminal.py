"""Text out: to a person's terminal, so nothing that a stranger chose may steer it."""

import contextlib
import signal
import sys
from typing import TextIO, cast

from pmesh.errors import PmeshError


def printable(text: str) -> str:
    r"""The text without what a terminal would obey; names come from other machines.

    >>> printable("mac\x1b[2J")
    'mac�[2J'
    """
    return "".join(c if c.isprintable() else "�" for c in text)


def say(text: str) -> None:
    """Print lines to standard output, at once, also where it is a pipe or a file."""
    sys.stdout.write("\n".join(printable(line) for line in text.split("\n")) + "\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """Print one line to standard error."""
    sys.stderr.write(printable(" ".join(text.split("\n"))) + "\n")
    sys.stderr.flush()


def announce(text: str) -> None:
    """Print lines as `say` does, or drop them.

    An agent outlives a full disk under its output, and a terminal or a reader that has gone.
    """
    with contextlib.suppress(OSError):
        say(text)


def dropping_lines(stream: TextIO) -> TextIO:
    """The stream for an agent's log; what can't be written is dropped, as by `announce`."""
    return cast("TextIO", _DroppingLines(stream))


class _DroppingLines:
    """What loggers use of a stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.isatty = stream.isatty

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def complain_of(error: PmeshError) -> None:
    """Print an error as its name and its message, which says what to do."""
    complain(f"{type(error).__name__}: {error}")


def ending_signals() -> tuple[signal.Signals, ...]:
    """A closed terminal is an end too, unless `nohup` says otherwise."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return tuple(s for s in signals if signal.getsignal(s) != signal.SIG_IGN)
