"""What was measured, as it lies in a file until the report is written."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tools.lab.units import percentile


class Figures(NamedTuple):
    """What a page prints of many measured times, in seconds."""

    tried: int
    median: float
    p95: float
    p99: float
    maximum: float


def figures_of(values: Sequence[float]) -> Figures | None:
    """None if nothing was measured."""
    if not values:
        return None
    p95, p99 = percentile(values, 95), percentile(values, 99)
    return Figures(len(values), statistics.median(values), p95, p99, max(values))


_COUNTED = frozenset({"took, s", "struck in the middle of an op", "ops meanwhile"})
"""Facts that add up; of the others the worst counts."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    fault: str
    command: str
    commit: str
    machine: str
    nodes: int
    op_bytes: int
    seed: int
    recovery_s: tuple[float, ...] = ()
    """For each episode, until the next correct op on all survivors."""
    clean_s: tuple[float, ...] = ()
    """Ops of the same run before the faults."""
    ops_checked: int = 0
    """Ops whose values and hash were compared, each trainer's counted."""
    violations: tuple[str, ...] = ()
    """Wrong sums, torn ops, hangs, errors, false expulsions: there must be none."""
    facts: dict[str, float] = {}
    """What else the bar asks for, by name."""

    def with_more(self, other: "Measured") -> "Measured":
        """Both parts of a campaign, which ran with different dice."""
        facts = {name: self._both(name, other) for name in self.facts | other.facts}
        return msgspec.structs.replace(
            self,
            command=f"{self.command}\n{other.command}",
            recovery_s=self.recovery_s + other.recovery_s,
            clean_s=self.clean_s + other.clean_s,
            ops_checked=self.ops_checked + other.ops_checked,
            violations=self.violations + other.violations,
            facts=facts,
        )

    def _both(self, name: str, other: "Measured") -> float:
        values = [facts[name] for facts in (self.facts, other.facts) if name in facts]
        is_count = name in _COUNTED or name.startswith("kills of ")
        return sum(values) if is_count else max(values)


class PageTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the page that another tool has measured."""

    title: str
    text: str
    command: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Results(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    measured: tuple[Measured, ...] = ()
    tables: tuple[PageTable, ...] = ()
