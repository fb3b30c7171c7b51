"""torch's own suite, in short: the whole takes minutes."""

import re

import pytest

from tests.tools.running import run_tool

pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="torch's own suite imports it")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("part", ["test_all_reduce_sum", "test_reduce_sum", "test_irecv"])
def test_cases_that_pass_on_gloo_pass_on_pmesh(part: str) -> None:
    code, output = run_tool("torch-suite", "--cases", part, within_s=110)

    summary = re.search(r"(\d+) pass on gloo, (\d+) of them not on pmesh", output)
    assert summary is not None, output
    assert int(summary[1]) > 0
    assert code == 0, output
