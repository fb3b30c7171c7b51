"""`pmesh bench`: how fast this mesh is, in the manner of nccl-tests."""

import contextlib
import math
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from rich.box import SIMPLE
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pmesh import native
from pmesh.agent.schema import Status, decode_status
from pmesh.cli.bench_calls import COLLECTIVES, STRATEGIES, Benchmark, CallTrial
from pmesh.client.connect import connect
from pmesh.client.control import ask_status
from pmesh.client.mesh import Mesh
from pmesh.errors import ConfigError, RankLost, RunError, UsageError
from pmesh.home_paths import home_directory
from pmesh.installed import installed_version
from pmesh.terminal.lines import complain, say_json
from pmesh.terminal.rows import Rows, output
from pmesh.terminal.sizes import parse_size
from pmesh.texts import printable

VALUE_BYTES = 4  # float32
WARM_CALLS = 2
LEAST_CALLS = 3  # a median of fewer says nothing
MOST_CALLS = 1000  # enough for a 99th percentile


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
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


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `pmesh bench --json` prints."""

    schema: int
    version: str
    names: tuple[str, ...]
    """The machine of each rank."""
    native: bool
    """True if the agent of the machine that prints this has its native library."""
    rows: tuple[BenchRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """The rows to measure; all ranks must have the same plan."""

    sizes: tuple[int, ...]
    collectives: tuple[Benchmark, ...]
    strategies: tuple[str, ...]
    seconds: float

    def steps(self) -> Iterator[tuple[Benchmark, str, int]]:
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
    mesh: Mesh, collective: Benchmark, strategy: str, nbytes: int, *, seconds: float
) -> BenchRow:
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
    return BenchRow(
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


def _time_calls(trial: CallTrial, times: int) -> tuple[list[float], bool]:
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


class BenchRows(Rows):
    """Columns of numbers, one cell apart, so that 80 cells hold them."""

    def table(self) -> Table:
        table = Table(
            title=self.title,
            title_justify="left",
            box=SIMPLE,
            show_edge=False,
            pad_edge=False,
            padding=0,
        )
        collective, *numbers, correct = self.headers
        table.add_column(collective)  # this column wraps if numbers are long
        for column, header in enumerate(numbers, 1):
            width = self.width(column)
            table.add_column(header, justify="right", no_wrap=True, min_width=width)
        table.add_column(correct, no_wrap=True, min_width=3)
        for row in self.rows:
            table.add_row(*row)
        return table


def bench_table(
    names: Sequence[str], rows: Iterable[BenchRow], *, without_native: str = ""
) -> BenchRows:
    """One line for each row where 80 cells are free, else one for each value.

    `without_native` says why rank 0's agent has no native library; empty if it has it.
    """
    return BenchRows(
        ("collective", "size", "calls", "min", "median", "p99", "alg.", "bus", "ok?"),
        [
            (
                f"{row.collective} {row.strategy or ''}",
                size_text(row.bytes) if row.bytes else "",
                str(row.calls),
                *(time_text(s) for s in (row.min_s, row.median_s, row.p99_s)),
                *map(_speed_text, (row.algorithm_bytes_per_s, row.bus_bytes_per_s)),
                Text("yes", "green") if row.correct else Text("NO", "bold red"),
            )
            for row in rows
        ],
        title=f"{len(names)} ranks: {printable(', '.join(names))}; bandwidth in MB/s\n"
        f"The agent of rank 0 works {native.describe(printable(without_native))}",
    )


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


JOB = "bench"
PATIENCE_S = 300.0  # the user starts it on one machine after another
SIZE_STEP = 4
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of the command line, not yet checked."""

    min_size: str
    max_size: str
    collectives: Sequence[str]
    strategies: Sequence[str]
    seconds: float
    wait_for: int | None
    as_json: bool


def run_bench(home: Path | None, options: BenchOptions) -> int:
    """Measure together with the other machines, and return the exit code."""
    plan = plan_of(options)
    directory = home_directory(home)
    status = decode_status(ask_status(directory))
    without_native = status.node.without_native or ""
    wait_for = _expected(status) if options.wait_for is None else options.wait_for
    with connect(JOB, wait_for, PATIENCE_S, directory) as mesh:
        check_alike(mesh, plan)
        show = mesh.rank == 0 and not options.as_json
        rows = _measure(mesh, plan, show=show, without_native=without_native)
        names = mesh.names
        if mesh.rank:
            complain(f"measured; rank 0, on {names[0]}, shows the table")
    if options.as_json:
        report = BenchReport(
            schema=SCHEMA_VERSION,
            version=installed_version(),
            names=names,
            native=not without_native,
            rows=tuple(rows),
        )
        say_json(msgspec.json.encode(report))
    if wrong := [row for row in rows if not row.correct]:
        what = ", ".join(dict.fromkeys(row.collective for row in wrong))
        raise RunError(f"{len(wrong)} of {len(rows)} rows had wrong results: {what}; report this")
    return 0


def _expected(status: Status) -> int:
    """Return the number of machines in the mesh, and print their names: the user must start each.

    Raises:
        UsageError: There is no other machine.
    """
    if len(status.view.members) == 1:
        raise UsageError(
            "this agent has met no other machine ('pmesh doctor' says why); to measure two "
            "trainers on this machine, run 'pmesh bench --wait-for 2' twice"
        )
    names = ", ".join(member.name for member in status.view.members)
    complain(f"waiting until 'pmesh bench' runs on {names}")
    return len(status.view.members)


def plan_of(options: BenchOptions) -> BenchPlan:
    """Check the options. Raises ConfigError for an invalid one."""
    known = {collective.name: collective for collective in COLLECTIVES}
    _check_names("--collective", options.collectives, known)
    _check_names("--strategy", options.strategies, STRATEGIES)
    if not 0 < options.seconds <= 3600:  # noqa: PLR2004 - an hour for one row
        raise ConfigError(f"--seconds must be over 0 and at most 3600, not {options.seconds:g}")
    smallest = parse_size("--min-size", options.min_size, least=VALUE_BYTES)
    largest = parse_size("--max-size", options.max_size, least=VALUE_BYTES)
    if smallest > largest:
        raise ConfigError(f"--min-size {options.min_size} is above --max-size {options.max_size}")
    return BenchPlan(
        sizes=tuple(_sizes(smallest, largest)),
        collectives=tuple(known[name] for name in options.collectives or known),
        strategies=tuple(options.strategies) or STRATEGIES,
        seconds=options.seconds,
    )


def check_alike(mesh: Mesh, plan: BenchPlan) -> None:
    """Raise UsageError at every rank if the ranks have different plans."""
    digest = zlib.crc32(plan.describe().encode())
    most, least = mesh.all_reduce(np.array([digest, -digest], np.int64), "max")
    if most != -least:
        raise UsageError(
            "the machines were given different sizes, collectives, strategies or seconds; "
            "give 'pmesh bench' the same options on all of them"
        )


def _measure(mesh: Mesh, plan: BenchPlan, *, show: bool, without_native: str) -> list[BenchRow]:
    rows: list[BenchRow] = []
    names = mesh.names
    console = output()

    def table() -> BenchRows:
        return bench_table(names, rows, without_native=without_native)

    live = Live(table(), console=console, auto_refresh=False)
    with live if show and console.is_terminal else contextlib.nullcontext():
        for collective, strategy, nbytes in plan.steps():
            try:
                row = measure_row(mesh, collective, strategy, nbytes, seconds=plan.seconds)
            except (MemoryError, OverflowError) as e:
                raise UsageError(
                    f"this machine has no memory for arrays of {size_text(nbytes)}; give a smaller "
                    "--max-size, the same on all machines"
                ) from e
            if mesh.names != names:
                lost = ", ".join((Counter(names) - Counter(mesh.names)).elements())
                raise RankLost(
                    f"{lost} is lost, so the results are not those of {len(names)} ranks; "
                    "run 'pmesh bench' on all machines again"
                )
            rows.append(row)
            live.update(table(), refresh=live.is_started)
    if show and not console.is_terminal:
        console.print(table())
    return rows


def _sizes(smallest: int, largest: int) -> Iterator[int]:
    size = smallest
    while size <= largest:
        yield size
        size *= SIZE_STEP


def _check_names(option: str, wanted: Sequence[str], known: Collection[str]) -> None:
    for name in wanted:
        if name not in known:
            raise ConfigError(f"{option} must be one of {', '.join(known)}, not {name!r}")
