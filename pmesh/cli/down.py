"""`pmesh down`: the agent leaves the mesh and ends."""

import contextlib
from pathlib import Path
from typing import Final

import psutil

from pmesh.client.control import stop_agent
from pmesh.home_paths import home_directory
from pmesh.terminal.lines import say

EXIT_TIMEOUT_S: Final = 5.0


def bring_down(home: Path | None) -> int:
    """Stop the agent and wait until its process has ended, which frees its home."""
    pid = stop_agent(home_directory(home))
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        psutil.Process(pid).wait(EXIT_TIMEOUT_S)
    say(f"The agent has left the mesh (pid {pid}).")
    return 0
