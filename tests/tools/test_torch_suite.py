"""torch's own suite, in short: the whole takes minutes."""

import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="torch's own suite imports it")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("part", ["test_all_reduce_sum", "test_reduce_sum", "test_irecv"])
def test_cases_that_pass_on_gloo_pass_on_pmesh(part: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tools", "run", "torch-suite", "--cases", part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)

    summary = re.search(r"(\d+) pass on gloo, (\d+) of them not on pmesh", done.stdout)
    assert summary is not None, done.stderr
    assert int(summary[1]) > 0
    assert done.returncode == 0, done.stdout
