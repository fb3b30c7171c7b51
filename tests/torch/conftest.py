import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pmesh.testing import agent_in_a_thread
from tests.conftest import OF_SUBPROCESSES
from tools.lab.mesh import inherited

collect_ignore_glob: list[str] = []
if find_spec("torch") is None:
    if os.environ.get("PMESH_NEEDS_TORCH"):  # .ci/run sets it once it has installed torch
        raise RuntimeError("torch is not there, though its tests are to run")
    collect_ignore_glob = ["test_*.py"]

PATIENCE_S = 110.0


class RankPrograms:
    """Ranks as processes, with an agent for those that use pmesh."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.home = home
        self.folder = folder
        self._starters: dict[bool, subprocess.Popen[str]] = {}
        """By whether it and its ranks measure their coverage, which takes them twice as long."""

    def run(
        self, module: str, function: str, *arguments: str, ranks: int = 3, **environment: str
    ) -> list[int]:
        """Call a function of a module as each of so many ranks; returns their exit codes.

        If they do not end, the output says where each thread of each rank stands.
        """
        settings = {"PMESH_HOME": str(self.home), "PMESH_WAIT_FOR": str(ranks), **environment}
        called = {"module": module, "function": function, "arguments": arguments, "ranks": ranks}
        is_measured = OF_SUBPROCESSES in os.environ
        starter = self._starters.get(is_measured) or start_starter()
        self._starters[is_measured] = starter
        assert starter.stdin is not None
        assert starter.stdout is not None
        print(json.dumps(called | {"environment": settings}), file=starter.stdin, flush=True)
        if not select.select([starter.stdout], [], [], PATIENCE_S)[0]:
            self.end(signal.SIGABRT)  # for which faulthandler says where each one stands
            pytest.fail(f"{function}: the ranks have not ended after {PATIENCE_S:.0f} s")
        codes: list[int] = json.loads(starter.stdout.readline())
        return codes

    def end(self, number: signal.Signals) -> None:
        """End the processes that start ranks, and the ranks; the next run starts another."""
        starters, self._starters = self._starters, {}
        for starter in starters.values():
            with starter:
                os.killpg(starter.pid, number)


def start_starter() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-W", "ignore", "-m", "tests.torch.start"],
        env=inherited() | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPrograms]:
    with (
        tempfile.TemporaryDirectory(prefix="pmesh-") as home,  # short, for a socket's path
        agent_in_a_thread(Path(home)),
    ):
        programs = RankPrograms(Path(home), tmp_path_factory.mktemp("ranks"))
        yield programs
        programs.end(signal.SIGTERM)


@pytest.fixture(scope="session")
def both(programs: RankPrograms) -> dict[str, list[dict[str, Any]]]:
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
