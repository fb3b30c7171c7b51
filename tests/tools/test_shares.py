"""The short form of the tool that measures shares by speed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

GROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cgroup.controllers"))


@pytest.mark.slow
@pytest.mark.measured
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    os.geteuid() != 0 or not any(each.exists() and os.access(each, os.W_OK) for each in GROUPS),
    reason="only root can hold processes to a part of a core",
)
def test_the_weights_are_those_of_even_shares() -> None:
    options = ("--steps", "30", "--alone", "5", "--hidden", "256")
    command = [sys.executable, "-m", "tools", "run", "shares", *options]

    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "weights after 30 steps differ by at most" in done.stdout
