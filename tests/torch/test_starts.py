"""Where ranks, sizes and stores come from, and what is said where there are none."""

import subprocess
import sys

import pytest

from tests.torch.conftest import Programs


@pytest.mark.parametrize(
    "program",
    ["by_options", "twice_by_url", "with_a_loss", "with_compression", "of_other_models"],
)
def test_ranks_come_from_the_mesh(programs: Programs, program: str) -> None:
    assert programs.run("tests.torch.starts", program, PMESH_JOB=program) == 0


@pytest.mark.parametrize(
    "program",
    [
        *("with_ranks_given", "by_a_launcher", "beside_gloo"),
        *("of_other_sizes", "without_an_agent"),
    ],
)
def test_ranks_that_are_given_stay(programs: Programs, program: str) -> None:
    folder = programs.folder / program
    folder.mkdir()
    assert programs.run("tests.torch.starts", program, str(folder)) == 0


@pytest.mark.parametrize("first", ["torch", "pmesh.torch", "pmesh.torch.options"])
def test_the_backend_is_there_whichever_is_imported_first(first: str) -> None:
    """torch's autoload calls `register`, in the middle of an import of ours too."""
    program = (
        "import importlib.metadata as m;"
        "loads = m.EntryPoint('pmesh', 'pmesh.torch:register', 'torch.backends');"
        "m.entry_points = lambda **_: [loads];"  # also where pmesh has not been installed
        f"import {first}, torch.distributed as dist; assert dist.Backend('pmesh') == 'pmesh';"
        "assert 'PMESH' in dist.Backend._plugins"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    assert done.returncode == 0, done.stderr
