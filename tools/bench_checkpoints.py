"""Measures what an asynchronous save of a large state costs a step.

One rank, which writes all of the state, trains without saving and with a save under way, in turns
in one run. The steps multiply matrices on all cores. It prints the median step of both, how long
`save` took, and what the saves cost in all, as a part of the time that they took. A machine whose
speed drifts by some percent needs several rounds: take a smaller state for more of them.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

import pmesh
from pmesh.testing import SimulatedMesh

ARRAYS = 64
STEP_S = 0.5  # what a step is made to take, at least
QUIET_STEPS = 12
LONGEST_STEPS = 240


def run(
    library: Literal["numpy", "mlx"] = "numpy",
    megabytes: int = 2000,
    folder: str = "",
    rounds: int = 1,
) -> None:
    """What an asynchronous save of a large state costs a step.

    Args:
        library: Of the arrays.
        megabytes: Of the state.
        folder: Where it is saved, if not where temporary files are.
        rounds: How many.
    """
    with tempfile.TemporaryDirectory(dir=folder or None) as into:
        SimulatedMesh(1).run(lambda mesh: measure(mesh, library, megabytes, Path(into), rounds))


def measure(mesh: pmesh.Mesh, library: str, megabytes: int, folder: Path, rounds: int) -> None:
    state = make_state(library, megabytes)
    step = make_step()
    for copy in (True, False):
        with pmesh.Checkpoints(folder, mesh, keep=1, every_s=0) as checkpoints:
            checkpoints.save(state, 0, copy=copy)  # the first one faults memory in
            checkpoints.wait()
            turns = [take_turn(checkpoints, state, step, copy=copy) for _ in range(rounds)]
        report(f"{library}, copy={copy}", turns)


class Save(NamedTuple):
    """Seconds of each step without a save, of `save` itself, and of each step while it writes."""

    quiet: list[float]
    call_s: float
    busy: list[float]


def take_turn(
    checkpoints: pmesh.Checkpoints, state: object, step: Callable[[], float], *, copy: bool
) -> Save:
    quiet = [step() for _ in range(QUIET_STEPS)]
    began = time.perf_counter()
    checkpoints.save(state, 1, copy=copy)
    call_s = time.perf_counter() - began
    busy = [step()]
    while checkpoints.is_saving and len(busy) < LONGEST_STEPS:
        busy.append(step())
    checkpoints.wait()
    return Save(quiet, call_s, busy)


def report(name: str, turns: Sequence[Save]) -> None:
    plain = statistics.median(s for turn in turns for s in turn.quiet)
    saving = statistics.median(s for turn in turns for s in turn.busy)
    call_s = statistics.median(turn.call_s for turn in turns)
    count = sum(len(turn.busy) for turn in turns)
    total = sum(turn.call_s + sum(turn.busy) for turn in turns) - count * plain
    print(
        f"{name}: a step {plain:.3f} s, while saving {saving:.3f} s ({saving / plain - 1:+.1%}); "
        f"save() {call_s:.3f} s; in all {total:+.2f} s in {count} steps "
        f"({total / (count * plain):+.1%})",
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
