import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pmesh.testing.simulated_mesh import agent_in_a_thread
from tools.lab.agents import inherited

from pmesh.testing import agent_in_a_thread
from tools.lab.mesh import inherited

collect_ignore_glob: list[str] = []
if find_spec("torch") is None:
    if os.environ.get("PMESH_NEEDS_TORCH"):  # .ci/run sets it once it has installed torch
        raise RuntimeError("torch is not there, though its tests are to run")
    collect_ignore_glob = ["test_*.py"]

PATIENCE_S = 110.0


@dataclass(frozen=True)
class Programs:
    """Ranks as processes, with an agent for those that use pmesh."""

    home: Path
    folder: Path

    def run(
        self, module: str, function: str, *arguments: str, ranks: int = 3, **environment: str
    ) -> int:
        """Call a function of a module as each of so many ranks; returns 0 if all end well."""
        settings = inherited() | {
            "PMESH_HOME": str(self.home),
            "PMESH_WAIT_FOR": str(ranks),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        command = [sys.executable, "-W", "ignore", "-m", "tests.torch.start", module, function]
        with subprocess.Popen(
            [*command, str(ranks), *arguments], env=settings, start_new_session=True
        ) as started:
            try:
                return started.wait(PATIENCE_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)  # with its ranks


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with (
        tempfile.TemporaryDirectory(prefix="pmesh-") as home,  # short, for a socket's path
        agent_in_a_thread(Path(home)),
    ):
        yield Programs(Path(home), tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="session")
def both(programs: Programs) -> dict[str, list[dict[str, Any]]]:
    """What each rank has found in each scenario, on gloo and on pmesh."""
    import torch

    found: dict[str, list[dict[str, Any]]] = {}
    for backend in ("gloo", "pmesh"):
        of_backend = Programs(programs.home, programs.folder / backend)
        of_backend.folder.mkdir()
        folder = str(of_backend.folder)
        assert of_backend.run("tests.torch.scenarios", "run_all", folder, backend) == 0, backend
        found[backend] = [
            torch.load(of_backend.folder / f"rank-{rank}.pt", weights_only=False)
            for rank in range(3)
        ]
    return found
