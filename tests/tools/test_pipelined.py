"""The short form of the measurement of a model whose layers lie on two machines."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("mlx_lm") is None and not os.environ.get("CI"):
    pytest.skip("mlx-lm is not installed", allow_module_level=True)

from tools.__main__ import main
from tools.pipelined import SYSTEMS

pytestmark = pytest.mark.slow


@pytest.mark.timeout(240)
def test_two_machines_make_the_tokens_that_one_process_makes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "pipelined", "--rounds", "1", "--tokens", "30"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == list(SYSTEMS)
