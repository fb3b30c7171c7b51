"""The picture: losses on the way, and how far the final ones are from uncompressed."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from tools.compare_compression.cases import CASES
from tools.compare_compression.results import BAR, Measured

_NAMES = [case.name for case in CASES]
_DIVERGED_AT = 10.0  # where a mark stands for what has no number


def draw(path: Path, measured: Sequence[Measured]) -> None:
    """A column for each model: the losses with feedback above, the final ratios below."""
    # Texts stay texts, and the same results make the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pmesh"}):
        figure: Any = Figure(figsize=(4.2 * len(measured) + 1.6, 8), layout="constrained")
        rows = figure.subplots(2, len(measured), squeeze=False)
        for column, one in enumerate(measured):
            _draw_curves(rows[0][column], one)
            _draw_ratios(rows[1][column], one, is_first=column == 0)
        # One for all: a model may have been measured with fewer schemes than another.
        found = {label: line for axes in rows[0] for line, label in _legend_of(axes)}
        figure.legend(
            found.values(), found.keys(), loc="outside upper center", ncols=5, fontsize="small"
        )
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata)


def _legend_of(axes: Any) -> list[tuple[Any, str]]:  # noqa: ANN401 - matplotlib's are open
    return list(zip(*axes.get_legend_handles_labels(), strict=True))


def _draw_curves(axes: Any, measured: Measured) -> None:  # noqa: ANN401 - matplotlib's are open
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


def _draw_ratios(axes: Any, measured: Measured, *, is_first: bool) -> None:  # noqa: ANN401
    for feedback, face, label in ((True, None, "with"), (False, "none", "without")):
        rows = [row for row in measured.rows if row.feedback is feedback]
        ratios = [min(_DIVERGED_AT, row.ratio_to(measured.plain)) for row in rows]
        places = [_NAMES.index(row.case) for row in rows]
        axes.scatter(
            ratios, places, label=f"{label} feedback", facecolors=face, edgecolors="tab:blue"
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.axvline(BAR, color="tab:red", linewidth=0.8, linestyle="--", label=f"bar: {BAR}")
    axes.set_yticks(range(len(_NAMES)), _NAMES if is_first else [""] * len(_NAMES))
    axes.set_ylim(len(_NAMES) - 0.5, -0.5)
    axes.set_xlabel("final loss / uncompressed")
    axes.grid(visible=True, axis="x", alpha=0.3)
    if is_first:
        axes.legend(fontsize="small")
