"""`%%pmesh`: a cell of a notebook runs on all machines."""

import os
import signal
from collections.abc import Iterator

import pytest

from pmesh import notebook
from pmesh.errors import RunError
from pmesh.launches.cli.launches import allow_run
from tests.worlds.faults import Faults
from tools.lab.mesh import LabMesh

pytestmark = [pytest.mark.slow, pytest.mark.measured]

TRAINS = """
import numpy as np
import pmesh
with pmesh.connect() as mesh:
    print("rank", mesh.rank, "has", mesh.all_reduce(np.ones(1)))
"""


@pytest.fixture(scope="module")
def mesh() -> Iterator[LabMesh]:
    with LabMesh(2) as made:
        peer: tuple[str, ...] = ("--no-mdns",)
        for node in made.nodes:
            allow_run(node.home, (), as_root=True, no=False)
            made.start_agent(node, *peer)
            peer = ("--no-mdns", "--peer", made.nodes[0].await_address())
        made.await_view()
        yield made


@pytest.fixture(autouse=True)
def at_the_first(mesh: LabMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in mesh.nodes[0].environment.items():
        monkeypatch.setenv(name, value)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_cell_runs_on_all_machines(capsys: pytest.CaptureFixture[str]) -> None:
    notebook.run_cell("", TRAINS)
    assert {"mac-1 | rank 0 has [2.]", "mac-2 | rank 1 has [2.]"} <= set(lines_of(capsys))


def test_the_line_has_options_of_pmesh_run(capsys: pytest.CaptureFixture[str]) -> None:
    notebook.run_cell("--on=mac-2 -n 1", TRAINS)
    assert [line for line in lines_of(capsys) if " | " in line] == ["mac-2 | rank 0 has [1.]"]


def test_a_cell_that_fails_raises_after_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match="the cell has ended with 3"):
        notebook.run_cell("--restarts 0 --on mac-1", "print('before'); raise SystemExit(3)")
    assert "mac-1 | before" in lines_of(capsys)


def test_an_interrupt_ends_the_program_everywhere(mesh: LabMesh, faults: Faults) -> None:
    said: list[str] = []

    def say(*lines: str) -> None:
        said.extend(lines)
        if lines == ("mac-2 | ready",):
            os.kill(os.getpid(), signal.SIGINT)

    faults.instead(notebook, "say", say)
    with pytest.raises(KeyboardInterrupt):
        notebook.run_cell("--on mac-2", "import time\nprint('ready', flush=True)\ntime.sleep(1000)")
    assert "mac-2 | ready" in said
    assert "running" not in mesh.run_command(mesh.nodes[1], "ps")


def test_ipython_gets_the_magic() -> None:
    class Shell:
        def register_magic_function(self, func: object, magic_kind: str, magic_name: str) -> None:
            self.found = (func, magic_kind, magic_name)

    shell = Shell()
    notebook.load_ipython_extension(shell)
    assert shell.found == (notebook.run_cell, "cell", "pmesh")
