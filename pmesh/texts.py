"""Text that others may have written, fit for a terminal and for a log."""

import re
from typing import Final

_ESCAPES: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x80-\x9f]*(?:\x07|\x1b\\|\x9c)"  # OSC
    r"|\x1b[ -/]+[0-~]|\x1b[0-OQ-WYZ`-~]"  # character sets, resets
)
"""Whole escape sequences (ECMA-48, 5.3, 5.4 and 5.6); no one contains the beginning of another."""


def without_escapes(text: str) -> str:
    r"""Drop whole escape sequences, such as colours; what is left may still control a terminal.

    >>> without_escapes("\x1b[34m│\x1b[0m \x1b]8;;https://example.org\x07here\x1b]8;;\x07 \x1b[3")
    '│ here \x1b[3'
    """
    return _ESCAPES.sub("", text)


def printable(text: str) -> str:
    r"""Return one line that neither controls a terminal nor changes the direction of text.

    A line break becomes a space: a message of several lines could look like a line of ours, or of
    another machine.

    >>> printable("mac\x1b[2J\nmac-2 | done")
    'mac�[2J mac-2 | done'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c == "\n" else "�" for c in text)
