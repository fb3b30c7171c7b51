"""What pmesh does to memory and to its own event loop while ops run for a while."""

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import psutil

from tools.bench.cases import GROWTH, LAG_P99, PSS, Case
from tools.bench.measuring import VALUE_BYTES, Taken, turn_of
from tools.bench.results import BenchTurn, Order
from tools.bench.systems import RunningSystem, place_of, start_pmesh
from tools.lab.units import KIB, MIB, percentile

SAMPLE_S = 0.2
BATCHES = 20
TOGETHER = 4  # ops of 256 MiB whose results wait for their check, in which the agents idle
LEAST_TICKS = 20
# Each agent writes how late each of its ticks came, ten a second. The agent judges the silence of
# peers by the same ticks (pmesh/net/sessions/processes.py).
LOG_TICKS = """
import pmesh.net.sessions.processes as stalls
from os import environ
from pathlib import Path
from typing import Self
ticks = Path(environ["PMESH_HOME"], "ticks").open("w", buffering=1)
judged = stalls.own_stall
def own_stall(before, after, *, expected_s):
    stall = judged(before, after, expected_s=expected_s)
    ticks.write(f"{after.awake_s} {stall.late_s}\\n")
    return stall
stalls.own_stall = own_stall
"""


def soak(case: Case, op_bytes: int, ops: int) -> Taken:
    """So many ops one after the other; what they took, and what the case asks for."""
    patch = LOG_TICKS if case.kind == "lag" else ""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        place_of(case) as place,
        contextlib.ExitStack() as stack,
    ):
        pmesh = start_pmesh(place, Path(folder), stack, patch=patch)
        measure = _measure_memory if case.kind == "memory" else _measure_lag
        turns, facts = measure(pmesh, op_bytes, ops)
        rounds = tuple({"pmesh": turn} for turn in turns)
        return Taken(op_bytes=op_bytes, rounds=rounds, ceiling=(), facts=facts)


def _run(
    pmesh: RunningSystem,
    op_bytes: int,
    ops: int,
    *,
    together: int | None = None,
    after_each: Callable[[int], None] = lambda _: None,
) -> list[BenchTurn]:
    """In batches, so that a hang is noticed."""
    turns: list[BenchTurn] = []
    done = 0
    while done < ops:
        times = min(max(together or 1, ops // BATCHES), ops - done)
        count = op_bytes // VALUE_BYTES
        order = Order(what="all_reduce", count=count, times=times, together=together)
        turns.append(turn_of(order, pmesh.carry_out(order)))
        done += times
        after_each(done)
    return turns


def _measure_memory(
    pmesh: RunningSystem, op_bytes: int, ops: int
) -> tuple[list[BenchTurn], dict[str, float]]:
    """The most at any time, and the growth from the first tenth of the ops to the last."""
    processes = [
        [psutil.Process(node.pid), psutil.Process(worker.pid)]
        for node, worker in zip(pmesh.nodes, pmesh.workers, strict=True)
    ]
    between: list[tuple[int, float]] = []

    def note(done: int) -> None:
        between.append((done, sampler.measure()))

    with Sampler(lambda: max(sum(map(pss_bytes, pair)) for pair in processes)) as sampler:
        turns = _run(pmesh, op_bytes, ops, after_each=note)
    # The caller's own: what the worker fills each input with, what it compares each result with,
    # the input and the result.
    callers = 4 * op_bytes
    first = statistics.median(size for done, size in between if ops // 10 <= done <= 3 * ops // 10)
    last = statistics.median(size for done, size in between if done >= 8 * ops // 10)
    apart = 7 * ops // 10
    return turns, {
        PSS: round((max(sampler.sizes) - callers) / MIB, 1),
        GROWTH: round((last - first) / apart / KIB, 2),
        "ops": float(ops),
    }


def _measure_lag(
    pmesh: RunningSystem, op_bytes: int, ops: int
) -> tuple[list[BenchTurn], dict[str, float]]:
    _run(pmesh, op_bytes, TOGETHER)  # arenas are faulted in
    began = time.clock_gettime(time.CLOCK_MONOTONIC)
    turns, late_ms = list[BenchTurn](), list[float]()
    while len(late_ms) < LEAST_TICKS:
        turns += _run(pmesh, op_bytes, ops, together=TOGETHER)
        until = time.clock_gettime(time.CLOCK_MONOTONIC)
        ticks = [
            line.split()
            for node in pmesh.nodes
            for line in (node.home / "ticks").read_text().splitlines()
        ]
        late_ms = [float(late) * 1e3 for at, late in ticks if began <= float(at) <= until]
    return turns, {
        LAG_P99: round(percentile(late_ms, 99), 2),
        "loop lag median, ms": round(statistics.median(late_ms), 2),
        "loop lag most, ms": round(max(late_ms), 2),
        "ticks": float(len(late_ms)),
        "ops": float(sum(turn.calls for turn in turns)),
    }


def pss_bytes(process: psutil.Process) -> float:
    """Each page counted once, over all who share it; where that is not known, the unshared."""
    memory = process.memory_full_info()
    return float(getattr(memory, "pss", memory.uss))


class Sampler:
    """Measures again and again, in a thread, from `with` to its end."""

    def __init__(self, measure: Callable[[], float]) -> None:
        self.measure = measure
        self.sizes: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        is_over = False
        while not is_over:  # at least once: a short form may take less than SAMPLE_S
            self.sizes.append(self.measure())
            is_over = self._ended.wait(SAMPLE_S)
