"""Measures what an asynchronous save of a large state costs a step.

One rank, which writes all of the state, trains without saving and with a save under way, in turns
in one run. The steps multiply matrices on all cores. It prints the median step of both, the step
in which `save` was called, and what the save cost in all, as a part of the time that it took.

Run: python -m tools.bench_checkpoints [numpy|mlx] [MB] [FOLDER]
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import pmesh
from pmesh.testing import SimulatedMesh

ARRAYS = 64
STEP_S = 0.5  # what a step is made to take, at least
ROUNDS = 1
QUIET_STEPS = 12
LONGEST_STEPS = 60


def main() -> None:
    library, megabytes, folder = [*sys.argv[1:], *("numpy", "2000", "")[len(sys.argv) - 1 :]]
    with tempfile.TemporaryDirectory(dir=folder or None) as into:
        SimulatedMesh(1).run(lambda mesh: measure(mesh, library, int(megabytes), Path(into)))


def measure(mesh: pmesh.Mesh, library: str, megabytes: int, folder: Path) -> None:
    state = make_state(library, megabytes)
    step = make_step()
    for copy in (True, False):
        with pmesh.Checkpoints(folder, mesh, keep=1, every_s=0) as checkpoints:
            checkpoints.save(state, 0, copy=copy)  # the first one faults memory in
            checkpoints.wait()
            for _ in range(ROUNDS):
                report(f"{library}, copy={copy}", checkpoints, state, step, copy=copy)


def report(
    name: str,
    checkpoints: pmesh.Checkpoints,
    state: object,
    step: Callable[[], float],
    *,
    copy: bool,
) -> None:
    quiet = [step() for _ in range(QUIET_STEPS)]
    began = time.perf_counter()
    checkpoints.save(state, 1, copy=copy)
    call_s = time.perf_counter() - began
    busy = [step()]
    while checkpoints.is_saving and len(busy) < LONGEST_STEPS:
        busy.append(step())
    whole = not checkpoints.is_saving
    checkpoints.wait()
    plain = statistics.median(quiet)
    total = call_s + sum(busy) - len(busy) * plain
    print(
        f"{name}: a step {plain:.3f} s, while saving {statistics.median(busy):.3f} s "
        f"({statistics.median(busy) / plain - 1:+.1%}); save() {call_s:.3f} s; in all "
        f"{total:+.2f} s in {len(busy)} steps ({total / (len(busy) * plain):+.1%})"
        f"{'' if whole else ', and the save had not ended'}",
        flush=True,
    )


def make_state(library: str, megabytes: int) -> dict[str, Any]:
    size = megabytes * 1_000_000 // ARRAYS // 4
    arrays: dict[str, Any] = {f"layer{i}": np.full(size, i, np.float32) for i in range(ARRAYS)}
    if library == "mlx":
        import mlx.core as mx  # noqa: PLC0415 - only if asked for

        arrays = {name: mx.array(array) for name, array in arrays.items()}
        mx.eval(*arrays.values())
    return arrays


def make_step() -> Callable[[], float]:
    """Multiplications on all cores that take at least STEP_S together."""
    x = np.random.default_rng(0).random((1024, 1024), np.float32)

    def multiply(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            x @ x
        return time.perf_counter() - began

    multiply(3)
    times = max(1, int(STEP_S / (multiply(10) / 10)))
    return lambda: multiply(times)


if __name__ == "__main__":
    main()
