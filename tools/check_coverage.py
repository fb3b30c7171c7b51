"""Holds the floors of coverage: all of what decides, nine tenths of what does.

Reads the data that the last `pytest --cov` left, branches included. The floor of a package is its
own: a well-tested core must not pay for an untested command line.
"""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import coverage

FLOOR_PERCENT = 90
# Pure code has no excuse: no machine, no clock and no other system stands between it and a test.
FULLY_COVERED = ("compression", "core", "errors", "ids")
PURE_PARTS = ("rules", "wire")  # of a feature


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """What of one file, or of several, was executed; a branch counts like a statement."""

    covered: int
    total: int
    missing: tuple[str, ...] = ()
    """`path: 3, 7->9` for each file with lines or branches that no test reached."""

    @property
    def percent(self) -> float:
        """100 for nothing to cover."""
        return 100 * self.covered / self.total if self.total else 100.0

    def __add__(self, other: "Covered") -> "Covered":
        return Covered(
            covered=self.covered + other.covered,
            total=self.total + other.total,
            missing=self.missing + other.missing,
        )


def package_of(path: str) -> str:
    """The package below pmesh, or a pure part of a feature; or another top-level package.

    >>> package_of("pmesh/net/links/acceptor.py"), package_of("pmesh/ids.py")
    ('net', 'ids')
    >>> package_of("pmesh/store/rules/table.py"), package_of("pmesh/store/client.py")
    ('store/rules', 'store')
    >>> package_of("simulation/cluster.py")
    'simulation'
    """
    top, below, *deeper = Path(path).with_suffix("").parts
    if top != "pmesh":
        return top
    return f"{below}/{deeper[0]}" if deeper and deeper[0] in PURE_PARTS else below


def floor_of(package: str) -> int:
    is_pure = package in FULLY_COVERED or package.endswith(PURE_PARTS)
    return 100 if is_pure else FLOOR_PERCENT


def by_package(files: Iterable[tuple[str, Covered]]) -> dict[str, Covered]:
    """The sums, in the order of the names."""
    sums: dict[str, Covered] = defaultdict(lambda: Covered(covered=0, total=0))
    for path, measured in files:
        sums[package_of(path)] += measured
    return dict(sorted(sums.items()))


def read_data() -> list[tuple[str, Covered]]:
    """What coverage.py has on each file; through its JSON, the only form that it documents."""
    data = coverage.Coverage()
    data.load()
    with tempfile.NamedTemporaryFile("r", suffix=".json", encoding="utf-8") as report:
        data.json_report(outfile=report.name)
        content = json.load(report)
    if not content["meta"]["branch_coverage"]:
        raise SystemExit("no coverage data with branches here: run 'make test-all'")
    measured: list[tuple[str, Covered]] = []
    for path, file in content["files"].items():
        summary = file["summary"]
        missing = [str(line) for line in file["missing_lines"]]
        missing += [f"{start}->{end}" for start, end in file["missing_branches"]]
        covered = Covered(
            covered=summary["covered_lines"] + summary["covered_branches"],
            total=summary["num_statements"] + summary["num_branches"],
            missing=(f"{path}: {', '.join(missing)}",) if missing else (),
        )
        measured.append((path, covered))
    return measured


def main() -> int:
    """Print a line for each package, what is missing below a floor; 1 if one is."""
    failed = False
    for package, measured in by_package(read_data()).items():
        below = measured.percent < floor_of(package)
        failed |= below
        verdict = f"BELOW its floor of {floor_of(package)} %" if below else ""
        # Cut, not rounded: 99.96 must not read as the 100 that it is not.
        print(f"coverage {package:12}{int(measured.percent * 10) / 10:6} %  {verdict}".rstrip())
        if below:
            print(*(f"    {line}" for line in measured.missing), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
