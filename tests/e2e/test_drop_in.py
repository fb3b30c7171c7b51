"""The drop-in beside MLX's own ring, in real processes: the same results, or a row of the table."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, read, sections, table_rows
from tests.e2e.harness import TIMEOUT_S, Fleet

pytest.importorskip("mlx.core")

from tests.worlds.mlx_cases import CASES

RANKS = 3
DIFFERENT = {
    "all_max complex64": "`all_max`, `all_min` of complex64",
    "all_min complex64": "`all_max`, `all_min` of complex64",
    "vmap all_sum": "`mx.vmap`",
    "vjp sum_scatter": "`sum_scatter` in `mx.grad` and `mx.jvp`",
}
"""Cases that are not as in MLX, with their row in the table of docs/how-to/mlx-programs.md."""


def free_addresses() -> list[list[str]]:
    """MLX's ring takes its ports from a file, so they are free now and, mostly, a moment later."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(RANKS)]
    addresses = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    for each in sockets:
        each.close()
    return addresses


def results_in(output: str) -> dict[str, Any]:
    (line,) = (line for line in output.splitlines() if line.startswith(CASES))
    found: dict[str, Any] = json.loads(line.removeprefix(CASES))
    return found


def of_mlx(folder: Path) -> list[dict[str, Any]]:
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps(free_addresses()))
    command = [sys.executable, "-m", "tests.worlds.mlx_cases", "native"]
    environments = [
        os.environ | {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)} for rank in range(RANKS)
    ]
    running = [
        subprocess.Popen(command, env=each, stdout=subprocess.PIPE, text=True)
        for each in environments
    ]
    try:
        return [results_in(each.communicate(timeout=TIMEOUT_S)[0]) for each in running]
    finally:
        for each in running:
            each.kill()
            each.wait()


def of_pmesh() -> list[dict[str, Any]]:
    command = ("mlx", "--wait-for", str(RANKS), "-m", "tests.worlds.mlx_cases")
    with Fleet() as fleet:
        one, other = fleet.start_ring("mac-1", "mac-2")
        running = [fleet.start_command(*command, home=at.home) for at in (one, other, other)]
        found = [results_in(each.await_end()) for each in running]
    return sorted(found, key=lambda results: str(results["rank and size"]))


@pytest.mark.timeout(180)
def test_every_function_does_what_it_does_over_mlxs_ring(tmp_path: Path) -> None:
    expected, found = of_mlx(tmp_path), of_pmesh()
    for native, ours in zip(expected, found, strict=True):
        assert ours.keys() == native.keys()
        differ = {name for name in native if ours[name] != native[name]}
        assert differ == set(DIFFERENT)


def test_each_difference_has_a_row_with_its_reason() -> None:
    page = sections(read(DOCS / "how-to" / "mlx-programs.md"))["What differs from MLX"]
    rows = {row[0] for row in table_rows(page)}
    assert set(DIFFERENT.values()) <= rows
