"""The short form of the tool that measures shares by speed."""

import os
from pathlib import Path

import pytest

from tests.tools.running import run_tool

GROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cgroup.controllers"))


@pytest.mark.slow
@pytest.mark.measured
@pytest.mark.timeout(600)  # with torch, six ranks import it
@pytest.mark.skipif(
    os.geteuid() != 0 or not any(each.exists() and os.access(each, os.W_OK) for each in GROUPS),
    reason="only root can hold processes to a part of a core",
)
@pytest.mark.parametrize(("library", "alone"), [("numpy", 5), ("torch", 0)])
def test_the_weights_are_those_of_even_shares(library: str, alone: int) -> None:
    pytest.importorskip(library)
    options = ("--library", library, "--steps", "26", "--alone", str(alone), "--hidden", "256")

    code, output = run_tool("shares", *options, within_s=590)

    assert code == 0, output
    assert "weights after 26 steps differ by at most" in output
    assert ("throttled" in output) == bool(alone)
