"""What each program that starts agents needs: their environment, and their status."""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pmesh.client.control import ask_status
from pmesh.core.identity.keys import MeshKey, mesh_key_text
from pmesh.errors import PmeshError

LOOK_EVERY_S = 0.05


def new_key() -> str:
    return mesh_key_text(MeshKey(secrets.token_bytes(32)))


def inherited() -> dict[str, str]:
    """This program's environment without the settings of a developer's own agent."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PMESH_")}


def status_of(home: Path, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """An agent's status, as `pmesh status --json` has it; raises PmeshError if none answers."""
    picture: dict[str, Any] = json.loads(ask_status(home, timeout_s=timeout_s))
    return picture


def await_status(
    home: Path,
    holds: Callable[[dict[str, Any]], object],
    *,
    within_s: float,
    runs: Callable[[], bool] = lambda: True,
) -> dict[str, Any] | None:
    """The first picture for which this holds; None if none comes in time or the agent ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and runs():
        with contextlib.suppress(PmeshError):
            picture = status_of(home)
            if holds(picture):
                return picture
        time.sleep(LOOK_EVERY_S)
    return None
