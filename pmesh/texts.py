"""Text that others may have written, fit for a terminal and for a log."""


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
