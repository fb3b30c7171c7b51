"""Lines by the ten thousand, and terminals that read slowly or not at all."""

import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final, Literal, TypeAlias

import psutil

from tools.lab.campaign import CampaignRun, Tally
from tools.lab.commands import LabError
from tools.lab.mesh import Node
from tools.lab.program import await_that
from tools.lab.units import MIB
from tools.launches.house import House

LINES_PER_S, SHORT_LINES_PER_S = 10_000, 2000
PATIENCE_S = 120.0
PADDING = "x" * 60
SLOW_BYTES_PER_S = 1000

# Prints so many lines a second for so many seconds, each with its number.
FLOOD = f"""
import sys, time
rate, count = int(sys.argv[1]), int(sys.argv[1]) * int(sys.argv[2])
began = time.monotonic()
for first in range(0, count, rate // 100):
    lines = [f"{{i}} {PADDING}\\n" for i in range(first, min(first + rate // 100, count))]
    sys.stdout.write("".join(lines))
    sys.stdout.flush()
    time.sleep(max(0.0, began + (first + rate // 100) / rate - time.monotonic()))
print(f"took {{time.monotonic() - began:.2f}}", file=sys.stderr, flush=True)
"""

# Sums over all ranks, with 20 lines in each step; writes its steps per second into a file.
STEPS = f"""
import sys, time, numpy, pathlib, pmesh
with pmesh.connect() as mesh:
    value, steps = numpy.ones(1000), 0
    mesh.all_reduce(value)
    began = time.monotonic()
    while mesh.all_reduce(numpy.array(time.monotonic() - began < {{seconds}}), "min"):
        mesh.all_reduce(value)
        steps += 1
        print("\\n".join(f"{{{{steps}}}} {PADDING}" for _ in range(20)), flush=True)
    if mesh.rank == 0:
        pathlib.Path(sys.argv[1]).write_text(str(steps / (time.monotonic() - began)))
"""


@dataclass(slots=True)
class MostMemory:
    """The most memory that some processes have held, in bytes, and what they held at first."""

    first: dict[str, int] = field(default_factory=dict[str, int])
    most: dict[str, int] = field(default_factory=dict[str, int])

    def look(self, pids: dict[str, int]) -> None:
        for name, pid in pids.items():
            try:
                memory = psutil.Process(pid).memory_info()
            except psutil.NoSuchProcess:
                continue
            held = memory.rss - memory.shared  # a fork's shared pages are no memory of its own
            self.first.setdefault(name, held)
            self.most[name] = max(self.most.get(name, 0), held)

    def growth(self, names: Sequence[str]) -> int:
        """The most that one of these has grown by."""
        return max(self.most[name] - self.first[name] for name in names)


@contextmanager
def _watched(pids: dict[str, int]) -> Iterator[MostMemory]:
    memory, over = MostMemory(), threading.Event()

    def watch() -> None:
        while not over.wait(0.25):
            memory.look(pids)

    memory.look(pids)
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield memory
    finally:
        over.set()
        thread.join()


def _agents(house: House) -> dict[str, int]:
    return {node.name: node.agent.pid for node in house.nodes if node.agent is not None}


def run_flood(run: CampaignRun) -> Tally:
    """Each machine prints so many lines a second, `--episodes` seconds; compare every line."""
    lines_per_s = SHORT_LINES_PER_S if run.short else LINES_PER_S
    with House(4, logs=run.logs) as house:
        command = (sys.executable, "-c", FLOOD, str(lines_per_s), str(run.episodes))
        began = time.monotonic()
        with _start(house.nodes[0], command, subprocess.PIPE) as launch:
            pids = _agents(house) | {"starter": launch.pid}
            with _watched(pids) as memory:
                found = _read(launch, house, lines_per_s * run.episodes)
                code = launch.wait(PATIENCE_S)
        if code:
            found.wrong.append(f"exit code {code}")
        return Tally(
            ops_checked=found.lines,
            violations=found.wrong,
            facts={
                "lines printed": 4 * lines_per_s * run.episodes,
                "lost, torn, or out of order": 4 * lines_per_s * run.episodes - found.lines,
                "the slowest rank took, s": max(found.ranks_s, default=0.0),
                "until all was printed, s": time.monotonic() - began,
                "an agent grew by, MiB": memory.growth([n.name for n in house.nodes]) / MIB,
                "most memory of the starter, MiB": memory.most["starter"] / MIB,
            },
        )


@dataclass(slots=True)
class _Found:
    lines: int = 0
    ranks_s: list[float] = field(default_factory=list[float])
    wrong: list[str] = field(default_factory=list[str])


def _read(run: "subprocess.Popen[bytes]", house: House, count: int) -> _Found:
    """Every line of a machine must be the one after its last."""
    found, following = _Found(), {f"{node.name}".encode(): 0 for node in house.nodes}
    assert run.stdout is not None  # noqa: S101 - it was started with a pipe
    for line in run.stdout:
        if line.startswith(b"runs on "):  # what `pmesh run` says at the start
            continue
        name, _, text = line.rstrip(b"\n").partition(b" | ")
        if text.startswith(b"took "):
            found.ranks_s.append(float(text.split()[1]))
        elif text == b"%d %b" % (following.get(name, -1), PADDING.encode()):
            following[name] += 1
            found.lines += 1
        else:
            found.wrong.append(f"after line {following.get(name)}: {line[:100]!r}")
    found.wrong += [f"{name!r} ends at {n}" for name, n in following.items() if n != count]
    return found


Terminal: TypeAlias = Literal["reads", "slow", "stopped"]
TERMINALS: Final[dict[Terminal, str]] = {
    "reads": "reads at once",
    "slow": "reads 1 kB/s",
    "stopped": "`pmesh run` is stopped (SIGSTOP)",
}


def run_terminals(run: CampaignRun) -> Tally:
    """Train behind each kind of terminal, in turns; `--episodes` of each."""
    speeds: dict[Terminal, list[float]] = {kind: [] for kind in TERMINALS}
    with (
        tempfile.TemporaryDirectory(prefix="launches-") as folder,
        House(3, logs=run.logs) as house,
    ):
        for _ in range(run.episodes):
            for kind, found in speeds.items():
                seconds = 1.0 if run.short else 8.0
                found.append(steps_per_s(house, kind, seconds=seconds, folder=Path(folder)))
    facts = {f"steps/s, {what}": median(speeds[kind]) for kind, what in TERMINALS.items()}
    return Tally(ops_checked=run.episodes, facts=facts)


def steps_per_s(house: House, terminal: Terminal, *, seconds: float, folder: Path) -> float:
    """Train with this terminal, and return how many steps a second the ranks have made."""
    result = folder / "steps"
    result.unlink(missing_ok=True)
    command = (sys.executable, "-c", STEPS.format(seconds=seconds), str(result))
    ours, theirs = pty.openpty()
    try:
        with _start(house.nodes[0], command, theirs) as run:
            os.close(theirs)
            begun, over = threading.Event(), threading.Event()
            reader = threading.Thread(target=_read_terminal, args=(ours, terminal, begun, over))
            reader.start()
            try:
                if not begun.wait(PATIENCE_S):
                    raise LabError("the ranks have printed nothing")
                if terminal == "stopped":
                    run.send_signal(signal.SIGSTOP)
                await_that(result.exists, "the end of the training", within_s=seconds + PATIENCE_S)
                await_that(lambda: result.read_text() != "", "its result", within_s=PATIENCE_S)
            finally:
                over.set()
                run.kill()
                reader.join()
    finally:
        os.close(ours)
    await_that(lambda: not house.left(), "the end of all", within_s=PATIENCE_S)
    return float(result.read_text())


def _read_terminal(
    terminal: int, kind: Terminal, begun: threading.Event, over: threading.Event
) -> None:
    pause_s = 0.1 if kind == "slow" else 0.0
    while not over.wait(pause_s):
        try:
            if not os.read(terminal, int(SLOW_BYTES_PER_S * pause_s) or 65536):
                return
            begun.set()
        except OSError:  # nobody has it open any more
            return


@contextmanager
def _start(
    starter: Node, command: Sequence[str], output: int
) -> Iterator["subprocess.Popen[bytes]"]:
    run = subprocess.Popen(
        starter.host.command(
            [sys.executable, "-m", "pmesh.cli", "run", "--on", "all", "--", *command]
        ),
        env=starter.environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output if output >= 0 else subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield run
    finally:
        run.kill()
        run.wait()
