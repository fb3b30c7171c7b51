"""What `pmesh bench` has measured, as a table."""

import io
from typing import cast

from rich.console import Console

from pmesh.cli.bench import BenchRow, bench_table, time_text


def row(**more: object) -> BenchRow:
    known: dict[str, object] = {
        "collective": "all_reduce",
        "strategy": "ring",
        "bytes": 1 << 20,
        "calls": 12,
        "min_s": 0.001,
        "median_s": 0.002,
        "p99_s": 0.0123,
        "algorithm_bytes_per_s": 524_288_000.0,
        "bus_bytes_per_s": 786_432_000.0,
        "correct": True,
    }
    return BenchRow(**(known | more))  # type: ignore[arg-type]


def shown(*rows: BenchRow, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(bench_table(["mac-1", "ma\x1bc-2"], rows))
    return cast("io.StringIO", console.file).getvalue().splitlines()


def test_the_table_fits_a_terminal_and_names_what_is_wrong() -> None:
    barrier = row(
        collective="barrier",
        strategy=None,
        bytes=0,
        algorithm_bytes_per_s=None,
        bus_bytes_per_s=None,
        correct=False,
    )
    longest = row(strategy="hierarchical", bytes=256 << 20, calls=1000, median_s=0.01234)
    lines = shown(row(), longest, barrier)

    assert lines[0].rstrip() == "2 ranks: mac-1, ma�c-2; bandwidth in MB/s"
    cells = [" ".join(line.split()) for line in lines[-3:]]
    assert cells == [
        "all_reduce ring 1 MiB 12 1 ms 2 ms 12.3 ms 524 786 yes",
        "all_reduce hierarchical 256 MiB 1000 1 ms 12.3 ms 12.3 ms 524 786 yes",
        "barrier 12 1 ms 2 ms 12.3 ms NO",
    ]
    assert all("…" not in line and len(line) <= 80 for line in lines)


def test_a_narrow_terminal_has_a_line_for_each_value() -> None:
    times = {"min_s": 0.00359, "median_s": 0.00604, "p99_s": 0.0123}
    lines = shown(row(strategy="hierarchical", calls=1000, **times), row(**times), width=60)

    assert all("…" not in line and len(line) <= 60 for line in lines)
    cells = [" ".join(line.split()) for line in lines]
    assert cells.count("collective all_reduce hierarchical") == 1
    assert cells.count("median 6.04 ms") == cells.count("ok? yes") == 2


def test_times_never_show_a_thousand_of_a_unit() -> None:
    assert [time_text(s) for s in (0.0009996, 0.9996, 100.0)] == ["1 ms", "1 s", "100 s"]
