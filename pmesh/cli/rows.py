"""Rows for a terminal of any width, and for a pipe: nothing is ever cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

Cell: TypeAlias = str | Text

_UNBOUNDED_CELLS = 10_000  # the width of a pipe or a file
_SENTENCE_CELLS = 24  # a narrower column of text is hard to read


def output() -> Console:
    """Return the console of standard output; into a pipe or a file it has no right margin."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_UNBOUNDED_CELLS)


@dataclass(frozen=True, slots=True)
class Rows:
    """A table; where the terminal is too narrow for it, one line for each cell that is not empty.

    Only the last column is for sentences: it may wrap.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table()
        unbounded = options.update(width=_UNBOUNDED_CELLS)
        fits = Measurement.get(console, unbounded, table).minimum <= options.max_width
        yield table if fits else self._stacked()

    def _table(self) -> Table:
        table = Table(box=SIMPLE, title=self.title or None)
        *names, sentence = self.headers
        for header in names:
            table.add_column(header, no_wrap=True)
        longest = max((cell_len(str(row[-1])) for row in self.rows), default=0)
        table.add_column(sentence, min_width=min(longest, _SENTENCE_CELLS))
        for row in self.rows:
            table.add_row(*map(_plain, row))
        return table

    def _stacked(self) -> Table:
        """An address or a name that is still too long continues on the next line."""
        table = Table.grid("", "", padding=(0, 2))
        table.title = self.title or None
        table.columns[1].overflow = "fold"
        for row in self.rows:
            table.add_row("", "")
            for header, cell in zip(self.headers, row, strict=True):
                if str(cell):
                    table.add_row(Text(header, "dim"), _plain(cell))
        table.add_row("", "")
        return table


def _plain(cell: Cell) -> Text:
    """Return the text as it is: rich would take '[fd77::1]' in a str for markup."""
    return cell if isinstance(cell, Text) else Text(cell)
