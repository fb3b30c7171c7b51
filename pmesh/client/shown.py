"""How a mesh and a group look in a notebook, with names that other machines have chosen."""

from collections.abc import Sequence
from html import escape

from pmesh.texts import printable

MOST_NAMES = 8  # in a line


def names_line(names: Sequence[str]) -> str:
    """Return the names of machines in one line, the first few of many.

    >>> names_line(["mac-1", "mac-2"]), names_line(["mac"] * 20)[-12:]
    ('mac-1, mac-2', 'mac, 12 more')
    """
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return ", ".join([*map(printable, names[:MOST_NAMES]), *more])


def ranks_table(title: str, names: Sequence[str], own: int) -> str:
    """Return HTML: a table of the ranks and their machines, in which our own rank is bold."""
    rows = "".join(
        _row("td", f"<b>{rank}</b>", f"<b>{name}</b>") if rank == own else _row("td", rank, name)
        for rank, name in enumerate(map(escape, map(printable, names)))
    )
    caption = f"<caption>{escape(printable(title))}</caption>"
    return f"<table>{caption}{_row('th', 'rank', 'machine')}{rows}</table>"


def _row(tag: str, *cells: object) -> str:
    inside = "".join(f"<{tag}>{cell}</{tag}>" for cell in cells)
    return f"<tr>{inside}</tr>"
