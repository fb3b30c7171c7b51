"""What was measured, as it lies in a file until the report is written."""

import math
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a page prints of many measured times, in seconds."""

    count: int
    median: float
    p95: float
    p99: float
    maximum: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that `percent` % of them do not exceed (nearest rank).

    >>> percentile([4, 1, 3, 2], 75)
    3
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def figures_of(values: Sequence[float]) -> Figures | None:
    """None if nothing was measured."""
    if not values:
        return None
    return Figures(
        count=len(values),
        median=statistics.median(values),
        p95=percentile(values, 95),
        p99=percentile(values, 99),
        maximum=max(values),
    )


_COUNTED = frozenset({"took, s", "struck in the middle of an op", "ops meanwhile"})
"""Facts that add up; of the others the worst counts."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault, as often as it was tried in one run."""

    fault: str
    command: str
    """Repeats it."""
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
    notes: tuple[str, ...] = ()

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
        return sum(values) if name in _COUNTED else max(values)


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the page that another tool has measured."""

    title: str
    text: str
    command: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Results(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file."""

    measured: tuple[Measured, ...] = ()
    tables: tuple[Table, ...] = ()


def write_results(path: Path, results: Results) -> None:
    """As JSON that a person can read and a diff shows."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read_results(path: Path) -> Results:
    """The reverse; raises msgspec.ValidationError for anything else."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def describe_machine() -> str:
    """Where it was measured."""
    system = f"{platform.system()} {platform.release()}"
    return f"{os.cpu_count()} cores, {system}, Python {platform.python_version()}"


def describe_commit() -> str:
    """What was measured; `+` if the tree had changes that are not committed."""
    command = ["git", "describe", "--always", "--dirty=+"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
