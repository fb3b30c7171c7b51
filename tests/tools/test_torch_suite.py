"""torch's own suite, in short: the whole takes minutes."""

import re

import pytest

from tests.tools.running import run_tool

pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="torch's own suite imports it")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # six ranks import the suite


def test_cases_that_pass_on_gloo_pass_on_pmesh() -> None:
    parts = ("test_all_reduce_sum", "test_irecv")
    words = [word for part in parts for word in ("--cases", part)]

    code, output = run_tool("torch-suite", *words, within_s=290)

    summary = re.search(r"(\d+) pass on gloo, (\d+) of them not on pmesh", output)
    assert summary is not None, output
    assert int(summary[1]) >= len(parts)
    assert code == 0, output
