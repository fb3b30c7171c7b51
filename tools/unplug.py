"""The moving picture of the README: one of three machines crashes while all train.

    $ python -m tools.unplug
    $ asciinema rec -c 'python -m tools.unplug' unplug.cast     # then svg-term makes the picture

The crash is SIGKILL for an agent and its trainer at once: neither can say goodbye. (A cable that is
pulled is noticed by silence, after 2 s.) The picture shows the first machine's own ring and events.
"""

import signal
import time

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from pmesh.cli.demo import status_of
from pmesh.cli.event_reader import Reader
from pmesh.cli.ring import RingNode, draw_ring
from pmesh.terminal.rows import output
from tools.lab.mesh import ROOT, LabMesh, Node

TRAIN = f"""
import sys, time; sys.path.insert(0, {str(ROOT / "examples")!r})
import train_numpy
train_numpy.STEPS = 10**6
train_numpy.main(3)
"""
MACHINES = 3
LINES = 7
FRAME_S = 0.1
ACT_S = 4.0


class Picture:
    """What the first machine sees."""

    def __init__(self, node: Node, width: int) -> None:
        self._width = width
        self._node = node
        self._reader = Reader(node.home)
        self._lines: list[Text] = []
        self._ranks = 0

    def show(self, live: Live, title: str, ranks: int) -> None:
        """One act: it ends when this many ranks have trained for a while."""
        began, beat = time.monotonic(), 0
        while time.monotonic() < began + ACT_S:
            live.update(self._frame(title, beat))
            if self._ranks != ranks:
                began = time.monotonic()
            beat += 1
            time.sleep(FRAME_S)

    def _frame(self, title: str, beat: int) -> RenderableType:
        for event in self._reader.read().events:
            at = f"{event.time:%H:%M:%S}.{event.time.microsecond // 1000:03}  "
            line = Text.assemble((at, "dim"), event.text, no_wrap=True, overflow="ellipsis")
            self._lines.append(line)
        status = status_of(self._node.home)
        if status is None:
            return Text(title)
        view = status.view
        nodes = [RingNode(m.name, m.health, m.id == view.leader) for m in view.members]
        ranks = [rank for job in status.jobs for rank in job.ranks]
        self._ranks = len(ranks)
        calls = max((rank.completed for rank in ranks), default=0)
        return Group(
            Text(f"\n{title}\n", "bold"),
            draw_ring(nodes, width=self._width, beat=beat),
            Text(f"\n{len(ranks)} ranks train; {calls:,} collective calls so far\n"),
            *self._lines[-LINES:],
        )


def main() -> None:
    console = output()
    with LabMesh(MACHINES) as mesh:
        mesh.start_agents(mdns=True)
        mesh.await_view()
        third = mesh.nodes[2]
        trainers = [mesh.start_program(node, "-c", TRAIN) for node in mesh.nodes]
        picture = Picture(mesh.nodes[0], console.width)
        with Live(console=console, refresh_per_second=10) as live:
            picture.show(live, "Three machines train one model.", 3)
            for program in (*third.programs(), trainers[2]):
                program.send_signal(signal.SIGKILL)
            title = f"{third.name} is killed. Nobody else restarts, and no step is lost."
            picture.show(live, title, 2)
            mesh.start_agent(third)
            mesh.start_program(third, "-c", TRAIN)
            picture.show(live, f"{third.name} is back, and takes the others' weights.", 3)


if __name__ == "__main__":
    main()
