import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds.watched_agent import WatchedAgent

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "library"),
    [
        *(("train_numpy.py", "numpy"), ("train_mlx.py", "mlx")),
        *(("train_torch.py", "torch"), ("train_torch_elastic.py", "torch")),
    ],
)
def test_an_example_trains_to_what_it_should_on_two_ranks(
    agent: WatchedAgent, script: str, library: str
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip(library)
    environment = {
        **os.environ,
        "PMESH_HOME": str(agent.home),
        "PMESH_WAIT_FOR": "2",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(EXAMPLES / script), "2"]
    ranks = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    found = [re.findall(r"accuracy ([\d.]+)%", output) for output in outputs]
    assert found[0] == found[1]
    assert float(found[0][0]) >= 90
    agent.wait_until(lambda: sorted(agent.left) == [0, 1])  # it reads the last word of each later


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")))
def test_an_example_can_be_read_at_one_sitting(script: Path) -> None:
    assert len(script.read_text().splitlines()) < 70
