"""`pmesh bench`: how fast this mesh is, in the manner of nccl-tests."""

import re
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.live import Live

from pmesh.agent.status.schema import decode_status
from pmesh.cli.bench_calls import COLLECTIVES, STRATEGIES
from pmesh.cli.bench_plot import check_plot_file, draw
from pmesh.cli.bench_rows import VALUE_BYTES, Plan, Report, Row, bench_table, measure_row
from pmesh.cli.terminal import complain
from pmesh.client.connect import connect
from pmesh.client.control import ask_status
from pmesh.client.mesh import Mesh
from pmesh.errors import ConfigError, RankLost, RunError, UsageError
from pmesh.paths import home_directory, socket_path

JOB = "bench"
PATIENCE_S = 300.0  # the user starts it on one machine after another
SIZE_STEP = 4
SCHEMA_VERSION = 1
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+) *([KMG]?)(?:i?B)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The options of the command line, not yet checked."""

    min_size: str
    max_size: str
    collectives: Sequence[str]
    strategies: Sequence[str]
    seconds: float
    wait_for: int | None
    as_json: bool
    plot: Path | None


def run_bench(home: Path | None, wishes: Wishes) -> int:
    """Measure together with the other machines, and return the exit code."""
    plan = plan_of(wishes)
    if wishes.plot is not None:
        check_plot_file(wishes.plot)
    directory = home_directory(home)
    wait_for = _expected(directory) if wishes.wait_for is None else wishes.wait_for
    with connect(JOB, wait_for, PATIENCE_S, directory) as mesh:
        check_alike(mesh, plan)
        rows = _measure(mesh, plan, show=mesh.rank == 0 and not wishes.as_json)
        names = mesh.names
        if mesh.rank:
            complain(f"measured; rank 0, on {names[0]}, shows the table")
    if wishes.as_json:
        version = installed_version("pmesh")
        report = Report(schema=SCHEMA_VERSION, version=version, names=names, rows=tuple(rows))
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        sys.stdout.flush()
    if wishes.plot is not None:
        draw(wishes.plot, names, rows)
    if wrong := [row for row in rows if not row.correct]:
        what = ", ".join(dict.fromkeys(row.collective for row in wrong))
        raise RunError(f"{len(wrong)} of {len(rows)} rows had wrong results: {what}; report this")
    return 0


def _expected(directory: Path) -> int:
    """Return the number of machines in the mesh, and print their names: the user must start each.

    Raises:
        UsageError: There is no other machine.
    """
    view = decode_status(ask_status(socket_path(directory))).view
    if len(view.members) == 1:
        raise UsageError(
            "this agent has met no other machine ('pmesh status' says why); to measure two "
            "trainers on this machine, run 'pmesh bench --wait-for 2' twice"
        )
    names = ", ".join(member.name for member in view.members)
    complain(f"waiting until 'pmesh bench' runs on {names}")
    return len(view.members)


def plan_of(wishes: Wishes) -> Plan:
    """Check the wishes. Raises ConfigError for an invalid one."""
    known = {collective.name: collective for collective in COLLECTIVES}
    _check_names("--collective", wishes.collectives, known)
    _check_names("--strategy", wishes.strategies, STRATEGIES)
    if not 0 < wishes.seconds <= 3600:  # noqa: PLR2004 - an hour for one row
        raise ConfigError(f"--seconds must be over 0 and at most 3600, not {wishes.seconds:g}")
    smallest = parse_size("--min-size", wishes.min_size)
    largest = parse_size("--max-size", wishes.max_size)
    if smallest > largest:
        raise ConfigError(f"--min-size {wishes.min_size} is above --max-size {wishes.max_size}")
    return Plan(
        sizes=tuple(_sizes(smallest, largest)),
        collectives=tuple(known[name] for name in wishes.collectives or known),
        strategies=tuple(wishes.strategies) or STRATEGIES,
        seconds=wishes.seconds,
    )


def parse_size(option: str, text: str) -> int:
    """Parse a number of bytes.

    >>> parse_size("--min-size", "1KiB"), parse_size("--min-size", "3m"), parse_size("", "100")
    (1024, 3145728, 100)

    Raises:
        ConfigError: The text is not a size, or the size is below that of one value.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(found[1]) * _FACTORS[found[2].upper()] if found else 0
    if size < VALUE_BYTES:
        raise ConfigError(
            f"{option} must be a number of bytes, at least {VALUE_BYTES}, such as 4096, 64KiB or "
            f"16MiB, not {text!r}"
        )
    return size


def check_alike(mesh: Mesh, plan: Plan) -> None:
    """Raise UsageError at every rank if the ranks have different plans."""
    digest = zlib.crc32(plan.describe().encode())
    most, least = mesh.all_reduce(np.array([digest, -digest], np.int64), "max")
    if most != -least:
        raise UsageError(
            "the machines were given different sizes, collectives, strategies or seconds; "
            "give 'pmesh bench' the same options on all of them"
        )


def _measure(mesh: Mesh, plan: Plan, *, show: bool) -> list[Row]:
    rows: list[Row] = []
    names = mesh.names
    console = Console(highlight=False, quiet=not show)
    with Live(bench_table(names, rows), console=console, auto_refresh=False) as live:
        for collective, strategy, nbytes in plan.steps():
            row = measure_row(mesh, collective, strategy, nbytes, seconds=plan.seconds)
            if mesh.names != names:
                lost = ", ".join((Counter(names) - Counter(mesh.names)).elements())
                raise RankLost(
                    f"{lost} is lost, so the results are not those of {len(names)} ranks; "
                    "run 'pmesh bench' on all machines again"
                )
            rows.append(row)
            live.update(bench_table(names, rows), refresh=True)
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
