"""Measures a collective with one size at all ranks together, and lays out the table."""

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from pmesh.cli.bench_calls import Collective, Trial
from pmesh.cli.terminal import printable
from pmesh.client.mesh import Mesh

VALUE_BYTES = 4  # float32
WARM_CALLS = 2
LEAST_CALLS = 3  # a median of fewer says nothing
MOST_CALLS = 1000  # enough for a 99th percentile


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One collective, strategy and size."""

    collective: str
    strategy: str | None
    bytes: int
    calls: int
    min_s: float
    """The time of a call is that of its slowest rank."""
    median_s: float
    p99_s: float
    algorithm_bytes_per_s: float | None
    """Bytes divided by the median; null for a collective without bytes."""
    bus_bytes_per_s: float | None
    correct: bool
    """True if every result was right at every rank."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `pmesh bench --json` prints."""

    schema: int
    version: str
    names: tuple[str, ...]
    """The machine of each rank."""
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The rows to measure; all ranks must have the same plan."""

    sizes: tuple[int, ...]
    collectives: tuple[Collective, ...]
    strategies: tuple[str, ...]
    seconds: float

    def steps(self) -> Iterator[tuple[Collective, str, int]]:
        """Yield the rows in order, without strategies that a collective does not have."""
        for collective in self.collectives:
            for strategy in collective.strategies:
                if not strategy or strategy in self.strategies:
                    for size in self.sizes if collective.has_sizes else (0,):
                        yield collective, strategy, size

    def describe(self) -> str:
        """Return a text that is equal on two machines only if their plans are."""
        rows = [f"{c.name} {strategy} {size}" for c, strategy, size in self.steps()]
        return f"{self.seconds:g} s for each of {'; '.join(rows)}"


def measure_row(
    mesh: Mesh, collective: Collective, strategy: str, nbytes: int, *, seconds: float
) -> Row:
    """Repeat the call for about `seconds`, but at least `LEAST_CALLS` times.

    Raises:
        PmeshError: The collective failed.
    """
    trial = collective.prepare(mesh, nbytes // VALUE_BYTES, strategy)
    warm = _slowest(mesh, _time_calls(trial, WARM_CALLS)[0])
    times = min(MOST_CALLS, max(LEAST_CALLS, math.ceil(seconds / max(min(warm), 1e-9))))
    own, all_right = _time_calls(trial, times)
    wrong = mesh.all_reduce(np.array([not all_right]), "max")
    took = sorted(_slowest(mesh, own))
    median_s = statistics.median(took)
    speed = nbytes / median_s if nbytes else None
    return Row(
        collective=collective.name,
        strategy=strategy or None,
        bytes=nbytes,
        calls=times,
        min_s=took[0],
        median_s=median_s,
        p99_s=took[math.ceil(times * 0.99) - 1],
        algorithm_bytes_per_s=speed,
        bus_bytes_per_s=None if speed is None else speed * collective.bus_factor(mesh.size),
        correct=not wrong[0],
    )


def _time_calls(trial: Trial, times: int) -> tuple[list[float], bool]:
    seconds: list[float] = []
    all_right = True
    for _ in range(times):
        began = time.perf_counter()
        result = trial.call()
        seconds.append(time.perf_counter() - began)
        all_right = trial.is_right(result) and all_right
    return seconds, all_right


def _slowest(mesh: Mesh, seconds: list[float]) -> list[float]:
    """Return the time of each call at its slowest rank."""
    return [float(s) for s in mesh.all_reduce(np.array(seconds), "max")]


_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def bench_table(names: Sequence[str], rows: Iterable[Row]) -> Table:
    """One line for each row, at most 80 cells wide: the narrowest common terminal."""
    title = f"{len(names)} ranks: {printable(', '.join(names))}; bandwidth in MB/s"
    table = Table(
        title=title, title_justify="left", box=SIMPLE, show_edge=False, pad_edge=False, padding=0
    )
    table.add_column("collective")  # this column wraps if numbers are long
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
    """Format bytes in the largest unit that gives a whole number.

    >>> size_text(1 << 28), size_text(1536), size_text(100)
    ('256 MiB', '1536 B', '100 B')
    """
    for factor, unit in _UNITS:
        if nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def time_text(seconds: float) -> str:
    """Format a time with three digits, in the unit that fits.

    >>> time_text(0.0000123), time_text(0.5), time_text(75)
    ('12.3 µs', '500 ms', '75 s')
    """
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if round(seconds * factor) < 1000:  # noqa: PLR2004 - the next unit
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _speed_text(bytes_per_s: float | None) -> str:
    """Format a speed in MB/s with at least three digits."""
    if bytes_per_s is None:
        return ""
    speed = bytes_per_s / 1e6
    return f"{speed:,.0f}" if round(speed) >= 100 else f"{speed:.3g}"  # noqa: PLR2004 - digits
