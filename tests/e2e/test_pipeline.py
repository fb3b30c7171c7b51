"""Training in stages with real agents and processes."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("mlx_lm") is None and not os.environ.get("CI"):
    pytest.skip("mlx-lm is not installed", allow_module_level=True)

from tests.e2e.harness import Fleet, StartedAgent
from tools.lora import make_model, tiny

pytestmark = pytest.mark.slow

ELASTIC = """
import hashlib, os, signal, sys

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx import nn, optimizers
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

import pmesh, pmesh.mlx

folder, job, victim = sys.argv[1:]
model, _ = mlx_lm.load(folder, lazy=True)
model.freeze()
mx.random.seed(0)
linear_to_lora_layers(model, len(model.layers), {"rank": 2, "scale": 20.0, "dropout": 0})


def batch(step):
    tokens = mx.random.randint(0, 50, (4, 17), key=mx.random.key(step))
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits, y):
    return nn.losses.cross_entropy(logits, y, reduction="mean")


with pmesh.connect(job=job, wait_for=3) as mesh:
    rank = mesh.rank
    training = pmesh.mlx.ElasticPipeline(
        model, mesh, loss, optimizers.Adam(1e-2), micro_batch_size=2, fewer_after_s=0.2
    )
    for step, value in training.train(batch, 6):
        print(f"step {step}: {value!r}", flush=True)
        if step == 3 and rank == int(victim):
            os.kill(os.getpid(), signal.SIGKILL)
    trained = tree_flatten(training.stage.trainable_parameters())
    digests = [hashlib.sha256(np.array(x).tobytes()).hexdigest() for _, x in trained]
    print(f"stage {training.number} of {training.stage.layout.stages}:", *digests, flush=True)
"""

EXAMPLE = Path(__file__).parents[2] / "examples" / "fine_tune_in_stages.py"


def test_the_example_fine_tunes_adapters_on_two_machines_each_of_its_own_layers(
    fleet: Fleet, ring: list[StartedAgent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(tmp_path)
    monkeypatch.chdir(tmp_path)  # what it writes goes where the command was given
    words = ("run", "--on", "mac-1,mac-2", "--", sys.executable, str(EXAMPLE), str(tmp_path), "4")
    said = fleet.start_command(*words, home=ring[0].home).await_end(timeout_s=120)
    losses = re.findall(r"stage (\d): step \d+, loss ([\d.]+)", said)
    of_first, of_last = ([float(loss) for stage, loss in losses if stage == s] for s in "01")
    assert of_first == of_last
    assert of_first[-1] < of_first[0]
    assert {path.name for path in tmp_path.glob("stage-*")} == {
        f"stage-{n}.safetensors" for n in "01"
    }


def test_processes_go_on_with_the_layers_of_one_that_was_killed_for_good(
    fleet: Fleet, ring: list[StartedAgent], tmp_path: Path
) -> None:
    model = str(make_model(tmp_path / "model"))

    def train(job: str, victim: int) -> tuple[int, dict[str, str], list[str]]:
        """Return how many stages are left, the loss of each step, and the weights in order."""
        ranks = [fleet.start_trainer(agent, ELASTIC, model, job, str(victim)) for agent in ring]
        for rank in ranks:
            rank.join(within_s=240)
        said = "\n".join(rank.text for rank in ranks)
        ends = sorted(re.findall(r"^stage (\d) of (\d): (.*)$", said, re.MULTILINE))
        assert len(ends) == (2 if victim >= 0 else 3), said
        losses = dict(re.findall(r"^step (\d): (.*)$", said, re.MULTILINE))
        return int(ends[0][1]), losses, [digest for end in ends for digest in end[2].split()]

    undisturbed = train("undisturbed", -1)
    for_good = train("for-good", 1)
    assert (undisturbed[0], for_good[0]) == (3, 2)
    assert undisturbed[1:] == for_good[1:]
