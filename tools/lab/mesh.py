"""Machines with an agent each, on loopback or on hosts of a lab, and programs at them."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from pmesh.client.control import ask_status
from pmesh.core.identity.keys import MeshKey, mesh_key_text
from pmesh.errors import PmeshError
from pmesh.home_paths import socket_path
from tools.lab.commands import LabError
from tools.lab.net import LabHost, NetLab, loopbacks
from tools.lab.oplog import Life, decode_report
from tools.lab.program import PATIENCE_S, LabProgram, await_that, runs

ROOT = Path(__file__).resolve().parents[2]
AGENT = "from pmesh.cli import main; main()"


def new_key() -> str:
    return mesh_key_text(MeshKey(secrets.token_bytes(32)))


def inherited() -> dict[str, str]:
    """This program's environment without the settings of a developer's own agent."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PMESH_")}


def status_of(home: Path, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """An agent's status, as `pmesh status --json` has it; raises PmeshError if none answers."""
    picture: dict[str, Any] = json.loads(ask_status(home, timeout_s=timeout_s))
    return picture


class LabTrainer(LabProgram):
    """A trainer of campaigns, which reports each of its ops."""

    def __init__(self, name: str, pid: int, output: Any, *, life: Life, keeps_all: bool) -> None:  # noqa: ANN401 - a stream
        self.life = life
        self._keeps_all = keeps_all
        super().__init__(name, pid, output)

    def _takes(self, line: str) -> bool:
        report = decode_report(line)
        if report is not None:
            self.life.hear(report)
        return self._keeps_all or report is None or report.what not in {"called", "done"}


Part = Literal["agent", "trainer"]
BOTH: tuple[Part, ...] = ("agent", "trainer")


@dataclass(slots=True, eq=False)
class Node:
    """One machine: its agent, and its trainers if a campaign has started any."""

    name: str
    host: LabHost
    home: Path
    environment: dict[str, str]
    """Of the programs that reach its agent."""
    agent: LabProgram | None = None
    trainers: list[LabTrainer] = field(default_factory=list[LabTrainer])
    """The last one started in each of its places; most campaigns have one place on each machine."""

    @property
    def pid(self) -> int:
        """Of its agent."""
        if self.agent is None:
            raise LabError(f"{self.name} has no agent")
        return self.agent.pid

    @property
    def trainer(self) -> LabTrainer | None:
        """The first of its trainers."""
        return self.trainers[0] if self.trainers else None

    @property
    def life(self) -> Life:
        """Of the first of its trainers."""
        if self.trainer is None:
            raise LabError(f"{self.name} has no trainer")
        return self.trainer.life

    def programs(self, parts: Sequence[Part] = BOTH) -> list[LabProgram]:
        """Its agent and its trainers, or one kind of them, as far as they were started."""
        found: dict[Part, Sequence[LabProgram | None]] = {
            "agent": [self.agent],
            "trainer": self.trainers,
        }
        return [program for part in parts for program in found[part] if program is not None]

    def send(self, number: signal.Signals, parts: Sequence[Part] = BOTH) -> None:
        """A signal to its agent and its trainers, or to one kind of them."""
        for program in self.programs(parts):
            program.send_signal(number)

    def kill(self, *parts: Part) -> None:
        self.send(signal.SIGKILL, parts)

    def status(self) -> dict[str, Any]:
        """Its agent's picture, as `pmesh status --json` has it; empty if it does not answer."""
        try:
            return status_of(self.home, timeout_s=2.0)
        except PmeshError:
            return {}

    @property
    def epoch(self) -> int:
        """Which view its agent is in, as they are counted; raises PmeshError if none answers."""
        return int(status_of(self.home)["view"]["epoch"]["counter"])

    def await_address(self, *, within_s: float = PATIENCE_S) -> str:
        """HOST:PORT of its agent, as soon as that has one."""
        found: list[str] = []

        def has_one() -> bool:
            found[:] = self.status().get("node", {}).get("addresses", ())
            return bool(found)

        await_that(
            has_one, f"the address of {self.name}", within_s=within_s, of=self.programs(["agent"])
        )
        return found[0]


class LabMesh:
    """Machines from `with` to its end; nothing of them is left, however that comes.

    Args:
        hosts: Where; a lab is then made and ended here, and a number is of machines on loopback.
        names: Of the first ones, if not mac-1 and so on.
        folder: For their homes, which then stay; None: one that is deleted.
        patch: Source that runs in each agent first.
        environment: Further variables of the programs of a node, by its number.
        logs: Where to write what all have printed.
    """

    def __init__(
        self,
        hosts: Sequence[LabHost] | NetLab | int,
        *,
        names: Sequence[str] = (),
        folder: Path | None = None,
        patch: str = "",
        environment: Callable[[int], Mapping[str, str]] = lambda _: {},
        logs: Path | None = None,
    ) -> None:
        self.nodes: list[Node] = []
        self.programs: list[LabProgram] = []
        """All that were started, those that have ended too."""
        self._lab = hosts if isinstance(hosts, NetLab) else None
        if isinstance(hosts, NetLab):
            hosts = hosts.hosts
        self._hosts = loopbacks(hosts) if isinstance(hosts, int) else hosts
        self._names = dict(enumerate(names, 1))
        self.folder = folder or Path()
        """Of their homes, once this has begun."""
        self._keeps_folder = folder is not None
        self._patch = patch
        self._logs = logs
        self._stack = contextlib.ExitStack()
        self._environment = inherited() | {
            "PMESH_KEY": new_key(),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        }
        self._environment_of = environment

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _build(self) -> None:
        if not self._keeps_folder:  # a short name: a Unix socket's path may have 103 bytes
            made = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mesh-"))
            self.folder = Path(made)
        self._stack.callback(self._write_logs)
        if self._lab is not None:
            self._stack.enter_context(self._lab)
        self._stack.callback(self._end_all)
        for host in self._hosts:
            self._add(host)

    def _add(self, host: LabHost) -> Node:
        name = self._names.get(host.number, f"mac-{host.number}")
        home = self.folder / name
        home.mkdir(mode=0o700)
        own = {"PMESH_HOME": str(home), **self._environment_of(host.number)}
        self.nodes.append(Node(name, host, home, self._environment | own))
        self._stack.callback(_forget_socket, home)
        return self.nodes[-1]

    def start_program(
        self,
        node: Node,
        *words: str,
        name: str = "",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> LabProgram:
        """A program of Python at the node: `words` are what follows `python`."""
        program = LabProgram.start(
            name or f"program {len(self.programs)} of {node.name}",
            [sys.executable, *words],
            environment=node.environment | dict(variables),
            host=node.host,
        )
        self.programs.append(program)
        return program

    def start_command(self, node: Node, *arguments: str) -> LabProgram:
        """A command of `pmesh` at the node, as a user starts it."""
        name = f"pmesh {arguments[0]} of {node.name} ({len(self.programs)})"
        return self.start_program(node, "-m", "pmesh.cli", *arguments, name=name)

    def run_command(self, node: Node, *arguments: str) -> str:
        """What a command of `pmesh` has printed; raises CalledProcessError if it fails."""
        return subprocess.run(
            node.host.command([sys.executable, "-m", "pmesh.cli", *arguments]),
            env=node.environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

    def start_agent(self, node: Node, *options: str) -> None:
        """`pmesh up`, as a user starts it; on loopback with a port of its own."""
        up = ("up", "--name", node.name, *(() if node.host.lab else ("--listen", "127.0.0.1:0")))
        name = f"agent of {node.name} ({len(self.programs)})"
        node.agent = self.start_program(
            node, "-c", f"{self._patch}\n{AGENT}", *up, *options, name=name
        )

    def start_agents(self, *, mdns: bool | None = None, within_s: float = PATIENCE_S) -> None:
        """An agent on each; they look for each other by mDNS, as on hosts, or all for the first."""
        options: tuple[str, ...] = ()
        for node in self.nodes:
            if mdns or (mdns is None and node.host.lab):
                self.start_agent(node)
            else:
                self.start_agent(node, "--no-mdns", *options)
                options = options or ("--peer", node.await_address(within_s=within_s))

    def restart_agent(self, node: Node) -> None:
        """Start a killed agent, and wait until it answers; on loopback it dials another one."""
        for agent in node.programs(["agent"]):
            agent.join()
        if node.host.lab:
            self.start_agent(node)
        else:
            other = next(each for each in self.nodes if each is not node and runs(each.agent))
            self.start_agent(node, "--no-mdns", "--peer", other.await_address())
        node.await_address()

    def await_view(self, *, within_s: float = PATIENCE_S) -> None:
        """Until the agents of all nodes are in one view of their own."""

        def together() -> bool:
            epochs = list[object]()
            for node in self.nodes:
                view = node.status().get("view", {})
                if len(view.get("members", ())) != len(self.nodes):
                    return False
                epochs.append(view["epoch"])
            return all(epoch == epochs[0] for epoch in epochs)

        agents = [agent for node in self.nodes for agent in node.programs(["agent"])]
        await_that(together, "all agents in one view", within_s=within_s, of=agents)

    def forget_ended(self) -> None:
        """Drop the programs that have ended, unless what they printed goes into logs."""
        self.programs = [p for p in self.programs if not p.ended or self._logs]

    def _end_all(self) -> None:
        for program in self.programs:
            program.end()

    def _write_logs(self) -> None:
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
            for program in self.programs:
                text = "\n".join(f"{line.at:.3f} {line.text}" for line in program.lines)
                (self._logs / f"{program.name}.log").write_text(f"{text}\n", encoding="utf-8")


def _forget_socket(home: Path) -> None:
    """Of a killed agent with a long path, whose socket lies outside its home."""
    path = socket_path(home)
    path.unlink(missing_ok=True)
    if path.parent != home:
        with contextlib.suppress(OSError):  # other agents of this user live there
            path.parent.rmdir()
