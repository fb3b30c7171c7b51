"""Prints text; no text from another machine can control the terminal."""

import contextlib
import signal
import sys
from typing import TextIO, cast

from pmesh.errors import PmeshError


def printable(text: str) -> str:
    r"""Replace control characters, as names come from other machines.

    >>> printable("mac\x1b[2J")
    'mac�[2J'
    """
    return "".join(c if c.isprintable() else "�" for c in text)


def say(text: str) -> None:
    """Print lines to standard output without buffering, even to a pipe or a file."""
    sys.stdout.write("\n".join(printable(line) for line in text.split("\n")) + "\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """Print one line to standard error."""
    sys.stderr.write(printable(" ".join(text.split("\n"))) + "\n")
    sys.stderr.flush()


def announce(text: str) -> None:
    """Print as `say` does, or drop the lines: an agent outlives a full disk and a lost terminal."""
    with contextlib.suppress(OSError):
        say(text)


def dropping_lines(stream: TextIO) -> TextIO:
    """Wrap the stream of an agent's log; it drops lines that can't be written."""
    return cast("TextIO", _DroppingLines(stream))


class _DroppingLines:
    """The part of a stream that loggers use."""

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
    complain(f"{type(error).__name__}: {error}")


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a command; a closed terminal does too, except under `nohup`."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return tuple(s for s in signals if signal.getsignal(s) != signal.SIG_IGN)
