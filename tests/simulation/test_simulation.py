"""Histories of a whole cluster under seeded faults; each failure says how to replay it."""

import os
import subprocess
import sys

import pytest

from simulation.seeds import judge_many, replay_command

pytestmark = pytest.mark.slow

SEEDS = 15
"""About 3 s of one core. `python -m simulation.seeds 20000` is for a longer look."""


@pytest.mark.parametrize("first", range(0, 4 * SEEDS, SEEDS))
def test_no_seed_breaks_an_invariant(first: int) -> None:
    verdicts = list(judge_many(range(first, first + SEEDS)))
    broken = [f"{v.violation}\n  {replay_command(v.seed)}" for v in verdicts if v.outcome is None]
    assert not broken, "\n".join(broken)
    outcomes = [verdict.outcome for verdict in verdicts if verdict.outcome is not None]
    assert sum(outcome.ops_ended for outcome in outcomes) > 50 * SEEDS
    assert sum(outcome.ops_failed for outcome in outcomes) > SEEDS
    assert sum(outcome.installs for outcome in outcomes) > 10 * SEEDS
    assert sum(outcome.entered for outcome in outcomes) > SEEDS


def test_a_seed_gives_one_history_whatever_python_hashes_with() -> None:
    def history(hash_seed: str) -> list[str]:
        command = [sys.executable, "-m", "simulation.seeds", "1", "--first", "4", "--trace"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[:-1]  # the last one measures real time

    first = history("1")
    assert any("installs" in line for line in first)
    assert first == history("2")
