"""Where ranks, sizes and stores come from, and what is said where there are none."""

import pytest

from tests.torch.conftest import Programs


@pytest.mark.parametrize(
    "program", ["by_options", "twice_by_url", "with_a_loss", "with_compression"]
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
