"""The plot of `pmesh bench --plot FILE`: time and bus bandwidth over size."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pmesh.cli.bench_rows import Row
from pmesh.errors import ConfigError


def check_plot_file(path: Path) -> None:
    """Raise ConfigError before minutes of measuring if the plot can't be drawn or written."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'pmesh[bench]'")
    from matplotlib.backend_bases import FigureCanvasBase  # noqa: PLC0415 - an extra, and 0.3 s

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise ConfigError(f"--plot {path}: the file name must end in one of .{', .'.join(kinds)}")
    try:
        path.open("ab").close()
    except OSError as e:
        raise ConfigError(
            f"--plot {path} can't be written: {e.strerror}; name a file in a folder of your own"
        ) from e


def draw(path: Path, names: Sequence[str], rows: Sequence[Row]) -> None:
    """Write the plot, with a line for each collective and strategy."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and 0.3 s

    lines: dict[str, list[Row]] = {}
    for row in rows:
        if row.bytes:
            lines.setdefault(f"{row.collective} {row.strategy or ''}".strip(), []).append(row)
    # Any: matplotlib's stubs leave the types of most arguments open.
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
    latency.legend(fontsize="small")
    figure.suptitle(f"pmesh bench: {len(names)} ranks, {', '.join(names)}")
    figure.savefig(path)
