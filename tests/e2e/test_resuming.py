"""A machine dies under a library that fixes the number of ranks: all start again, and go on."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Fleet, StartedAgent

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "tools/kills/scripts/resuming.py"


def train(fleet: Fleet, agent: StartedAgent, folder: Path) -> tuple[str, list[Any]]:
    import torch  # noqa: PLC0415 - it may not be installed

    words = (
        "--on",
        "mac-1,mac-2",
        "--job",
        folder.name,
        "--",
        str(SCRIPT),
        "lightning",
        str(folder),
    )
    said = fleet.start_command("run", *words, home=agent.home).await_end(timeout_s=240.0)
    return said, [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.timeout(600)  # six times a rank imports it, all on two cores
def test_a_training_with_a_kill_ends_with_the_weights_of_one_without(
    fleet: Fleet, ring: list[StartedAgent], tmp_path: Path
) -> None:
    """With Lightning; `tests/tools/test_trainer_kills.py` has Transformers."""
    ended = {}
    for name in ("undisturbed", "disturbed"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "disturbed":
            (folder / "kill").touch()
        said, ended[name] = train(fleet, ring[0], folder)
        killed = name == "disturbed"
        assert len(re.findall("rank 1 ended by SIGKILL; it is started again", said)) == killed
        assert len(re.findall(r"DistBackendError: RankLost: .* start all of them", said)) >= killed
    for rank in range(2):
        before, after = (ended[name][rank] for name in ("undisturbed", "disturbed"))
        assert after["steps"] == before["steps"]
        for name, weights in before["net"].items():
            assert after["net"][name].sub(weights).abs().max() < 1e-5
            assert after["net"][name].equal(ended["disturbed"][0]["net"][name])
