"""The measurement of what `pmesh trace` costs runs; its figures are for quiet machines."""

import pytest

from tools.__main__ import main

pytestmark = pytest.mark.slow


def test_ops_are_measured_with_and_without_traces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "trace-cost", "--rounds", "2", "--calls", "3"]) in {0, 1}
    said = capsys.readouterr().out
    for size in ("4 KiB", "1 MiB"):
        assert f"{size}, times kept: " in said
        assert f"{size}, asked for them: " in said
