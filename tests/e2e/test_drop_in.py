"""The drop-in beside MLX's own ring, in real processes: the same results, or a row of the table."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, read, sections, table_rows
from tests.e2e.harness import TIMEOUT_S, Fleet, StartedAgent

pytest.importorskip("mlx.core")

from tests.e2e.mlx_cases import CASES
from tests.e2e.mlx_ring import run_over_mlxs_ring

pytestmark = pytest.mark.slow

RANKS = 3
DIFFERENT = {
    "all_max complex64": "`all_max`, `all_min` of complex64",
    "all_min complex64": "`all_max`, `all_min` of complex64",
    "vmap all_sum": "`mx.vmap`",
    "vjp sum_scatter": "`sum_scatter` in `mx.grad` and `mx.jvp`",
}
"""Cases that are not as in MLX, with their row in the table of docs/how-to/mlx-programs.md."""


def results_in(output: str) -> dict[str, Any]:
    (line,) = (line for line in output.splitlines() if line.startswith(CASES))
    found: dict[str, Any] = json.loads(line.removeprefix(CASES))
    return found


def of_mlx(folder: Path) -> list[dict[str, Any]]:
    words = ("-m", "tests.e2e.mlx_cases", "native")
    printed = run_over_mlxs_ring(words, ranks=RANKS, folder=folder, timeout_s=TIMEOUT_S)
    return [results_in(each) for each in printed]


def of_pmesh(fleet: Fleet, ring: list[StartedAgent]) -> list[dict[str, Any]]:
    command = ("mlx", "--wait-for", str(RANKS), "-m", "tests.e2e.mlx_cases")
    one, other, _ = ring
    running = [fleet.start_command(*command, home=at.home) for at in (one, other, other)]
    found = [results_in(each.await_end()) for each in running]
    return sorted(found, key=lambda results: str(results["rank and size"]))


@pytest.mark.timeout(180)
def test_every_function_does_what_it_does_over_mlxs_ring(
    fleet: Fleet, ring: list[StartedAgent], tmp_path: Path
) -> None:
    expected, found = of_mlx(tmp_path), of_pmesh(fleet, ring)
    for native, ours in zip(expected, found, strict=True):
        assert ours.keys() == native.keys()
        differ = {name for name in native if ours[name] != native[name]}
        assert differ == set(DIFFERENT)


def test_each_difference_has_a_row_with_its_reason() -> None:
    page = sections(read(DOCS / "how-to" / "mlx-programs.md"))["What differs from MLX"]
    rows = {row[0] for row in table_rows(page)}
    assert set(DIFFERENT.values()) <= rows
