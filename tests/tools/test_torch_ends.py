"""The short form of the tool that lets many short trainings end."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")


@pytest.mark.slow
@pytest.mark.measured
@pytest.mark.timeout(600)
def test_two_short_trainings_end_well() -> None:
    # A process of its own: it starts one that forks, and must have no threads.
    command = [sys.executable, "-W", "ignore", "-m", "tools", "run", "torch-ends", "--runs", "2"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 runs, 9 ranks: 0 have ended with another code than 0" in done.stdout
