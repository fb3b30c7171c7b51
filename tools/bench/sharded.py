"""How much memory training takes on each of three ranks: plain, ZeRO-1 and fully sharded.

Each rank is a process of its own, on one machine. Its peak is that of MLX's memory plus that of
numpy's, in one step after the first two; the shared memory between trainer and agent is not in it,
as it belongs to the agent. Activations are small here: the batch is.
"""

import json
import math
import os
import sys
import tempfile
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from mlx.utils import tree_flatten

import pmesh
from pmesh.mlx import ShardedOptimizer, fully_shard
from pmesh.testing import agent_in_a_thread
from tools.lab.call import words_for
from tools.lab.commands import LabError
from tools.lab.program import LabProgram

RANKS, BLOCKS, BATCH, STEPS = 3, 4, 12, 20
WAYS = ("plain", "zero-1", "fully sharded")
PATIENCE_S = 600.0


def bucket_bytes(width: int) -> int:
    """That of one matrix."""
    return 4 * width * width


def make_blocks(width: int) -> list[Any]:
    """Four blocks of two matrices each: 8.4 million parameters with a width of 1,024."""
    mx.random.seed(1)
    return [
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        for _ in range(BLOCKS)
    ]


def loss_of(output: mx.array, y: mx.array) -> mx.array:
    loss: mx.array = nn.losses.mse_loss(output, y, reduction="mean")
    return loss


class ShardedTraining:
    """One of the three ways, a step at a time."""

    def __init__(self, way: str, width: int, mesh: pmesh.Mesh | None) -> None:
        self._mesh, self._width = mesh, width
        blocks, self._optimizer = make_blocks(width), optimizers.AdamW(1e-4)
        self.sharded: Any = None
        if way == "fully sharded" and mesh:
            self.sharded = fully_shard(blocks, mesh)
        self.zero = None
        if way == "zero-1" and mesh:
            self.zero = ShardedOptimizer(self._optimizer, mesh, bucket_bytes=bucket_bytes(width))
        self.model = nn.Sequential(*blocks)
        del blocks
        if not self.sharded:
            mx.eval(self.model.parameters())
            self._compute = nn.value_and_grad(self.model, lambda m, x, y: loss_of(m(x), y))

    def step(self, number: int) -> None:
        rank, size = (self._mesh.rank, self._mesh.size) if self._mesh else (0, 1)
        x = np.random.default_rng(number).normal(size=(BATCH, self._width)).astype(np.float32)
        own = mx.array(x[rank::size])
        if self.sharded:
            _, gradients = self.sharded.loss_and_gradients(loss_of, own, mx.sin(own))
            self._optimizer.update(self.sharded, gradients)
            mx.eval(self.sharded.parameters(), self._optimizer.state)
        else:
            _, gradients = self._compute(self.model, own, mx.sin(own))
            (self.zero or self._optimizer).update(self.model, gradients)
            mx.eval(self.model.parameters(), self._optimizer.state)

    def state_bytes(self) -> int:
        if self.zero:
            return self.zero.nbytes
        return sum(x.nbytes for _, x in tree_flatten(self._optimizer.state) if x.ndim)

    def weights(self) -> np.ndarray[Any, Any]:
        if self.sharded:
            arrays = [x for each in self.sharded.gather() for x in each.values()]
        else:
            arrays = [x for _, x in tree_flatten(self.model.parameters())]
        return np.concatenate([np.array(x).reshape(-1) for x in arrays])


def work(way: str, width: int, home: str, out: str) -> None:
    """Train, and print what it took as a line of JSON; save the weights."""
    mesh = pmesh.connect("memory", RANKS, home=Path(home)) if home else None
    training = ShardedTraining(way, width, mesh)
    for number in range(2):
        training.step(number)
    mx.reset_peak_memory()
    tracemalloc.start()
    training.step(2)
    peaks = mx.get_peak_memory(), tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for number in range(3, STEPS):
        training.step(number)
    found = {"mlx": peaks[0], "numpy": peaks[1], "state": training.state_bytes()}
    np.save(out, training.weights())
    if mesh:
        mesh.close()
    print(json.dumps(found), flush=True)


def measure(
    way: str, width: int, folder: Path
) -> tuple[list[dict[str, int]], np.ndarray[Any, Any]]:
    """What each rank took, and the weights in the end."""
    ranks = 1 if way == "plain" else RANKS
    with agent_in_a_thread(folder / "home"), ExitStack() as stack:
        home, out = "" if way == "plain" else str(folder / "home"), str(folder / way)
        running = [
            stack.enter_context(
                LabProgram.start(
                    f"rank {rank}",
                    [sys.executable, *words_for(work, way, width, home, f"{out} {rank}.npy")],
                    environment=os.environ,
                )
            )
            for rank in range(ranks)
        ]
        for rank in running:
            if rank.join(within_s=PATIENCE_S):
                raise LabError(rank.shown)
        answers = [rank.reports[-1] for rank in running]
    return answers, np.load(folder / f"{way} 0.npy")


def measure_all(width: int) -> tuple[dict[str, dict[str, int]], dict[str, np.ndarray[Any, Any]]]:
    """For each way the most that a rank took, in bytes, and the weights in the end."""
    found: dict[str, dict[str, int]] = {}
    weights: dict[str, np.ndarray[Any, Any]] = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "home").mkdir(mode=0o700)
            answers, weights[way] = measure(way, width, Path(folder))
        found[way] = {key: max(each[key] for each in answers) for key in answers[0]}
    return found, weights


def run(*, width: int = 1024) -> None:
    """How much memory each way to train takes, beside plain training.

    Args:
        width: Of each matrix.
    """
    found, weights = measure_all(width)
    plain = found["plain"]
    parameters = math.prod(weights["plain"].shape)
    print(
        f"{parameters} parameters, {BLOCKS} blocks, buckets of {bucket_bytes(width) / 2**20:g} MiB"
    )
    for way, its in found.items():
        peak = its["mlx"] + its["numpy"]
        off = np.abs(weights[way] - weights["plain"]).max()
        print(
            f"{way}: peak {peak / 2**20:.1f} MiB (MLX {its['mlx'] / 2**20:.1f}, numpy "
            f"{its['numpy'] / 2**20:.1f}), {peak / (plain['mlx'] + plain['numpy']):.3f} of plain; "
            f"optimizer {its['state'] / plain['state']:.4f} of plain; weights off by {off:.2g} "
            f"after {STEPS} steps"
        )
