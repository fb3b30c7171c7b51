"""The table, for a terminal and for docs/explanation/compression-training.md."""

import math
from collections.abc import Iterator, Sequence

from tools.compare_compression.cases import CASES
from tools.compare_compression.results import Measured, Row

_HEAD = (
    "| scheme | with feedback | ratio | worst seed | without | ratio | bar |",
    "|---|---|---|---|---|---|---|",
)
_NOTHING = "-"


def table_of(measured: Measured) -> Iterator[str]:
    """One model's, with a row for each scheme."""
    yield from _HEAD
    cells = [_text(measured.plain.mean), *[_NOTHING] * 5]
    yield f"| uncompressed | {' | '.join(cells)} |"
    for case in CASES:
        fed = measured.found(case.name, feedback=True)
        bare = measured.found(case.name, feedback=False)
        if fed is None and bare is None:
            continue
        cells = [
            *_cells(fed, measured.plain),
            *_cells(bare, measured.plain)[:2],
            _NOTHING if fed is None else verdict_of(fed, measured.plain),
        ]
        yield f"| {case.name} | {' | '.join(cells)} |"


def verdict_of(row: Row, plain: Row) -> str:
    """What the bar says of a scheme with feedback."""
    if not row.is_judged:
        return "beside"
    return "met" if row.is_met(plain) else "**MISSED**"


def verdicts(measured: Sequence[Measured]) -> str:
    """How many bars were met, which were not, and what was not measured."""
    judged = [(m, row) for m in measured for row in m.rows if row.feedback and row.is_judged]
    missed = [f"{row.case} on {m.model}" for m, row in judged if not row.is_met(m.plain)]
    judged_cases = [case for case in CASES if case.is_judged]
    unmeasured = [
        f"{case.name} on {m.model}"
        for m in measured
        for case in judged_cases
        if m.found(case.name, feedback=True) is None
    ]
    said = f"{len(judged) - len(missed)} of {len(judged)} bars met."
    if missed:
        said += f" Missed: {', '.join(missed)}."
    if unmeasured:
        said += f" Not measured: {', '.join(unmeasured)}."
    if any(m.found(case.name, feedback=False) is None for m in measured for case in judged_cases):
        said += " Without feedback not all was measured: a dash stands for that."
    return said


def _cells(row: Row | None, plain: Row) -> list[str]:
    if row is None:
        return [_NOTHING] * 3
    return [_text(x) for x in (row.mean, row.ratio_to(plain), row.worst_ratio_to(plain))]


def _text(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "diverged"
