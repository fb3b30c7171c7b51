"""What `pmesh trace` costs an op: while agents keep the times of ops, and while one is asked.

Two agents on loopback have a rank each. The same processes run blocks of ops in turns: agents keep
no times, which a patch makes them do; they keep them, as all agents do; and one is asked for the
last minute, again and again. Times of one kind are compared among themselves, too: that is how far
apart two series lie that have no reason to.
"""

import json
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import numpy as np

import pmesh
from pmesh.client.session.connection import AgentConnection
from pmesh.ids import JobName
from pmesh.traces.wire import TRACE_REPLIES, AskTrace, Traced
from tools.lab.call import words_for
from tools.lab.mesh import LabMesh
from tools.lab.program import LabProgram
from tools.lab.units import KIB, MIB

JOB: Final = "traced"
SECONDS: Final = 60.0
SIZES: Final = {"4 KiB": 4 * KIB, "1 MiB": MIB}
WITHOUT, KEPT, ASKED = "no times kept", "times kept", "asked for them"
BARS: Final = {KEPT: 1.01, ASKED: 1.03}
KEEP, DROP = signal.SIGUSR1, signal.SIGUSR2
PATCH: Final = f"""
import signal
from pmesh.core.jobs.op_times import RankTimes
note = RankTimes.note
def turn(number, _):
    RankTimes.note = note if number == {KEEP:d} else (lambda *_, **__: None)
signal.signal({KEEP:d}, turn)
signal.signal({DROP:d}, turn)
"""


def run(*, rounds: int = 40, calls: int = 100) -> int:
    """What `pmesh trace` adds to an op of 4 KiB and of 1 MiB: medians of blocks, in turns.

    Args:
        rounds: Of all kinds of blocks.
        calls: Of each size in a block.

    Returns:
        1 if a bar was missed.
    """
    took: dict[str, list[dict[str, float]]] = {kind: [] for kind in (WITHOUT, KEPT, ASKED)}
    with LabMesh(2, patch=PATCH) as mesh:
        mesh.start_agents()
        mesh.await_view()
        ranks = [
            LabProgram.start(
                f"rank at {node.name}",
                [sys.executable, *words_for(worker, calls)],
                environment=node.environment,
                told=True,
            )
            for node in mesh.nodes
        ]
        mesh.programs.extend(ranks)  # it ends them
        _block(ranks)  # buffers are made, and the strategy is chosen
        for number in range(rounds):
            for place in range(len(took)):
                kind = list(took)[(number + place) % len(took)]
                for node in mesh.nodes:
                    node.send(DROP if kind == WITHOUT else KEEP, ("agent",))
                with _asking(mesh.nodes[0].home, wanted=kind == ASKED):
                    took[kind].append(_block(ranks))
    met = True
    for size in SIZES:
        series = {kind: [block[size] for block in blocks] for kind, blocks in took.items()}
        without, others = statistics.median(series[WITHOUT]), series[WITHOUT][1::2]
        apart = statistics.median(others or [without]) / statistics.median(series[WITHOUT][::2])
        print(f"{size}: {without * 1e6:.0f} µs with {WITHOUT}; its halves: {apart:.3f}")
        for kind, bar in BARS.items():
            ratio = statistics.median(series[kind]) / without
            met = met and ratio <= bar
            print(f"{size}, {kind}: {ratio:.3f} (bar {bar})")
    return int(not met)


def _block(ranks: list[LabProgram]) -> dict[str, float]:
    for rank in ranks:
        rank.tell("go")
    lines = (next(line for line in iter(rank.hear, "") if line.startswith("{")) for rank in ranks)
    first, second = (json.loads(line) for line in lines)
    return {size: max(first[size], second[size]) for size in SIZES}


@contextmanager
def _asking(home: Path, *, wanted: bool) -> Iterator[None]:
    enough = threading.Event()

    def ask() -> None:
        while not enough.is_set():
            with closing(AgentConnection(home, TRACE_REPLIES)) as connection:
                connection.send(AskTrace(JobName(JOB), SECONDS))
                while not isinstance(connection.receive(), Traced):
                    pass

    thread = threading.Thread(target=ask)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        enough.set()
        if wanted:
            thread.join()


def worker(calls: int) -> None:
    """One rank: for each line that it reads a block of ops, and their medians in seconds."""
    arrays = {name: np.ones(size // 4, np.float32) for name, size in SIZES.items()}
    with pmesh.connect(job=JOB, wait_for=2) as mesh:
        for _ in sys.stdin:
            medians: dict[str, float] = {}
            for name, array in arrays.items():
                mesh.barrier()
                times: list[float] = []
                for _ in range(calls):
                    began = time.perf_counter()
                    mesh.all_reduce(array, "mean", out=array)
                    times.append(time.perf_counter() - began)
                medians[name] = statistics.median(times)
            print(json.dumps(medians), flush=True)
