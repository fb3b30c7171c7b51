"""The table, for a terminal and for docs/explanation/compression-training.md."""

import math
from collections.abc import Iterator, Sequence

from tools.compare_compression.results import Measured, Row

_HEAD = (
    "| scheme | with feedback | ratio | worst seed | without | ratio | worst seed | bar |",
    "|---|---|---|---|---|---|---|---|",
)


def table_of(measured: Measured) -> Iterator[str]:
    """One model's, with a row for each scheme."""
    yield from _HEAD
    yield f"| uncompressed | {measured.plain.mean:.4f} | | | | | | |"
    found = {(row.case, row.feedback): row for row in measured.rows}
    for case in dict.fromkeys(row.case for row in measured.rows):
        fed, bare = found[case, True], found[case, False]
        cells = [case, *_cells(fed, measured.plain), *_cells(bare, measured.plain)]
        yield f"| {' | '.join([*cells, verdict_of(fed, measured.plain)])} |"


def verdict_of(row: Row, plain: Row) -> str:
    """What the bar says of a scheme with feedback."""
    if not row.is_judged:
        return "beside"
    return "met" if row.is_met(plain) else "**MISSED**"


def verdicts(measured: Sequence[Measured]) -> str:
    """How many bars were met, and which were not."""
    judged = [(m, row) for m in measured for row in m.rows if row.feedback and row.is_judged]
    missed = [f"{row.case} on {m.model}" for m, row in judged if not row.is_met(m.plain)]
    said = f"{len(judged) - len(missed)} of {len(judged)} bars met."
    return f"{said} Missed: {', '.join(missed)}." if missed else said


def _cells(row: Row, plain: Row) -> Iterator[str]:
    yield _text(row.mean)
    yield _text(row.ratio_to(plain))
    yield _text(row.worst_ratio_to(plain))


def _text(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "diverged"
