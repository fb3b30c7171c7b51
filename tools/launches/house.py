"""Machines whose agents run what others ask for, and every process in them."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self

from pmesh.agent.launches.permission import Permission, store_permission
from tools.lab.cluster import CampaignError, Cluster, Node, Process, runs
from tools.lab.oplog import Options

LOOK_EVERY_S = 0.02


class Launched:
    """A `pmesh run --on` that runs, or has run."""

    def __init__(self, starter: Node, process: Process, popen: subprocess.Popen[str]) -> None:
        self.starter = starter
        self.process = process
        self._popen = popen

    @property
    def lines(self) -> list[str]:
        return self.process.printed()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def lines_of(self, node: Node, word: str) -> list[str]:
        """What the ranks of a machine have printed that begins with a word."""
        lines = [line.split(" | ", 1) for line in self.lines if " | " in line]
        return [text for name, text in lines if name == node.name and text.startswith(word)]

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._popen.poll()


class House:
    """`count` machines, from `with` to its end; nothing of them is left, however that comes."""

    def __init__(self, count: int, *, logs: Path | None = None) -> None:
        self.cluster = Cluster(count, Options(number=0, wait_for=1, op_bytes=0), logs=logs)
        self._own: frozenset[int] = frozenset()

    @property
    def nodes(self) -> list[Node]:
        return self.cluster.nodes

    def __enter__(self) -> Self:
        self.cluster.__enter__()
        try:
            self._own = frozenset(pid for node in self.nodes for pid in node.host.pids())
            for node in self.nodes:
                store_permission(node.home, Permission(everyone=True, as_root=True))
            self.heal()
        except BaseException:
            self.cluster.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.__exit__()

    def launch(self, starter: Node, *arguments: str) -> Launched:
        return Launched(starter, *self.cluster.start_command(starter, "run", *arguments))

    def heal(self) -> None:
        """Mend all cables, start the agents that have ended, and wait until all are together."""
        for node in self.nodes:
            self.cluster.lab.mend(node.host)
            if not runs(node.agent):
                self.cluster.start_agent(node)
        await_that(self._are_together, "all machines in one view", within_s=60.0)

    def kill_agents(self) -> None:
        """Kill all of them; `heal` then starts new ones."""
        for node in self.nodes:
            node.kill("agent")
        ended = "the end of the agents"
        await_that(lambda: not any(runs(node.agent) for node in self.nodes), ended, within_s=10.0)

    def _are_together(self) -> bool:
        return all(
            len(node.status().get("view", {}).get("members", ())) == len(self.nodes)
            for node in self.nodes
        )

    def left(self, nodes: Iterable[Node] | None = None) -> frozenset[int]:
        """What runs on these machines, or on all, beside agents that live."""
        nodes = self.nodes if nodes is None else list(nodes)
        agents = {node.agent.pid for node in nodes if node.agent is not None and runs(node.agent)}
        found = {pid for node in nodes for pid in node.host.pids()}
        return frozenset(found - agents - self._own)

    def kill_machine(self, node: Node) -> None:
        """All of its processes at once; that of the lab which starts its agents is none of them."""
        for pid in set(node.host.pids()) - self._own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def await_that(holds: Callable[[], bool], what: str, *, within_s: float) -> float:
    """Wait until this holds, and return how long that took. Raises CampaignError."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > within_s:
            raise CampaignError(f"{what} did not come within {within_s:g} s")
        time.sleep(LOOK_EVERY_S)
    return time.monotonic() - began


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
