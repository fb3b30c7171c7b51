"""Machines whose agents run what others ask for, and every process in them."""

import contextlib
import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

from pmesh.launches.agent.permission import Permission, store_permission
from tools.lab.cluster import LabCluster
from tools.lab.mesh import Node
from tools.lab.oplog import TrainerOptions
from tools.lab.program import LabProgram, await_that, runs


class House(LabCluster):
    """`count` machines, from `with` to its end; nothing of them is left, however that comes."""

    def __init__(self, count: int, *, logs: Path | None = None) -> None:
        super().__init__(count, TrainerOptions(number=0, wait_for=1, op_bytes=0), logs=logs)
        self._own: frozenset[int] = frozenset()

    def _build(self) -> None:
        super()._build()
        # Not those that run in the hosts now: on a busy machine one may not have entered its host.
        self._own = frozenset(warm.pid for warm in self._warm.values())
        for node in self.nodes:
            store_permission(node.home, Permission(everyone=True, as_root=True))
        self.heal()

    def launch(self, starter: Node, *arguments: str) -> LabProgram:
        return self.start_command(starter, "run", *arguments)

    def heal(self) -> None:
        """Mend all cables, start the agents that have ended, and wait until all are together."""
        for node in self.nodes:
            self.lab.mend(node.host)
            if not runs(node.agent):
                self.start_agent(node)
        self.await_view()

    def kill_agents(self) -> None:
        """Kill all of them; `heal` then starts new ones."""
        for node in self.nodes:
            node.kill("agent")
        ended = "the end of the agents"
        await_that(lambda: not any(runs(node.agent) for node in self.nodes), ended, within_s=10.0)

    def left(self, nodes: Iterable[Node] | None = None) -> frozenset[int]:
        """What runs on these machines, or on all, beside agents that live."""
        nodes = self.nodes if nodes is None else list(nodes)
        agents = {node.agent.pid for node in nodes if node.agent is not None and runs(node.agent)}
        found = {pid for node in nodes for pid in node.host.pids()}
        return frozenset(found - agents - self._own)

    def kill_machine(self, node: Node) -> None:
        """All of its processes at once; that of the lab which starts its agents is none of them."""
        for _ in range(3):  # again: one of them may have started another meanwhile
            for pid in set(node.host.pids()) - self._own:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def lines_of(launch: LabProgram, node: Node, word: str, *, since: float = 0.0) -> list[str]:
    """What the ranks of a machine have printed from this time on that begins with a word."""
    lines = [line.split(" | ", 1) for line in launch.printed(since=since) if " | " in line]
    return [text for name, text in lines if name == node.name and text.startswith(word)]


def alive(pids: Iterable[int]) -> list[int]:
    """Those that still run; a zombie does not."""
    found = list[int]()
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/ns/net").readlink()
            found.append(pid)
    return found


def command_of(pid: int) -> Sequence[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return ()
