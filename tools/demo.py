"""`make demo`: three agents and three trainers on this machine train a real model together.

It shows the ring while it trains, then compares the weights with those of the same training in one
process, and exits 0 only if they agree. Everything happens in `.demo` inside the clone, under a
mesh key of its own; nothing is left behind.
"""

import contextlib
import itertools
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pmesh.agent.schema import Status, decode_status
from pmesh.cli.ring import draw_ring, nodes_of
from pmesh.client.control import ask_status
from pmesh.errors import PmeshError
from pmesh.terminal.sizes import bytes_text
from tools.lab.commands import LabError
from tools.lab.mesh import LabMesh, Node
from tools.lab.program import LabProgram

CLONE = Path(__file__).resolve().parent.parent
MACHINES = 3
MAX_DIFFERENCE = 1e-5
MIN_ACCURACY = 0.95
STEPS = 300  # 20 epochs of 15 batches, as tools/demo_training.py says at its end
MEET_S = 8.0  # agents that hear each other's multicast meet within 2 s
PATIENCE_S = 45.0
FRAME_S = 0.1

console = Console()


@contextlib.contextmanager
def demo_mesh() -> Iterator[LabMesh]:
    """Three machines in `.demo`, of which nothing is left."""
    directory = CLONE / ".demo"
    shutil.rmtree(directory, ignore_errors=True)  # of a demo that was killed
    directory.mkdir(mode=0o700)
    try:
        with LabMesh(MACHINES, folder=directory) as mesh:
            yield mesh
    finally:
        shutil.rmtree(directory)


def status_of(node: Node) -> Status | None:
    """Its agent's picture; None while it does not answer."""
    try:
        return decode_status(ask_status(node.home, timeout_s=2.0))
    except PmeshError:
        return None


def meet(mesh: LabMesh) -> None:
    """Have the three agents find each other; say how."""
    console.print("Starting three agents, each with a home and a port of its own …")
    mesh.start_agents(mdns=True)
    try:
        mesh.await_view(within_s=MEET_S)
    except LabError:
        console.print("Multicast does not work on this machine's loopback: once more with --peer …")
        for agent in mesh.programs:
            agent.end(first=signal.SIGTERM)
        mesh.start_agents(mdns=False, within_s=PATIENCE_S)
        mesh.await_view(within_s=PATIENCE_S)
        console.print("They met at the first one's address, and agreed on a ring.")
    else:
        console.print("They found each other by mDNS, and agreed on a ring.")


def start_trainer(mesh: LabMesh, node: Node, file: Path, *options: str) -> LabProgram:
    """A training process that saves its weights; each of its lines is a JSON object."""
    script = str(CLONE / "tools" / "demo_training.py")
    return mesh.start_program(node, script, *options, "--save", str(file), name="a trainer")


def watch(mesh: LabMesh, trainers: Sequence[LabProgram]) -> None:
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
            if (loss := trainers[0].last("loss")) is not None:
                progress.update(task, completed=trainers[0].last("step"), loss=f"{loss:.4f}")
            live.update(_frame(mesh.nodes[0], progress, beat))
            ended = [trainer.code for trainer in trainers]
            if None not in ended:
                break
            if any(ended) or time.monotonic() > deadline:
                break
            time.sleep(FRAME_S)
    for trainer in trainers:
        if trainer.code != 0:
            raise LabError(f"a trainer failed:\n{trainer.shown}")


def _frame(node: Node, progress: Progress, beat: int) -> RenderableType:
    status = status_of(node)
    if status is None:
        return progress
    return Group("", draw_ring(nodes_of(status), width=console.width, beat=beat), "", progress)


def bytes_per_step(mesh: LabMesh, steps: int) -> float:
    """What the three agents have sent of tensors, headers and encryption in, for one step."""
    statuses = [status for node in mesh.nodes if (status := status_of(node))]
    if len(statuses) < len(mesh.nodes):
        raise LabError("an agent has gone away")
    return sum(status.traffic.data_sent_bytes for status in statuses) / steps


def largest_difference(one: Path, other: Path) -> float:
    with np.load(one) as a, np.load(other) as b:
        if set(a.files) != set(b.files):
            raise LabError("the two trainings have different weights")
        return max(float(np.max(np.abs(a[name] - b[name]))) for name in a.files)


def run(mesh: LabMesh) -> bool:
    """The whole demo; whether the result is what it must be."""
    meet(mesh)
    console.print("Training handwritten digits with MLX, one trainer process at each agent:")
    files = [node.home.with_suffix(".npz") for node in mesh.nodes]
    ranks = ("--ranks", str(len(files)))
    trainers = [
        start_trainer(mesh, node, file, *ranks)
        for node, file in zip(mesh.nodes, files, strict=True)
    ]
    watch(mesh, trainers)
    moved = bytes_per_step(mesh, STEPS)
    with console.status("The same training in one process, on the union of the batches …"):
        alone_file = CLONE / ".demo" / "alone.npz"
        alone = start_trainer(mesh, mesh.nodes[0], alone_file)
        if alone.join(within_s=PATIENCE_S):
            raise LabError(f"the single process failed:\n{alone.shown}")
    said = [reduce(or_, trainer.reports) for trainer in trainers]
    return report(said, moved, max(largest_difference(f, alone_file) for f in files))


def report(said: Sequence[dict[str, Any]], moved: float, difference: float) -> bool:
    """Print the table; whether everything in it is as it must be."""
    measured = sorted(said, key=lambda each: each["rank"])
    hashes = [each["hash"] for each in measured]
    accuracy = min(each["accuracy"] for each in measured)
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
    try:
        with demo_mesh() as mesh:
            good = run(mesh)
    except LabError as e:
        console.print(f"[red]The demo failed:[/] {e}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    console.print("Good." if good else "[red]The results are not what they must be.")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
