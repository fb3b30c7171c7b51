"""How launches are shown to a person."""

import shlex
from collections.abc import Sequence

from pmesh.agent.home import is_full

MAX_SHOWN = 500  # characters of a command


def described(words: Sequence[str]) -> str:
    r"""Return the beginning of a command, as one line of printable text.

    >>> described(["python", "-c", "print()\n"])
    "python -c 'print()\\n'"
    """
    text = shlex.join(word[:MAX_SHOWN] for word in words[:MAX_SHOWN])[: MAX_SHOWN + 1]
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def sentence(text: str) -> str:
    """Return a text as one line that a message has room for."""
    return "".join(c if c.isprintable() else " " for c in text)[:4096]


def full_disk(error: OSError) -> str:
    """Say that a machine's disk takes no output, and why."""
    cure = ", as it is full: free some space there" if is_full(error) else f": {error.strerror}"
    return (
        f"its disk takes no output{cure}; only the latest lines are kept, in memory, and the ranks "
        "go on"
    )
