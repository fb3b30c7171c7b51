"""The systems that are compared, as processes: started, told what to do, measured, ended."""

import contextlib
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import msgspec

from pmesh.client.control import ask_status
from pmesh.core.identity.keys import MeshKey, mesh_key_text
from pmesh.errors import PmeshError
from pmesh.paths import socket_path
from tools.bench_peers.orders import Answer, Order
from tools.bench_peers.places import Place

PATIENCE_S = 60.0
LOG_LINES = 20
AGENT = "from pmesh.cli import main; main()"
WORKER = "tools.bench_peers.worker"


class BenchError(Exception):
    """A system did not do what it was told; says what it has printed."""


class Process:
    """A program whose errors go to a file, ended at the latest with its `with`."""

    def __init__(
        self,
        place: Place,
        rank: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self._log = log
        with log.open("w") as errors:
            self.popen = place.popen(
                rank,
                command,
                env=_inherited() | dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # a Ctrl-C is this program's, which then ends them
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the program itself: in a lab `ip` has replaced itself by it."""
        return self.popen.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def tell(self, line: str) -> None:
        """One line to its standard input."""
        assert self.popen.stdin is not None  # noqa: S101 - it was started with a pipe
        with contextlib.suppress(BrokenPipeError):  # `hear` says why
            self.popen.stdin.write(line + "\n")
            self.popen.stdin.flush()

    def hear(self, *, timeout_s: float = PATIENCE_S) -> str:
        """The next line of its standard output; raises BenchError if none comes."""
        with contextlib.suppress(queue.Empty):
            if line := self._lines.get(timeout=timeout_s):
                return line
        raise BenchError(f"{self.describe()} has not answered; it said\n{self.said()}")

    def describe(self) -> str:
        """Its name, and whether it still runs."""
        code = self.popen.poll()
        return f"{self._log.stem} " + ("(runs)" if code is None else f"(ended with {code})")

    def said(self) -> str:
        """Its last errors."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def _read(self) -> None:
        stdout: IO[str] | None = self.popen.stdout
        assert stdout is not None  # noqa: S101 - it was started with a pipe
        with contextlib.suppress(ValueError):  # closed meanwhile
            for line in stdout:
                self._lines.put(line)
        self._lines.put("")


class Running:
    """A system with all its processes, ready for orders."""

    def __init__(self, workers: Sequence[Process], agents: Sequence[Process] = ()) -> None:
        self.workers = workers
        self.agents = agents

    def carry_out(self, order: Order, *, timeout_s: float = PATIENCE_S) -> tuple[Answer, ...]:
        """Tell all ranks, and wait for all."""
        for worker in self.workers:
            worker.tell(msgspec.json.encode(order).decode())
        return tuple(
            msgspec.json.decode(worker.hear(timeout_s=timeout_s), type=Answer)
            for worker in self.workers
        )

    def traffic(self) -> list[dict[str, int]]:
        """Of each agent, as `pmesh status --json` has it."""
        return [picture["traffic"] for picture in self.pictures()]

    def pictures(self) -> list[dict[str, Any]]:
        """Of each agent: its status."""
        return [_picture(home) for home in self.homes]

    homes: tuple[Path, ...] = ()
    """Of the agents."""


Start = Callable[[Place, Path, contextlib.ExitStack], Running]


def start_pmesh(
    place: Place,
    folder: Path,
    stack: contextlib.ExitStack,
    *,
    patch: str = "",
    program: str = WORKER,
) -> Running:
    """An agent and a trainer for each rank.

    Args:
        place: where they run.
        folder: for the agents' homes and all that is said.
        stack: ends them.
        patch: source that each agent runs first.
        program: the trainer's module; its first line says that it has joined.
    """
    key = mesh_key_text(MeshKey(secrets.token_bytes(32)))
    ours: list[tuple[Path, dict[str, str]]] = []
    for rank in range(place.ranks):
        home = folder / f"mac-{rank + 1}"
        home.mkdir(mode=0o700)
        ours.append((home, {"PMESH_HOME": str(home), "PMESH_KEY": key, "PMESH_LOG_LEVEL": "error"}))
    agents: list[Process] = []
    for rank, (home, environment) in enumerate(ours):
        up = [sys.executable, "-c", f"{patch}\n{AGENT}", "up", "--name", home.name]
        if not place.hosts:  # else as a user does: all addresses, and mDNS
            up += ["--no-mdns", "--listen", "127.0.0.1:0"]
            if rank:
                up += ["--peer", _await_picture(ours[0][0], agents[0])["node"]["addresses"][0]]
        log = folder / f"agent-{rank + 1}.log"
        agents.append(
            stack.enter_context(Process(place, rank, up, environment=environment, log=log))
        )
    for agent, (home, _) in zip(agents, ours, strict=True):
        _await_picture(home, agent, members=place.ranks)
    environments = [
        environment | {"BENCH_AGENT": str(agent.pid)}
        for agent, (_, environment) in zip(agents, ours, strict=True)
    ]
    workers = _start_workers(place, "pmesh", folder, stack, environments, program=program)
    running = Running(workers, agents)
    running.homes = tuple(home for home, _ in ours)
    return running


def start_gloo(
    place: Place, folder: Path, stack: contextlib.ExitStack, *, program: str = WORKER
) -> Running:
    """A process for each rank, which find each other by a file."""
    store = folder / "gloo"
    environment = {"GLOO_SOCKET_IFNAME": place.interface, "BENCH_STORE": str(store)}
    environments = [environment] * place.ranks
    return Running(_start_workers(place, "gloo", folder, stack, environments, program=program))


def start_mlx(place: Place, folder: Path, stack: contextlib.ExitStack) -> Running:
    """A process for each rank, which find each other by a host file."""
    file = folder / "hosts.json"
    ports = place.free_ports()
    file.write_text(json.dumps([[f"{place.address(r)}:{p}"] for r, p in enumerate(ports)]))
    environments = [
        {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(file)} for rank in range(place.ranks)
    ]
    return Running(_start_workers(place, "mlx", folder, stack, environments))


START: Mapping[str, Start] = {"pmesh": start_pmesh, "gloo": start_gloo, "mlx": start_mlx}


def _inherited() -> dict[str, str]:
    """Without the settings of a developer's own agent."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PMESH_")}


def _start_workers(
    place: Place,
    system: str,
    folder: Path,
    stack: contextlib.ExitStack,
    environments: Sequence[Mapping[str, str]],
    *,
    program: str = WORKER,
) -> list[Process]:
    root = str(Path(__file__).parents[2])
    workers: list[Process] = []
    for rank, environment in enumerate(environments):
        command = [sys.executable, "-m", program, system, str(rank), str(place.ranks)]
        log = folder / f"{system}-{rank}.log"
        python_path = {"PYTHONPATH": root, **environment}
        workers.append(
            stack.enter_context(Process(place, rank, command, environment=python_path, log=log))
        )
    for worker in workers:
        worker.hear()  # it has joined
    return workers


def _await_picture(home: Path, agent: Process, *, members: int = 1) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and agent.popen.poll() is None:
        with contextlib.suppress(PmeshError):
            picture = _picture(home)
            if len(picture["view"]["members"]) >= members and picture["node"]["addresses"]:
                return picture
        time.sleep(0.05)
    raise BenchError(f"{agent.describe()} has not met {members} members; it said\n{agent.said()}")


def _picture(home: Path) -> dict[str, Any]:
    picture: dict[str, Any] = json.loads(ask_status(socket_path(home)))
    return picture


@contextlib.contextmanager
def started(place: Place, names: Sequence[str], folder: Path) -> Iterator[dict[str, Running]]:
    """These systems, one beside the other: only one of them works at a time."""
    with contextlib.ExitStack() as stack:
        running = {name: START[name](place, folder, stack) for name in names}
        yield running
        for system in running.values():
            for worker in system.workers:
                worker.tell(msgspec.json.encode(Order(what="end")).decode())
            for worker in system.workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.popen.wait(5.0)
