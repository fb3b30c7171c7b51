"""Rows for a terminal of any width, and for a pipe: nothing is ever cut.

All commands get their console here: what others have written is no markup, and can't control it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pmesh.texts import printable

Cell: TypeAlias = str | Text

_UNBOUNDED_CELLS = 10_000  # the width of a pipe or a file
_SENTENCE_CELLS = 24  # a narrower column of text is hard to read


class Output(Console):
    """Takes no str for markup, as the name "[/bold] mac", and draws only what is printable."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield what is drawn; rich's own control codes are no text."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                lines = map(printable, segment.text.split("\n"))
                yield Segment("\n".join(lines), segment.style)


def output(*, stderr: bool = False) -> Console:
    """Return the console; into a pipe or a file it has no right margin."""
    console = Output(stderr=stderr)
    return console if console.is_terminal else Output(stderr=stderr, width=_UNBOUNDED_CELLS)


@dataclass(frozen=True, slots=True)
class Rows:
    """A table; where the terminal is too narrow for it, one line for each cell that is not empty.

    Only the last column is for sentences: it may wrap.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    compact: bool = False
    """True for no line but those of the headers and the rows."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self.table()
        unbounded = options.update(width=_UNBOUNDED_CELLS)
        fits = Measurement.get(console, unbounded, table).minimum <= options.max_width
        yield table if fits else self._stacked()

    def table(self) -> Table:
        """Return all of it side by side, each column as wide as its cells need."""
        table = self._empty_table()
        *names, sentence = self.headers
        for column, header in enumerate(names):
            # rich would take the longest word for what a column needs, and cut the others.
            table.add_column(header, no_wrap=True, min_width=self.width(column))
        longest = _widest(str(row[-1]) for row in self.rows)
        table.add_column(sentence, min_width=min(longest, _SENTENCE_CELLS))
        for row in self.rows:
            table.add_row(*map(_plain, row))
        return table

    def _empty_table(self) -> Table:
        if not self.compact:
            return Table(box=SIMPLE, title=self.title or None)
        return Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")

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
    """Return the text as it is, lines and all."""
    return cell if isinstance(cell, Text) else Text(cell)
