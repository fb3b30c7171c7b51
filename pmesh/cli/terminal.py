"""Text out: to a person's terminal, so nothing that a stranger chose may steer it."""

import sys

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


def complain_of(error: PmeshError) -> None:
    """Print an error as its name and its message, which says what to do."""
    complain(f"{type(error).__name__}: {error}")
