"""Prints how long files and functions are, per folder; fails if a file is beyond reading.

A file that exceeds the ceiling has more than one subject. The other figures show a drift in review.

Run: python tools/check_sizes.py [FOLDER...]
"""

import ast
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("pmesh", "simulation", "tests", "tools", "examples")
FILE_CEILING = 600  # lines; ask yourself at 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lengths in lines, of one folder."""

    files: dict[Path, int]
    functions: dict[str, int]
    """By `path:line name`; from `def` to the last line, docstring included."""

    @property
    def too_long(self) -> list[Path]:
        """The files above the ceiling, longest first."""
        files = sorted(self.files, key=lambda path: -self.files[path])
        return [path for path in files if self.files[path] > FILE_CEILING]


def measure(folder: Path) -> Sizes:
    """All Python files below `folder`, but for empty ones, which would flatter the median."""
    files: dict[Path, int] = {}
    functions: dict[str, int] = {}
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if source.strip():
            files[path] = source.count("\n")
            functions |= {f"{path}:{node.lineno} {node.name}": n for node, n in _functions(source)}
    return Sizes(files=files, functions=functions)


def _functions(source: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, (node.end_lineno or node.lineno) - node.lineno + 1


def percentile_95(lengths: Sequence[int]) -> int:
    """The length that 95 % of them do not exceed (nearest rank).

    >>> percentile_95(range(1, 101))
    95
    """
    return sorted(lengths)[max(0, -(-len(lengths) * 95 // 100) - 1)]


def summary(folder: str, sizes: Sizes) -> str:
    """One line of the table."""
    files, functions = list(sizes.files.values()), list(sizes.functions.values()) or [0]
    return (
        f"{folder:10}{len(files):6}{statistics.median(files):10.0f}{percentile_95(files):6}"
        f"{max(files):6}{len(functions):12}{statistics.median(functions):8.0f}"
        f"{percentile_95(functions):6}{max(functions):6}"
    )


def main(folders: Sequence[str]) -> int:
    """Print the table; 1 if a file is too long."""
    measured = {folder: measure(Path(folder)) for folder in folders}
    print(f"{'lines':10}{'files':>6}{'median':>10}{'95 %':>6}{'max':>6}", end="")
    print(f"{'functions':>12}{'median':>8}{'95 %':>6}{'max':>6}")
    for folder, sizes in measured.items():
        if sizes.files:
            print(summary(folder, sizes))
    too_long = {path: sizes.files[path] for sizes in measured.values() for path in sizes.too_long}
    for path, lines in too_long.items():
        print(f"{path}: {lines} lines; more than {FILE_CEILING} hold more than one subject")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or FOLDERS))
