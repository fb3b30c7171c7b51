"""`make demo`: three agents and three trainers on this machine train a real model together.

It shows the ring while it trains, then compares the weights with those of the same training in one
process, and exits 0 only if they agree. Everything happens in `.demo` inside the clone, under a
mesh key of its own; nothing is left behind.
"""

import contextlib
import itertools
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn, Self

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pmesh.agent.schema import Status, decode_status
from pmesh.cli.ring import draw_ring, nodes_of
from pmesh.cli.sizes import bytes_text
from pmesh.client.control import ask_status
from pmesh.errors import PmeshError
from pmesh.home_paths import socket_path
from tools.lab.agents import await_status, inherited, new_key

CLONE = Path(__file__).resolve().parent.parent
NAMES = ("mac-1", "mac-2", "mac-3")
MAX_DIFFERENCE = 1e-5
MIN_ACCURACY = 0.95
STEPS = 300  # 20 epochs of 15 batches, as tools/demo_training.py says at its end
MEET_S = 8.0  # agents that hear each other's multicast meet within 2 s
PATIENCE_S = 45.0
FRAME_S = 0.1

console = Console()


class DemoError(Exception):
    """What went wrong, for the last line."""


@dataclass(slots=True)
class Trainer:
    """A training process, and what it has said so far."""

    process: subprocess.Popen[str]
    said: dict[str, Any] = field(default_factory=dict[str, Any])
    other: list[str] = field(default_factory=list[str])

    def listen(self) -> None:
        """Read its lines until it ends; each is one JSON object."""
        assert self.process.stdout is not None  # noqa: S101 - it was started with a pipe
        for line in self.process.stdout:
            try:
                self.said |= json.loads(line)
            except ValueError:
                self.other.append(line.rstrip())


class Demo:
    """Processes of the demo, each in its own group, all ended when the block is left."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._key = new_key()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.directory.mkdir(mode=0o700)
        self._stack.callback(shutil.rmtree, self.directory)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def home(self, name: str) -> Path:
        return self.directory / name

    def start(
        self, command: Sequence[str], *, name: str, output: IO[str] | int
    ) -> subprocess.Popen[str]:
        """Start a process that reaches the agent of this name."""
        process = subprocess.Popen(
            [sys.executable, *command],
            env=inherited() | {"PMESH_HOME": str(self.home(name)), "PMESH_KEY": self._key},
            stdin=subprocess.DEVNULL,
            text=True,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches only us, and we end them in order
        )
        self._stack.callback(_end, process)
        return process

    def start_agents(self, *, multicast: bool) -> list[subprocess.Popen[str]]:
        """Three agents that look for each other by mDNS, or all for the first."""
        if multicast:
            return [self.start_agent(name) for name in NAMES]
        agents = [self.start_agent(NAMES[0], "--no-mdns")]
        peer = ("--no-mdns", "--peer", self._first_address())
        return agents + [self.start_agent(name, *peer) for name in NAMES[1:]]

    def start_agent(self, name: str, *options: str) -> subprocess.Popen[str]:
        """One agent at a port of its own."""
        self.home(name).mkdir(mode=0o700, exist_ok=True)
        up = ["-m", "pmesh.cli", "up", "--name", name, "--listen", "127.0.0.1:0", *options]
        with (self.directory / f"{name}.log").open("a") as log:
            agent = self.start(up, name=name, output=log)
        self._stack.callback(self._forget_socket, name)
        return agent

    def status(self, name: str) -> Status | None:
        """The agent's picture; None while it does not answer."""
        try:
            return decode_status(ask_status(self.home(name), timeout_s=2.0))
        except PmeshError:
            return None

    def all_meet(self, within_s: float) -> bool:
        """Whether all agents come to be in one view within this time."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            views = [status.view for name in NAMES if (status := self.status(name))]
            epochs = {(view.epoch.counter, view.epoch.leader) for view in views}
            if [len(view.members) for view in views] == [len(NAMES)] * len(NAMES):
                return len(epochs) == 1
            time.sleep(FRAME_S)
        return False

    def start_trainer(self, name: str, *options: str) -> Trainer:
        """A training process; what it says is read in a thread."""
        script = str(CLONE / "tools" / "demo_training.py")
        process = self.start([script, *options], name=name, output=subprocess.PIPE)
        trainer = Trainer(process)
        threading.Thread(target=trainer.listen, daemon=True).start()
        return trainer

    def log_of(self, name: str) -> str:
        """The last lines of an agent, for who wants to know what went wrong."""
        return "\n".join((self.directory / f"{name}.log").read_text().splitlines()[-10:])

    def _first_address(self) -> str:
        found = await_status(self.home(NAMES[0]), bool, within_s=PATIENCE_S)
        if found is None:
            raise DemoError(f"the first agent did not start:\n{self.log_of(NAMES[0])}")
        return str(found["node"]["addresses"][0])

    def _forget_socket(self, name: str) -> None:
        """Of a killed agent in a deep clone, whose socket lies outside it."""
        path = socket_path(self.home(name))
        path.unlink(missing_ok=True)
        if path.parent != self.home(name):
            with contextlib.suppress(OSError):  # other agents of this user live there
                path.parent.rmdir()


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def meet(demo: Demo) -> list[subprocess.Popen[str]]:
    """Have the three agents find each other; say how."""
    console.print("Starting three agents, each with a home and a port of its own …")
    agents = demo.start_agents(multicast=True)
    if demo.all_meet(MEET_S):
        console.print("They found each other by mDNS, and agreed on a ring.")
        return agents
    console.print("Multicast does not work on this machine's loopback: once more with --peer …")
    for agent in agents:
        _end(agent)
    agents = demo.start_agents(multicast=False)
    if not demo.all_meet(PATIENCE_S):
        logs = "\n".join(f"--- {name}\n{demo.log_of(name)}" for name in NAMES)
        raise DemoError(f"the agents did not come together:\n{logs}")
    console.print("They met at the first one's address, and agreed on a ring.")
    return agents


def watch(demo: Demo, trainers: Sequence[Trainer]) -> None:
    """Show the ring and the progress until the trainers have ended."""
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    task = progress.add_task("training", total=STEPS, loss="…")
    deadline = time.monotonic() + PATIENCE_S
    with Live(console=console, refresh_per_second=10, transient=False) as live:
        for beat in itertools.count():
            said = trainers[0].said
            if "loss" in said:
                progress.update(task, completed=said["step"], loss=f"{said['loss']:.4f}")
            live.update(_frame(demo, progress, beat))
            ended = [trainer.process.poll() for trainer in trainers]
            if None not in ended:
                break
            if any(ended) or time.monotonic() > deadline:
                break
            time.sleep(FRAME_S)
    for rank, trainer in enumerate(trainers):
        if trainer.process.poll() != 0:
            raise DemoError(f"trainer {rank} failed:\n" + "\n".join(trainer.other[-15:]))


def _frame(demo: Demo, progress: Progress, beat: int) -> RenderableType:
    status = demo.status(NAMES[0])
    if status is None:
        return progress
    return Group("", draw_ring(nodes_of(status), width=console.width, beat=beat), "", progress)


def bytes_per_step(demo: Demo, steps: int) -> float:
    """What the three agents have sent of tensors, headers and encryption in, for one step."""
    statuses = [status for name in NAMES if (status := demo.status(name))]
    if len(statuses) < len(NAMES):
        raise DemoError("an agent has gone away")
    return sum(status.traffic.data_sent_bytes for status in statuses) / steps


def largest_difference(one: Path, other: Path) -> float:
    with np.load(one) as a, np.load(other) as b:
        if set(a.files) != set(b.files):
            raise DemoError("the two trainings have different weights")
        return max(float(np.max(np.abs(a[name] - b[name]))) for name in a.files)


def run(demo: Demo) -> bool:
    """The whole demo; whether the result is what it must be."""
    meet(demo)
    console.print("Training handwritten digits with MLX, one trainer process at each agent:")
    ranks = str(len(NAMES))
    files = [demo.directory / f"{name}.npz" for name in NAMES]
    trainers = [
        demo.start_trainer(name, "--ranks", ranks, "--save", str(file))
        for name, file in zip(NAMES, files, strict=True)
    ]
    watch(demo, trainers)
    moved = bytes_per_step(demo, STEPS)
    with console.status("The same training in one process, on the union of the batches …"):
        alone_file = demo.directory / "alone.npz"
        alone = demo.start_trainer(NAMES[0], "--save", str(alone_file))
        if alone.process.wait(timeout=PATIENCE_S):
            raise DemoError("the single process failed:\n" + "\n".join(alone.other[-15:]))
    return report(trainers, moved, max(largest_difference(f, alone_file) for f in files))


def report(trainers: Sequence[Trainer], moved: float, difference: float) -> bool:
    """Print the table; whether everything in it is as it must be."""
    measured = sorted((trainer.said for trainer in trainers), key=lambda said: said["rank"])
    hashes = [said["hash"] for said in measured]
    accuracy = min(said["accuracy"] for said in measured)
    rows = [
        ("steps per second", f"{min(said['steps_per_s'] for said in measured):.1f}", None),
        ("bytes moved per step, all three together", bytes_text(round(moved)), None),
        ("test accuracy", f"{accuracy:.1%}", accuracy >= MIN_ACCURACY),
        ("largest difference from one process", f"{difference:.2e}", difference <= MAX_DIFFERENCE),
        *(
            (f"hash of all weights, rank {said['rank']}", said["hash"][:16], len(set(hashes)) == 1)
            for said in measured
        ),
    ]
    table = Table("what", "measured", "as it must be", title="Three trainers, one model")
    for what, value, good in rows:
        table.add_row(what, value, "" if good is None else "[green]yes" if good else "[red]NO")
    console.print(table)
    return all(good is not False for _, _, good in rows)


def main() -> NoReturn:
    """Run the demo; 0 only if it shows what it promises."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    directory = CLONE / ".demo"
    shutil.rmtree(directory, ignore_errors=True)  # of a demo that was killed
    try:
        with Demo(directory) as demo:
            good = run(demo)
    except DemoError as e:
        console.print(f"[red]The demo failed:[/] {e}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    console.print("Good." if good else "[red]The results are not what they must be.")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
