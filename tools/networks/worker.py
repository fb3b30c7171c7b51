"""One rank that averages gradients without end; each step is a line of JSON on standard output."""

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np

from tools.bench.worker import join_gloo
from tools.networks.results import StepLine

Step: TypeAlias = Callable[[], int]
"""Makes a step and returns how many ranks took part."""


def say(line: StepLine) -> None:
    """In one write: lines of threads don't mix."""
    os.write(1, msgspec.json.encode(line) + b"\n")


class Warnings(logging.Handler):
    """Passes on what pmesh says on the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        say(StepLine(what="said", at=time.monotonic(), says=record.getMessage()))


def step_of_pmesh(size: int, count: int, *, sync: bool) -> Step:
    import pmesh  # noqa: PLC0415 - a worker imports one library

    logger = logging.getLogger("pmesh")
    logger.addHandler(Warnings())
    logger.propagate = False
    mesh = pmesh.connect(job="networks", wait_for=size)
    gradients = np.ones(count, np.float32)
    state: dict[str, Any] = {"step": 0}

    def step() -> int:
        nonlocal state
        try:
            if sync:
                state = mesh.sync(state)
            mean = mesh.average_gradients(gradients)
        except pmesh.HistorySuperseded as e:
            say(StepLine(what="error", at=time.monotonic(), says=f"{type(e).__name__}: {e}"))
            return mesh.size
        if mean[0] != 1 or mean[-1] != 1:
            raise RuntimeError(f"the mean of ones is {mean[0]}, {mean[-1]}")
        state = {"step": state["step"] + 1}
        return mesh.size

    return step


def step_of_gloo(rank: int, size: int, count: int) -> Step:
    gloo = join_gloo(rank, size)
    gradients = gloo.own(np.ones(count, np.float32))

    def step() -> int:
        gloo.all_reduce(gradients)
        gradients.div_(size)
        return size

    return step


def work(system: str, rank: int, size: int, nbytes: int, sync: bool) -> None:  # noqa: FBT001 - of JSON
    """Make steps until the process is killed; only pmesh's ranks sync."""
    count = nbytes // 4
    if system == "pmesh":
        step = step_of_pmesh(size, count, sync=sync)
    else:
        step = step_of_gloo(rank, size, count)
    say(StepLine(what="joined", at=time.monotonic()))
    while True:
        began = time.monotonic()
        try:
            ranks = step()
        except Exception as e:  # noqa: BLE001 - the measurement reports it
            say(StepLine(what="error", at=time.monotonic(), says=f"{type(e).__name__}: {e}"))
            sys.exit(1)
        say(
            StepLine(what="step", at=time.monotonic(), took_s=time.monotonic() - began, ranks=ranks)
        )
