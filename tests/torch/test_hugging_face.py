"""Unchanged scripts of Hugging Face's libraries have over pmesh the numbers of gloo."""

import inspect
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.torch.conftest import RankPrograms

if find_spec("accelerate") is None and not os.environ.get("CI"):
    pytest.skip("needs: pip install --group hugging-face", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.measured]


def found_by(programs: RankPrograms, program: str, backend: str) -> list[dict[str, Any]]:
    folder = programs.folder / f"{program}-{backend}"
    folder.mkdir()
    codes = programs.run("tests.torch.hugging_face", program, str(folder), backend)
    assert codes == [0, 0, 0]
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(3)]


@pytest.fixture(scope="module")
def loop_over_gloo(programs: RankPrograms) -> list[dict[str, Any]]:
    return found_by(programs, "loop", "gloo")


@pytest.mark.parametrize("program", ["loop", "on_mps"])
def test_a_loop_over_accelerate_is_that_of_gloo(
    programs: RankPrograms, program: str, loop_over_gloo: list[dict[str, Any]]
) -> None:
    check_equal(found_by(programs, program, "pmesh"), loop_over_gloo)


def test_the_trainer_of_transformers_is_that_of_gloo(programs: RankPrograms) -> None:
    theirs = found_by(programs, "trainer", "gloo")
    check_equal(found_by(programs, "trainer", "pmesh"), theirs)
    check_equal(found_by(programs, "answered", "pmesh"), theirs)


def check_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for rank in range(3):
        for name, value in theirs[rank].items():
            torch.testing.assert_close(ours[rank][name], value, rtol=1e-5, atol=1e-5)
        for name, weights in ours[rank]["net"].items():
            assert torch.equal(weights, ours[0]["net"][name])


@pytest.mark.parametrize("program", ["untried", "sharded", "alone", "of_other_checkpoints"])
def test_what_accelerate_can_t_do_is_refused(programs: RankPrograms, program: str) -> None:
    folder = programs.folder / program
    folder.mkdir()
    assert programs.run("tests.torch.hugging_face", program, str(folder)) == [0, 0, 0]


def test_the_timeout_of_a_script_counts(programs: RankPrograms) -> None:
    assert programs.run("tests.torch.hugging_face", "timeout", str(programs.folder)) == [0, 0, 0]


def test_the_method_that_is_replaced_is_still_what_it_was() -> None:
    """If this fails, read the new `PartialState`, then try this file's programs with it."""
    from importlib.metadata import version

    from accelerate.state import PartialState

    from pmesh.torch.accelerate import check_version

    check_version(version("accelerate"))
    ours = inspect.signature(PartialState._prepare_backend)
    theirs = inspect.signature(PartialState._prepare_backend.__wrapped__)
    assert list(ours.parameters.values())[1:] == list(theirs.parameters.values())[1:]


ALONE = (
    "import sys; {imports}; from accelerate import Accelerator;"
    "a = Accelerator(cpu=True); assert a.num_processes == 1, a.state"
)


@pytest.mark.parametrize(
    "imports", ["import pmesh.torch, accelerate", "import accelerate, pmesh.torch"]
)
def test_a_program_without_pmesh_trains_alone(imports: str) -> None:
    """In whatever order they are imported, accelerate asks its own method in the end."""
    program = ALONE.format(imports=imports)
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
