"""The short form of the tool that lets many short trainings end."""

import pytest

from tests.tools.running import run_tool

pytest.importorskip("torch")


@pytest.mark.slow
@pytest.mark.measured
@pytest.mark.timeout(600)
def test_two_short_trainings_end_well() -> None:
    # A process of its own: it starts one that forks, and must have no threads.
    code, output = run_tool("torch-ends", "--runs", "2", "--busy", "2", within_s=590)

    assert code == 0, output
    assert "2 runs, 9 ranks: 0 have ended with another code than 0" in output
