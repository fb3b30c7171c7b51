"""`pmesh plot`: how a job has gone, or what `pmesh bench --json` has measured, as a picture."""

import math
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from pmesh.agent.home import reason
from pmesh.charts.rules.readings import OPS, STEPS
from pmesh.charts.wire import CHART_REPLIES, AskCharts, JobCharts
from pmesh.cli.bench import BenchReport, BenchRow
from pmesh.client.control import ask
from pmesh.errors import ConfigError, UsageError
from pmesh.home_paths import home_directory
from pmesh.ids import MAX_NAME, JobName
from pmesh.terminal.lines import complain, say
from pmesh.texts import printable

_UNUSUAL: Final = re.compile(r"[^\w.-]")


def write_plot(home: Path | None, what: str, output: Path | None) -> int:
    """Draw what `what` names, and say where the picture is.

    Args:
        home: Of the agent that knows the job; not needed for a file.
        what: A job, or a file whose name ends in `.json`.
        output: The picture.

    Raises:
        ConfigError: The picture can't be drawn or written, or `what` is neither of both.
        UsageError: The job is not known, or nothing of it.
        AgentNotRunning: Nobody listens at the socket of this home.
    """
    file = Path(what) if what.endswith(".json") else None
    name = what if file is None else file.stem
    path = output or Path(f"pmesh-plot-{_UNUSUAL.sub('_', name)}.png")
    _check_picture(path)
    if file is not None:
        report = _read_report(file)
        figure, drawn = draw_bench(report.names, report.rows), f"{len(report.rows)} rows of {what}"
    else:
        if not 0 < len(what) <= MAX_NAME or not what.isprintable():
            raise ConfigError(f"no job has the name {what!r}; 'pmesh status' shows those that run")
        request = AskCharts(JobName(what))
        known = ask(home_directory(home), request, JobCharts, replies=CHART_REPLIES)
        figure, drawn = draw_job(what, known), ", ".join(map(printable, known.charts))
        if not any(name not in {STEPS, OPS} for name in known.charts):
            complain(f"job {what!r} has reported no number: call mesh.report(loss=…) in each step")
    try:
        figure.savefig(path)
    except OSError as e:
        raise UsageError(
            f"can't write {path}: {reason(e)}; choose another file with --output"
        ) from e
    say(f"{path}: {drawn}")
    return 0


def _check_picture(path: Path) -> None:
    if find_spec("matplotlib") is None:
        raise ConfigError("pmesh plot needs matplotlib: pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase  # noqa: PLC0415 - an extra, and 0.3 s

    kinds = sorted(FigureCanvasBase.get_supported_filetypes().keys() - {"pgf"})  # it needs TeX
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise ConfigError(f"--output {path}: the file name must end in one of .{', .'.join(kinds)}")


def _read_report(path: Path) -> BenchReport:
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchReport)
    except OSError as e:
        raise ConfigError(
            f"can't read {path}: {reason(e)}; write it by 'pmesh bench --json > {path}'"
        ) from e
    except msgspec.MsgspecError as e:
        raise ConfigError(
            f"{path} is not what 'pmesh bench --json' prints: {printable(str(e))}"
        ) from e


def draw_job(job: str, known: JobCharts) -> Any:  # noqa: ANN401 - matplotlib's stubs are open
    """Return a figure with a chart for each number, over the minutes before now."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and 0.3 s

    count = len(known.charts)
    figure: Any = Figure(figsize=(9, 1 + 2 * count), layout="constrained")
    rows = figure.subplots(count, 1, sharex=True, squeeze=False)
    # What ranks report stands above the speed.
    order = sorted(known.charts, key=lambda name: name in {STEPS, OPS})
    for (axes,), name in zip(rows, order, strict=True):
        slots, values = with_gaps(*known.charts[name])
        minutes = [(slot - known.slot) * known.slot_s / 60 for slot in slots]
        axes.plot(minutes, values, marker="." if len(values) == 1 else "")
        axes.set_ylabel(printable(name))
        axes.grid(visible=True, alpha=0.3)
    rows[-1][0].set_xlabel("minutes from now")
    figure.suptitle(f"job {printable(job)}")
    return figure


def with_gaps(slots: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return both with a NaN where a number was unknown, so that no line is drawn there.

    >>> with_gaps([1, 2, 9], [0.5, 0.25, 0.125])
    ([1, 2, 3, 9], [0.5, 0.25, nan, 0.125])
    """
    places, found = list(slots[:1]), list(values[:1])
    for slot, value in zip(slots[1:], values[1:], strict=True):
        if slot > places[-1] + 1:
            places.append(places[-1] + 1)
            found.append(math.nan)
        places.append(slot)
        found.append(value)
    return places, found


def draw_bench(names: Sequence[str], rows: Sequence[BenchRow]) -> Any:  # noqa: ANN401 - as above
    """Return a figure of time and bandwidth over size, a line for each collective and strategy."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and 0.3 s

    lines: dict[str, list[BenchRow]] = {}
    for row in rows:
        if row.bytes:
            lines.setdefault(f"{row.collective} {row.strategy or ''}".strip(), []).append(row)
    figure: Any = Figure(figsize=(12, 5), layout="constrained")
    latency, bandwidth = figure.subplots(1, 2)
    for label, found in lines.items():
        sizes = [row.bytes for row in found]
        latency.plot(sizes, [row.median_s * 1e3 for row in found], marker=".", label=label)
        speeds = [(row.bus_bytes_per_s or 0.0) / 1e6 for row in found]
        bandwidth.plot(sizes, speeds, marker=".", label=label)
    for axes, what in ((latency, "median time, ms"), (bandwidth, "bus bandwidth, MB/s")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("bytes")
        axes.set_ylabel(what)
        axes.grid(visible=True, alpha=0.3)
    if lines:
        latency.legend(fontsize="small")
    figure.suptitle(f"pmesh bench: {len(names)} ranks, {printable(', '.join(names))}")
    return figure
