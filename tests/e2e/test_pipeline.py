"""Training in stages with real agents and processes."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("mlx_lm") is None and not os.environ.get("CI"):
    pytest.skip("mlx-lm is not installed", allow_module_level=True)

from tests.e2e.harness import Agent, Fleet
from tools.lora import tiny

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "fine_tune_in_stages.py"


def test_the_example_fine_tunes_adapters_on_two_machines_each_of_its_own_layers(
    fleet: Fleet, ring: list[Agent], tmp_path: Path
) -> None:
    tiny(tmp_path)
    words = ("run", "--on", "mac-1,mac-2", "--", sys.executable, str(EXAMPLE), str(tmp_path), "4")
    said = fleet.start_command(*words, home=ring[0].home).await_end(timeout_s=120)
    losses = re.findall(r"stage (\d): step \d+, loss ([\d.]+)", said)
    of_first, of_last = ([float(loss) for stage, loss in losses if stage == s] for s in "01")
    assert of_first == of_last
    assert of_first[-1] < of_first[0]
