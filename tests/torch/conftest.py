import json
import os
import select
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
    starter: "subprocess.Popen[str]"

    def run(
        self, module: str, function: str, *arguments: str, ranks: int = 3, **environment: str
    ) -> list[int]:
        """Call a function of a module as each of so many ranks; returns their exit codes."""
        settings = {"PMESH_HOME": str(self.home), "PMESH_WAIT_FOR": str(ranks), **environment}
        called = {"module": module, "function": function, "arguments": arguments, "ranks": ranks}
        assert self.starter.stdin is not None
        assert self.starter.stdout is not None
        print(json.dumps(called | {"environment": settings}), file=self.starter.stdin, flush=True)
        if not select.select([self.starter.stdout], [], [], PATIENCE_S)[0]:
            os.killpg(self.starter.pid, signal.SIGKILL)  # with its ranks
        codes: list[int] = json.loads(self.starter.stdout.readline())
        return codes


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch.start"]
    with (
        tempfile.TemporaryDirectory(prefix="pmesh-") as home,  # short, for a socket's path
        agent_in_a_thread(Path(home)),
        subprocess.Popen(
            command,
            env=inherited() | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as starter,
    ):
        yield Programs(Path(home), tmp_path_factory.mktemp("ranks"), starter)


@pytest.fixture(scope="session")
def both(programs: Programs) -> dict[str, list[dict[str, Any]]]:
    """What each rank has found in each scenario, on gloo and on pmesh."""
    import torch

    found: dict[str, list[dict[str, Any]]] = {}
    for backend in ("gloo", "pmesh"):
        folder = programs.folder / backend
        folder.mkdir()
        codes = programs.run("tests.torch.scenarios", "run_all", str(folder), backend)
        assert codes == [0, 0, 0], backend
        found[backend] = [
            torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(3)
        ]
    return found
