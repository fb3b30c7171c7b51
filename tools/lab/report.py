"""Bars, tables, and pages of the documentation that are made of stored results.

The text of a page lies beside it: `NAME.md.in`, with a field in braces for each thing measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PAGES = Path(__file__).parents[2] / "docs" / "explanation"

Outcome = Literal["met", "goal missed", "MISSED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarVerdict:
    """One bar, held against one measurement."""

    what: str
    bar: str
    value: str
    outcome: Outcome

    @property
    def shown(self) -> str:
        """The outcome for a page; what was not met stands out."""
        return self.outcome if self.outcome == "met" else f"**{self.outcome}**"


def at_least(
    what: str, value: float, *, goal: float, floor: float | None = None, form: str = "{:.2f}"
) -> BarVerdict:
    """A bar that is met from `goal` up, and kept from `floor` up."""
    reached = [limit is not None and value >= limit for limit in (goal, floor)]
    return _verdict(what, "≥", form, (value, goal, floor), reached)


def at_most(
    what: str, value: float, *, goal: float, floor: float | None = None, form: str = "{:.2f}"
) -> BarVerdict:
    """A bar that is met up to `goal`, and kept up to `floor`."""
    reached = [limit is not None and value <= limit for limit in (goal, floor)]
    return _verdict(what, "≤", form, (value, goal, floor), reached)


def _verdict(
    what: str,
    sign: str,
    form: str,
    numbers: tuple[float, float, float | None],
    reached: Sequence[bool],
) -> BarVerdict:
    value, goal, floor = numbers
    bar = f"{sign} {form.format(goal)}" + ("" if floor is None else f", floor {form.format(floor)}")
    outcome: Outcome = "met" if reached[0] else "goal missed" if reached[1] else "MISSED"
    return BarVerdict(what=what, bar=bar, value=form.format(value), outcome=outcome)


def count_met(verdicts: Sequence[BarVerdict]) -> str:
    """How many bars were met, in words."""
    outcomes = [verdict.outcome for verdict in verdicts]
    said = f"{outcomes.count('met')} of {len(outcomes)} bars met"
    if halfway := outcomes.count("goal missed"):
        said += f"; {halfway} more reach their floor, not their goal"
    if missed := outcomes.count("MISSED"):
        said += f"; {missed} missed"
    return f"{said}."


def not_measured(all_names: Iterable[str], measured: Iterable[str]) -> str:
    """A sentence that names what has no results; empty if there is none."""
    found = set(measured)
    missing = [name for name in all_names if name not in found]
    return f" Not measured: {', '.join(missing)}." if missing else ""


def table(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """A table; `columns` is its first line without the bars at the ends."""
    rule = "|" + "---|" * (columns.count("|") + 1)
    return "\n".join([f"| {columns} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def facts_text(facts: dict[str, float]) -> str:
    return "; ".join(f"{name}: {value:,.5g}" for name, value in facts.items())


def fill(page: str, **parts: str) -> str:
    return (PAGES / f"{page}.md.in").read_text(encoding="utf-8").format(**parts)
