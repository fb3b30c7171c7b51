"""What it would cost to keep the activations of a pipeline's step in `mesh.store`.

The alternative is what `ElasticPipeline` does: after a loss all ranks compute the step again. The
model and its imitated computation are those of `pipeline-speed`, on three hosts, so that each
message has two other machines that keep it. The same processes make steps without the store and
with it, in turns. A thread of each rank writes to the store, so that a write delays a step only by
what it takes of the line and of the processor.
"""

import json
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

import pmesh
from pmesh.mlx import Pipeline, split_layers
from tools.lab.call import words_for
from tools.lab.net import NetLab
from tools.pipeline_speed import (
    MICRO_BATCHES,
    ONE_THREAD,
    ROWS,
    WIDTH,
    SleepingLayer,
    result_of,
    slow_mesh,
)

RANKS, LAYERS = 3, 6
WAYS = ("direct", "store")


class Keeping:
    """A mesh whose messages are also written to its store, until the step has ended."""

    def __init__(self, mesh: pmesh.Mesh) -> None:
        self._mesh = mesh
        self._pool = ThreadPoolExecutor(1)
        self._writes = list[Future[str]]()
        self.nbytes = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a mesh has
        return getattr(self._mesh, name)

    def send(self, x: mx.array, to: int, tag: int, *more: Any, **options: Any) -> Any:  # noqa: ANN401
        self._writes.append(self._pool.submit(self._keep, f"{to}/{tag}", np.array(x).tobytes()))
        return self._mesh.send(x, to, tag, *more, **options)

    def _keep(self, key: str, value: bytes) -> str:
        self._mesh.store.set(key, value)
        self.nbytes += len(value)
        return key

    def end_step(self) -> None:
        for write in self._writes:
            self._mesh.store.delete(write.result())
        self._writes.clear()


def work(rounds: int, sleeps_s: float) -> None:
    """Be one rank; print the seconds of each step, and the bytes that one step has kept."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS * MICRO_BATCHES, WIDTH)).astype(np.float32)
    batch = mx.array(x), mx.array(np.sin(x))
    with pmesh.connect(job="pipeline-store", wait_for=RANKS) as mesh:
        layers = [SleepingLayer(np.ones(WIDTH, np.float32), sleeps_s) for _ in range(LAYERS)]
        keeping: Any = Keeping(mesh)
        stage = split_layers(layers, mesh, by=[LAYERS // RANKS] * RANKS)
        direct, kept = (
            Pipeline(stage, over, nn.losses.mse_loss, micro_batch_size=ROWS, recompute=False)
            for over in (mesh, keeping)
        )
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):  # the first one warms up
            for way, pipeline in zip(WAYS, (direct, kept), strict=True):
                mesh.barrier()
                began = time.perf_counter()
                pipeline.step(*batch)
                if way == "store":
                    keeping.end_step()
                mesh.barrier()
                if number:
                    seconds[way].append(time.perf_counter() - began)
        nbytes = keeping.nbytes / (rounds + 1)
        print(json.dumps({"seconds": seconds, "nbytes": nbytes}), flush=True)


def measure(*, rounds: int = 5, mbit: int = 200, sleeps_ms: float = 20.0) -> None:
    """Print the medians of a step with and without the store, and when the store would pay.

    Args:
        rounds: how many steps each makes.
        mbit: the speed of each host's line.
        sleeps_ms: what the forward pass of a layer takes.
    """
    with slow_mesh(NetLab(RANKS), mbit) as mesh:
        words = words_for(work, rounds, sleeps_ms / 1e3)
        ranks = [mesh.start_program(node, *words, variables=ONE_THREAD) for node in mesh.nodes]
        results = [result_of(rank) for rank in ranks]
    seconds = results[0]["seconds"]
    direct_s, store_s = (statistics.median(seconds[way]) for way in WAYS)
    kept = sum(result["nbytes"] for result in results)
    for way in WAYS:
        times = seconds[way]
        print(f"{way}: {statistics.median(times):.3f} s, {min(times):.3f} to {max(times):.3f}")
    print(
        f"a step's messages: {kept / 1e6:.1f} MB, each of which goes to {RANKS - 1} more machines"
    )
    more_s = store_s - direct_s
    print(f"the store adds {more_s:.3f} s to each step; a loss costs one: {direct_s:.3f} s")
    print(f"it would pay if a machine were lost every {direct_s / more_s:.1f} steps")
