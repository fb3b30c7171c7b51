"""`pmesh mlx` with real agents: unchanged programs, among them mlx_lm.lora; losses."""

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.harness import Fleet, StartedAgent
from tests.e2e.mlx_ring import run_over_mlxs_ring

mx = pytest.importorskip("mlx.core")

pytestmark = pytest.mark.slow

RANKS = 3
ITERATIONS = 20

PROGRAM = """
import sys
import mlx.core as mx
from mlx.nn.utils import average_gradients

group = mx.distributed.init()
step = 0
print("arguments", sys.argv[1:], "size", group.size(), flush=True)
while step < 20000:
    step += 1
    mean = average_gradients({"w": mx.array([float(group.rank())])})
    if step == 10:
        print("rank", group.rank(), "has begun", flush=True)
    if mean["w"].item() != 1.0:  # of ranks 0, 1 and 2
        break
mx.distributed.all_sum(mx.array(1.0))
print("mean", mean["w"].item(), "size", group.size())
sys.exit(3 if group.rank() == 1 else 0)
"""


def test_a_program_goes_on_when_its_rank_0_is_killed_and_warns_that_nobody_will_save(
    fleet: Fleet, ring: list[StartedAgent], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = ("mlx", "--wait-for", "3", sys.executable, "-u", str(script), "--epochs", "2")
    one, other, _ = ring
    running = [fleet.start_command(*command, home=at.home) for at in (one, other, other)]
    begun = {int(each.await_line(r"rank (\d) has begun").group(1)): each for each in running}
    begun[0].reap()
    second, third = begun[1].await_end(code=3), begun[2].await_end()
    for said in (second, third):
        assert "arguments ['--epochs', '2'] size 3" in said
        assert "nobody will save" in said
        assert "mean 1.5 size 3" in said


def test_an_error_of_the_program_is_a_crash_of_its_rank(fleet: Fleet, tmp_path: Path) -> None:
    module = tmp_path / "steps.py"
    module.write_text(
        "import mlx.core as mx\n"
        "if mx.distributed.init().rank() == 0: raise ValueError('no data')\n"
        "print(mx.distributed.all_sum(mx.array(1.0)).item())\n"
    )
    command = ("mlx", "--wait-for", "2", "-m", "steps")
    (agent,) = fleet.start_ring("mac-1")
    running = [
        fleet.start_command(*command, home=agent.home, PYTHONPATH=str(tmp_path)) for _ in range(2)
    ]
    for each in running:
        each.await_line("ValueError: no data|nobody will save")
    said = "".join(each.output for each in running)
    agent.process.await_line("is lost")
    assert "ValueError: no data" in said


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    importlib.util.find_spec("mlx_lm") is None and not os.environ.get("CI"),
    reason="mlx-lm is missing",
)
def test_mlx_lms_lora_learns_what_it_learns_over_mlxs_ring(
    fleet: Fleet, ring: list[StartedAgent], tmp_path: Path
) -> None:
    """At the learning rate that it has by default: Adam makes much of rounding at higher ones."""
    from tools.lora import make_data, make_model  # noqa: PLC0415 - it needs mlx-lm

    words = [
        *("--model", str(make_model(tmp_path / "model")), "--train", "--adapter-path"),
        *(str(tmp_path / "adapters"), "--data", str(make_data(tmp_path / "data"))),
        *("--iters", str(ITERATIONS), "--batch-size", str(2 * RANKS), "--num-layers", "2"),
        *("--val-batches", "2"),
    ]
    folders = tmp_path / "mlx", tmp_path / "pmesh"
    for folder in folders:
        folder.mkdir()
    program = ("-m", "tests.e2e.lora_program")
    run_over_mlxs_ring(
        (*program, str(folders[0]), *words), ranks=RANKS, folder=tmp_path, timeout_s=120
    )
    options = ("--no-elastic", "--wait-for", str(RANKS))
    one, other, _ = ring
    running = [
        fleet.start_command(
            "mlx", *options, *program, str(folders[1]), *words, home=at.home, HF_HUB_OFFLINE="1"
        )
        for at in (one, other, other)
    ]
    for each in running:
        assert "runs uncompiled" in each.await_end(timeout_s=200)
    expected, *found = (
        {key: np.array(value) for key, value in mx.load(str(path)).items()}
        for path in [
            folders[0] / "0.safetensors",
            *(folders[1] / f"{rank}.safetensors" for rank in range(RANKS)),
        ]
    )
    for key, value in expected.items():
        assert np.abs(found[0][key] - value).max() <= 1e-5
        assert {weights[key].tobytes() for weights in found} == {found[0][key].tobytes()}
    assert max(np.abs(value).max() for key, value in expected.items() if "lora_b" in key) > 1e-4
