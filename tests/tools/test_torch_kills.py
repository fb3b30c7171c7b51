"""The short form of the campaign that kills ranks of trainings with torch, and its judges."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from tools.torch_kills.rounds import Tally, judge_errors, judge_losses, judge_steps


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["elastic", "ddp", "fsdp"])
def test_a_short_campaign_finds_nothing(tmp_path: Path, kind: str) -> None:
    results = tmp_path / "kills.json"
    options = ["--kind", kind, "--kills", "2", "--steps", "300", "--json", str(results)]
    # A process of its own: it forks, and must have no threads.
    command = [sys.executable, "-W", "ignore", "-m", "tools.torch_kills", "run", *options]

    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    tally = json.loads(results.read_text())
    assert tally["kills"] == 2
    assert len(tally["after_s"]) >= 1


@pytest.mark.parametrize(
    ("after_s", "errors"),
    [
        (0.1, ["RankLost: rank 1 (b)", "RankLost: rank 1 (b), again"]),
        (0.1, ["RankLost: rank 0 (a)"] * 2),
        (9.0, ["RankLost: rank 1 (b)"] * 2),
    ],
)
def test_another_error_or_a_late_one_is_a_violation(after_s: float, errors: list[str]) -> None:
    tally = Tally("ddp", after_s=[after_s])

    judge_errors(tally, "kill 1", "RankLost: rank 1 ", errors)

    assert len(tally.violations) == 1


def test_other_weights_after_a_step_are_a_violation() -> None:
    tally = Tally("elastic")

    judge_steps(tally, "training 1", {1: {"a"}, 2: {"a", "b"}})

    assert tally.violations == ["training 1: step 2 is torn: weights ['a', 'b']"]


@pytest.mark.parametrize("losses", [[2.0, 2.0, 2.001], [2.03] * 3, [float("nan")] * 3])
def test_another_loss_is_a_violation(losses: list[float]) -> None:
    tally = Tally("elastic", losses=[2.0, losses[0]])

    judge_losses(tally, "training 1", losses)

    assert tally.violations
