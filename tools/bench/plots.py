"""The pictures of the pages; the same results make the same file."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from tools.bench import training
from tools.bench.cases import find_case
from tools.bench.compressed import UNCOMPRESSED, WAYS
from tools.bench.results import CaseResult, seconds_of

_LINKS = ("100mbit", "1gbit", "loopback")
_NAMES = [case.name for case in training.CASES]
_DIVERGED_AT = 10.0  # where a mark stands for what has no number


@contextlib.contextmanager
def _picture(path: Path, width: float, height: float) -> Iterator[Any]:
    """A figure that is written at the end; its texts stay texts."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pmesh"}):
        figure: Any = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_speeds(path: Path, measured: Sequence[CaseResult]) -> None:
    """A row of bars for each scheme, a colour for each link; those that were not measured lack."""
    found = {m.case: m for m in measured if m.case in _LINKS}
    links = [found[name] for name in _LINKS if name in found]
    names = list(dict.fromkeys(n for m in links for n in m.names if n in WAYS))
    names = [name for name in names if name != UNCOMPRESSED and not WAYS[name].allowed]
    with _picture(path, 8, 0.6 * len(names) + 1.4) as figure:
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


def draw_losses(path: Path, measured: Sequence[training.LossCurve]) -> None:
    """A column for each model: the losses with feedback above, the final ratios below."""
    with _picture(path, 4.2 * len(measured) + 1.6, 8) as figure:
        rows = figure.subplots(2, len(measured), squeeze=False)
        for column, one in enumerate(measured):
            _draw_curves(rows[0][column], one)
            _draw_ratios(rows[1][column], one, is_first=column == 0)
        # One for all: a model may have been measured with fewer schemes than another.
        found = {label: line for axes in rows[0] for line, label in _legend_of(axes)}
        figure.legend(
            found.values(), found.keys(), loc="outside upper center", ncols=5, fontsize="small"
        )


def _legend_of(axes: Any) -> list[tuple[Any, str]]:  # noqa: ANN401 - matplotlib's are open
    return list(zip(*axes.get_legend_handles_labels(), strict=True))


def _draw_curves(axes: Any, measured: training.LossCurve) -> None:  # noqa: ANN401 - matplotlib's are open
    fed = [row for row in measured.rows if row.feedback]
    for row in (measured.plain, *fed):
        points = len(row.curve)
        steps = [(i + 0.5) * measured.steps / points for i in range(points)]
        losses = [math.nan if loss is None else loss for loss in row.curve]
        color = "black" if row is measured.plain else f"C{_NAMES.index(row.case)}"
        axes.plot(steps, losses, label=row.case, color=color, linewidth=1)
    axes.set_title(measured.what, fontsize="small")
    axes.set_xlabel("step, with feedback")
    axes.set_ylabel("loss of the batches, nats")
    axes.set_yscale("log")


def _draw_ratios(axes: Any, measured: training.LossCurve, *, is_first: bool) -> None:  # noqa: ANN401
    for feedback, face, label in ((True, None, "with"), (False, "none", "without")):
        rows = [row for row in measured.rows if row.feedback is feedback]
        ratios = [min(_DIVERGED_AT, row.ratio_to(measured.plain)) for row in rows]
        places = [_NAMES.index(row.case) for row in rows]
        axes.scatter(
            ratios, places, label=f"{label} feedback", facecolors=face, edgecolors="tab:blue"
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.axvline(
        training.BAR, color="tab:red", linewidth=0.8, linestyle="--", label=f"bar: {training.BAR}"
    )
    axes.set_yticks(range(len(_NAMES)), _NAMES if is_first else [""] * len(_NAMES))
    axes.set_ylim(len(_NAMES) - 0.5, -0.5)
    axes.set_xlabel("final loss / uncompressed")
    axes.grid(visible=True, axis="x", alpha=0.3)
    if is_first:
        axes.legend(fontsize="small")
