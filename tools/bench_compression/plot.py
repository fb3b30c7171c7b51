"""The picture: how many times as fast each scheme is on each link."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from tools.bench_compression.cases import find_case
from tools.bench_compression.results import Measured, seconds_of
from tools.bench_compression.schemes import UNCOMPRESSED, WAYS

_LINKS = ("100mbit", "1gbit", "loopback")


def draw(path: Path, measured: Sequence[Measured]) -> None:
    """A row of bars for each scheme, a colour for each link; those that were not measured lack."""
    found = {m.case: m for m in measured if m.case in _LINKS}
    links = [found[name] for name in _LINKS if name in found]
    names = list(dict.fromkeys(n for m in links for n in m.names if n in WAYS))
    names = [name for name in names if name != UNCOMPRESSED and not WAYS[name].allowed]
    # Texts stay texts, and the same results make the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pmesh"}):
        figure: Any = Figure(figsize=(8, 0.6 * len(names) + 1.4), layout="constrained")
        axes = figure.subplots()
        height = 0.8 / max(len(links), 1)
        for row, one in enumerate(links):
            ratios = [one.ratio(UNCOMPRESSED, name, seconds_of) or 0.0 for name in names]
            places = [i + (row - (len(links) - 1) / 2) * height for i in range(len(names))]
            bars = axes.barh(places, ratios, height=height, label=find_case(one.case).what)
            axes.bar_label(
                bars,
                [f"{ratio:.2g}" if ratio else "" for ratio in ratios],
                padding=3,
                fontsize="x-small",
            )
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlim(left=0.5)
        axes.set_yticks(range(len(names)), [WAYS[name].label for name in names])
        axes.invert_yaxis()
        axes.set_xlabel("times as fast as uncompressed: an all-reduce of 25 M values")
        axes.legend(fontsize="small")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
