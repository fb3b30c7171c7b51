"""Rows for a terminal of any width, and for a pipe: nothing is ever cut."""

from collections.abc import Iterable, Sequence
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
        table = self.table()
        unbounded = options.update(width=_UNBOUNDED_CELLS)
        fits = Measurement.get(console, unbounded, table).minimum <= options.max_width
        yield table if fits else self._stacked()

    def table(self) -> Table:
        """Return all of it side by side, each column as wide as its cells need."""
        table = Table(box=SIMPLE, title=self.title or None)
        *names, sentence = self.headers
        for column, header in enumerate(names):
            # rich would take the longest word for what a column needs, and cut the others.
            table.add_column(header, no_wrap=True, min_width=self.width(column))
        longest = _widest(str(row[-1]) for row in self.rows)
        table.add_column(sentence, min_width=min(longest, _SENTENCE_CELLS))
        for row in self.rows:
            table.add_row(*map(_plain, row))
        return table

    def width(self, column: int) -> int:
        """Return the cells that the header and the rows of a column need."""
        return _widest((self.headers[column], *(str(row[column]) for row in self.rows)))

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


def _widest(cells: Iterable[str]) -> int:
    return max((cell_len(line) for cell in cells for line in cell.splitlines()), default=0)


def _plain(cell: Cell) -> Text:
    """Return the text as it is: rich would take '[fd77::1]' in a str for markup."""
    return cell if isinstance(cell, Text) else Text(cell)
