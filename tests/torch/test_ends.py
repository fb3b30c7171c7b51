"""No thread of ours is left where a group ends, and where the program does.

One that is left when Python ends, and comes back from C++, aborts the process.
"""

import subprocess
import sys

import pytest

from tests.torch.conftest import Programs


@pytest.mark.parametrize("program", ["of_a_line", "of_a_message"])
def test_a_program_ends_well_while_an_op_is_under_way(program: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c"]
    code = f"import tests.torch.ends as ends; ends.{program}()"

    done = subprocess.run(
        [*command, code], capture_output=True, text=True, timeout=100, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_no_thread_is_left_where_a_group_has_been_destroyed(programs: Programs) -> None:
    program = "callbacks_end_before_the_group"
    assert programs.run("tests.torch.ends", program, PMESH_JOB=program) == 0
