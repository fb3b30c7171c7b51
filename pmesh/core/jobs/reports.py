"""The plain numbers that a trainer reports of its step, such as its loss, for `pmesh status`."""

import math
import re
from collections.abc import Mapping
from numbers import Real
from typing import Literal, TypeAlias

from pmesh.core.values import MAX_REPORTS, REPORT_NAME
from pmesh.errors import UsageError

NotFinite: TypeAlias = Literal["nan", "inf", "-inf"]
"""In place of a number: JSON has no others than finite ones."""

_is_name = re.compile(REPORT_NAME).match


def merge_reports(known: Mapping[str, float], new: Mapping[str, object]) -> dict[str, float]:
    """Return the latest number by name, in the order in which the names were first reported.

    Args:
        known: what was reported before.
        new: what is reported now: numbers of Python or numpy. Others, as those of a GPU, would
            first have to be computed, for which a report must not wait.

    Raises:
        UsageError: a value is no plain number, a name can't be shown, or there are too many names.

    >>> merge_reports({"loss": 0.5, "accuracy": 0.75}, {"loss": float("nan")})
    {'loss': nan, 'accuracy': 0.75}
    """
    merged = dict(known)
    for name, value in new.items():
        if not isinstance(value, Real):
            raise UsageError(
                f"mesh.report takes plain numbers, and {name!r} is of type {type(value).__name__}: "
                f"pass {name}=float(…), or .item() of an array"
            )
        if not _is_name(name):
            raise UsageError(
                f"mesh.report can't show the name {name!r}: take 1 to 24 of the characters A-Z, "
                "a-z, 0-9, and _ . / -"
            )
        merged[name] = _float(value)
    if len(merged) > MAX_REPORTS:
        raise UsageError(
            f"mesh.report keeps at most {MAX_REPORTS} names, not {', '.join(merged)}: report fewer"
        )
    return merged


def _float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # of an integer beyond 1.8e308
        return -math.inf if value < 0 else math.inf


def shown_number(value: float) -> float | NotFinite:
    """Return a reported number as JSON can say it.

    >>> shown_number(0.5), shown_number(float("-inf"))
    (0.5, '-inf')
    """
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
