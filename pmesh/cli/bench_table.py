"""What `pmesh bench` has measured, as a person reads it."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from pmesh.cli.bench_rows import Row
from pmesh.cli.terminal import printable

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def bench_table(names: Sequence[str], rows: Iterable[Row]) -> Table:
    """One line for each row, of at most 80 cells, which is what a terminal has at least."""
    title = f"{len(names)} ranks: {printable(', '.join(names))}; bandwidth in MB/s"
    table = Table(
        title=title, title_justify="left", box=SIMPLE, show_edge=False, pad_edge=False, padding=0
    )
    table.add_column("collective")  # the one to wrap where numbers are long
    for head in ("size", "calls", "min", "median", "p99", "alg.", "bus"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("ok?", no_wrap=True, min_width=3)
    for row in rows:
        table.add_row(
            f"{row.collective} {row.strategy or ''}",
            size_text(row.bytes) if row.bytes else "",
            str(row.calls),
            *(time_text(s) for s in (row.min_s, row.median_s, row.p99_s)),
            *map(_speed_text, (row.algorithm_bytes_per_s, row.bus_bytes_per_s)),
            Text("yes", "green") if row.correct else Text("NO", "bold red"),
        )
    return table


def size_text(nbytes: int) -> str:
    """In the largest unit that it is a whole number of.

    >>> size_text(1 << 28), size_text(1536), size_text(100)
    ('256 MiB', '1536 B', '100 B')
    """
    for factor, unit in _UNITS:
        if nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def time_text(seconds: float) -> str:
    """With three digits, in the unit that fits.

    >>> time_text(0.0000123), time_text(0.5), time_text(75)
    ('12.3 µs', '500 ms', '75 s')
    """
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if round(seconds * factor) < 1000:  # noqa: PLR2004 - the next unit
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _speed_text(bytes_per_s: float | None) -> str:
    """Three digits at least, in MB/s."""
    if bytes_per_s is None:
        return ""
    speed = bytes_per_s / 1e6
    return f"{speed:,.0f}" if round(speed) >= 100 else f"{speed:.3g}"  # noqa: PLR2004 - digits
