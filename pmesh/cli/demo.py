"""`pmesh demo`: three agents and three trainers on this machine train a model together.

It shows the ring while they train, then compares their weights with those of one trainer alone, and
is 0 only if they agree. All is in a temporary folder, under a mesh key of its own; nothing is left.
"""

import contextlib
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pmesh.agent.home import open_home, store_mesh_key
from pmesh.agent.schema import Status, decode_status
from pmesh.cli.demo_training import STEPS
from pmesh.cli.keys import MESH_KEY_BYTES
from pmesh.cli.ring import draw_ring, nodes_of
from pmesh.client.control import ask_status
from pmesh.core.identity.keys import MeshKey
from pmesh.errors import PmeshError, RunError
from pmesh.terminal.rows import Rows, output
from pmesh.terminal.sizes import bytes_text

MACHINES: Final = 3
MAX_DIFFERENCE: Final = 1e-5
MAX_HELD_OUT_BITS: Final = 3.5  # how often each byte occurs, and no more, gives 4.57
MEET_S: Final = 8.0  # agents that hear each other's multicast meet within 2 s
PATIENCE_S: Final = 60.0
FRAME_S: Final = 0.1
END_S: Final = 5.0


class DemoProgram:
    """A process of the demo; what it prints goes into a file.

    It leads a session of its own, so that Ctrl-C ends the demo, and the demo ends the program.
    """

    def __init__(self, name: str, log: Path, words: Sequence[str], home: Path) -> None:
        self.name, self._log = name, log
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PMESH_")}
        with log.open("w") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-m", *words],
                env=inherited | {"PMESH_HOME": str(home), "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def lines(self) -> list[str]:
        """All whole lines that it has printed."""
        *whole, _ = self._log.read_text(errors="replace").split("\n")
        return whole

    def reports(self) -> dict[str, Any]:
        """The latest value of each thing that it has reported."""
        said = dict[str, Any]()
        for line in self.lines():
            if line.startswith("{"):
                said |= json.loads(line)
        return said

    def check(self) -> None:
        """Raise RunError if it has failed."""
        if self.code:
            last = (self.lines() or ["nothing"])[-1]
            raise RunError(f"{self.name} ended with {self.code}; it had printed: {last}")

    def end(self) -> None:
        """Ask it to end, and kill it if it does not."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class DemoMachines:
    """Three homes with an agent each, and all programs at them, from `with` to its end."""

    def __init__(self) -> None:
        self.homes: list[Path] = []
        self._stack = contextlib.ExitStack()
        self._agents: list[DemoProgram] = []

    def __enter__(self) -> Self:
        # A short name: a Unix socket's path may have 103 bytes.
        made = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pmesh-"))
        key = MeshKey(secrets.token_bytes(MESH_KEY_BYTES))
        for number in range(1, MACHINES + 1):
            self.homes.append(open_home(Path(made, f"mac-{number}")))
            store_mesh_key(self.homes[-1], key)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, name: str, home: Path, *words: str) -> DemoProgram:
        """Start a module of Python with its arguments; it ends with the demo at the latest."""
        log = home.parent / f"{name}.log"
        program = DemoProgram(name, log, words, home)
        self._stack.callback(program.end)
        return program

    def statuses(self) -> list[Status]:
        """What the agents answer that answer."""
        return [status for home in self.homes if (status := status_of(home))]

    def meet(self) -> bool:
        """Start the agents; return False if they had to be told where the first one is."""
        self._start_agents(lambda: ())
        if self._await(self._are_together, MEET_S):
            return True
        for agent in self._agents:
            agent.end()
        self._agents = []
        self._start_agents(lambda: ("--no-mdns", *self._first_address()))
        if not self._await(self._are_together, PATIENCE_S):
            raise RunError(f"the agents did not meet within {PATIENCE_S:.0f} s")
        return False

    def _start_agents(self, options: Callable[[], Sequence[str]]) -> None:
        for home in self.homes:
            up = ("pmesh.cli", "up", "--name", home.name, "--listen", "127.0.0.1:0", *options())
            self._agents.append(self.start(f"agent of {home.name}", home, *up))

    def _first_address(self) -> Sequence[str]:
        if not self._agents:
            return ()
        found = list[str]()

        def has_one() -> bool:
            status = status_of(self.homes[0])
            found[:] = status.node.addresses if status else ()
            return bool(found)

        if not self._await(has_one, PATIENCE_S):
            raise RunError(f"the first agent did not start within {PATIENCE_S:.0f} s")
        return "--peer", found[0]

    def _await(self, condition: Callable[[], bool], within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while not condition():
            for agent in self._agents:
                agent.check()
            if time.monotonic() > deadline:
                return False
            time.sleep(FRAME_S)
        return True

    def _are_together(self) -> bool:
        views = [status.view for status in self.statuses()]
        return (
            len(views) == MACHINES
            and all(len(view.members) == MACHINES for view in views)
            and all(view.epoch == views[0].epoch for view in views)
        )


def status_of(home: Path) -> Status | None:
    """An agent's picture; None while it does not answer."""
    try:
        return decode_status(ask_status(home, timeout_s=2.0))
    except PmeshError:
        return None


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)


def run_demo() -> int:
    """Return 0 if the demo shows what it promises, else 1."""
    console = output()
    signal.signal(signal.SIGTERM, _end)
    with DemoMachines() as machines:
        console.print("Starting three agents, each with a home and a port of its own …")
        how = "by mDNS" if machines.meet() else "at the first one's address: mDNS finds nobody here"
        console.print(f"They found each other {how}, and agreed on a ring.")
        console.print("A trainer at each agent learns to write Python, from the standard library:")
        files = [home.with_suffix(".npz") for home in machines.homes]
        trainers = [
            _start_trainer(machines, home, file, MACHINES)
            for home, file in zip(machines.homes, files, strict=True)
        ]
        _watch(console, machines, trainers)
        moved = sum(status.traffic.data_sent_bytes for status in machines.statuses()) / STEPS
        alone = machines.homes[0].with_name("alone.npz")
        with console.status("The same training by one trainer …"):
            await_end([_start_trainer(machines, machines.homes[0], alone, 1)])
        difference = max(largest_difference(file, alone) for file in files)
        good = report(console, [trainer.reports() for trainer in trainers], moved, difference)
    console.print("Good." if good else "The results are not what they must be.")
    return 0 if good else 1


def _start_trainer(machines: DemoMachines, home: Path, file: Path, ranks: int) -> DemoProgram:
    words = ("pmesh.cli.demo_training", "--ranks", str(ranks), "--save", str(file))
    return machines.start(f"trainer {file.stem}", home, *words)


def await_end(trainers: Sequence[DemoProgram], show: Callable[[], None] = lambda: None) -> None:
    """Show something until all have ended; raise RunError if one fails, or hangs."""
    deadline = time.monotonic() + PATIENCE_S
    while any(trainer.code is None for trainer in trainers):
        for trainer in trainers:
            trainer.check()
        if time.monotonic() > deadline:
            raise RunError(f"the training did not end within {PATIENCE_S:.0f} s")
        show()
        time.sleep(FRAME_S)
    for trainer in trainers:
        trainer.check()


def _watch(console: Console, machines: DemoMachines, trainers: Sequence[DemoProgram]) -> None:
    """Show the ring and the progress until the trainers have ended."""
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, {task.fields[bits]} bits for each byte"),
        TimeElapsedColumn(),
        console=console,
    )
    task = progress.add_task("training", total=STEPS, bits="…")
    beats = itertools.count()

    def frame() -> RenderableType:
        said = trainers[0].reports()
        if "loss" in said:
            progress.update(task, completed=said["step"], bits=f"{said['loss']:.2f}")
        status = status_of(machines.homes[0])
        if status is None:
            return progress
        ring = draw_ring(nodes_of(status), width=console.width, beat=next(beats))
        return Group("", ring, "", progress)

    with Live(console=console, refresh_per_second=10) as live:
        await_end(trainers, lambda: live.update(frame()))
        live.update(frame())


def largest_difference(one: Path, other: Path) -> float:
    """Of any weight."""
    with np.load(one) as a, np.load(other) as b:
        return max(float(np.max(np.abs(a[name] - b[name]))) for name in a.files)


def report(
    console: Console, said: Sequence[Mapping[str, Any]], moved: float, difference: float
) -> bool:
    """Print the table; return whether everything in it is as it must be."""
    measured = sorted(said, key=lambda each: each["rank"])
    hashes = [each["hash"] for each in measured]
    bits = max(each["held_out_bits"] for each in measured)
    rows: list[tuple[str, str, bool | None]] = [
        ("steps per second", f"{min(each['steps_per_s'] for each in measured):.0f}", None),
        ("bytes moved per step, all three together", bytes_text(round(moved)), None),
        ("bits for each byte of unseen text", f"{bits:.2f}", bits <= MAX_HELD_OUT_BITS),
        ("largest difference from one trainer", f"{difference:.1e}", difference <= MAX_DIFFERENCE),
        *(
            (f"hash of all weights, rank {each['rank']}", each["hash"][:16], len(set(hashes)) == 1)
            for each in measured
        ),
    ]
    headers = ("what", "measured", "as it must be")
    shown = [
        (what, value, "" if good is None else "yes" if good else "NO") for what, value, good in rows
    ]
    console.print(Rows(headers, shown, title="Three trainers, one model"))
    return all(good is not False for _, _, good in rows)
