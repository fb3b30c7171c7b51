"""No thread of ours is left where a group ends, or where the program does; what a dead worker ends.

A thread that is left when Python ends, and comes back from C++, aborts the process.
"""

import subprocess
import sys

import pytest

from tests.torch.conftest import RankPrograms

pytestmark = [pytest.mark.slow, pytest.mark.measured]  # its programs import torch for seconds


@pytest.mark.parametrize("program", ["of_a_line", "of_a_message"])
def test_a_program_ends_well_while_an_op_is_under_way(program: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c"]
    code = f"import tests.torch.ends as ends; ends.{program}()"

    done = subprocess.run(
        [*command, code], capture_output=True, text=True, timeout=100, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "program", ["callbacks_end_before_the_group", "a_worker_is_killed_in_a_call"]
)
def test_what_ends_in_the_middle_ends_alone(programs: RankPrograms, program: str) -> None:
    assert programs.run("tests.torch.ends", program, PMESH_JOB=program) == [0, 0, 0]
