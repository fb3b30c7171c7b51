"""The systems that are compared, as processes: started, told what to do, measured, ended.

Their ranks run on the loopback of this machine, or one in each host of a network lab.
"""

import contextlib
import json
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, permutations
from pathlib import Path
from random import Random
from typing import IO, Any, Self

import msgspec

from tools.bench.cases import DRAWN, MEGABIT, Case
from tools.bench.results import Answer, Order
from tools.lab.agents import await_status, inherited, new_key, status_of
from tools.lab.commands import LabError
from tools.lab.net import Host, NetLab

PATIENCE_S = 60.0
LOG_LINES = 20
AGENT = "from pmesh.cli import main; main()"
WORKER = "tools.bench.worker"
ROOT = Path(__file__).parents[2]
FIRST_PORT = 5100  # in a lab, where nothing else listens
IPERF_S = 2
IPERF_ATTEMPTS = 20
STREAM_S = 0.5
CHUNK_BYTES = 1 << 20
_SEND = """
import socket, sys, time
chunk, until = bytes(1 << 20), time.perf_counter() + float(sys.argv[2])
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    while time.perf_counter() < until:
        connection.sendall(chunk)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """So many ranks, each with an address of its own or all with one."""

    ranks: int
    hosts: tuple[Host, ...] = field(default=())
    """None of them: loopback."""
    lines: tuple[tuple[int, str], ...] = ()
    """What iperf3 measures: the rank of a host, and the address of the other end."""
    patch: str = ""
    """Source that each agent runs first."""

    @property
    def interface(self) -> str:
        return "eth0" if self.hosts else "lo"

    def address(self, rank: int) -> str:
        return self.hosts[rank].ipv4 if self.hosts else "127.0.0.1"

    def free_ports(self) -> list[int]:
        if self.hosts:
            return [FIRST_PORT] * self.ranks
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(self.ranks)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            return [each.getsockname()[1] for each in sockets]

    def popen(self, rank: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:  # noqa: ANN401 - Popen's own
        if self.hosts:
            return self.hosts[rank].popen(command, **options)
        return subprocess.Popen(command, text=True, **options)

    def sent_bytes(self) -> int:
        """What has left the hosts since the lab was made, all headers included; 0 on loopback.

        Acknowledgements, heartbeats and mDNS count as well. The kernel hands the interface segments
        of up to 64 KiB with one header, as it does for a network card that cuts them.
        """
        counter = "/sys/class/net/eth0/statistics/tx_bytes"
        return sum(int(host.run(["cat", counter])) for host in self.hosts)


SPEEDS_PATCH = """
import psutil
stats_of_all = psutil.net_if_stats
def shaped():
    return {{n: s._replace(speed={speeds}.get(n, s.speed)) for n, s in stats_of_all().items()}}
psutil.net_if_stats = shaped
"""  # a veth claims 10 Gbit/s, whatever the lab gives it


@contextlib.contextmanager
def place_of(case: Case, *, draw: int = 0) -> Iterator[Place]:
    """This machine's loopback, or a host for each rank in the network of the case.

    Args:
        case: Which.
        draw: Of a mixed network, which of many.
    """
    ranks, cables = case.ranks, case.cables_bits_per_s
    if not case.in_lab:
        yield Place(ranks=ranks)
        return
    with NetLab(ranks, networks=max(1, len(cables))) as lab:
        ends = (0, 1)
        if case.network == "mixed":
            ends = _shape_at_random(lab, Random(draw))  # noqa: S311 - repeats a draw
        elif case.network == "chain":  # a cable between each two: the one in the middle has two
            lab.shape_pairs({pair: cables[0] for pair in pairwise(lab.hosts) if cables})
            lab.cut(lab.hosts[0], lab.hosts[-1])
        else:
            for host in lab.hosts:
                for network, bits_per_s in enumerate(cables):
                    lab.shape(host, bits_per_s=bits_per_s, network=network)
        speeds = {f"eth{network}": bits // MEGABIT for network, bits in enumerate(cables)}
        yield Place(
            ranks=ranks,
            hosts=lab.hosts,
            lines=tuple(
                (ends[0], lab.hosts[ends[1]].ipv4_in(network))
                for network in range(len(cables) or 1)
            ),
            patch=SPEEDS_PATCH.format(speeds=speeds) if len(cables) > 1 else "",
        )


def _shape_at_random(lab: NetLab, random: Random) -> tuple[int, int]:
    """Give each pair of hosts a speed of its own; return the slowest edge of the best ring."""
    speeds = {
        pair: random.choice(DRAWN) * MEGABIT for pair in combinations(range(len(lab.hosts)), 2)
    }
    lab.shape_pairs({(lab.hosts[a], lab.hosts[b]): speed for (a, b), speed in speeds.items()})

    def slowest(ring: tuple[int, ...]) -> tuple[int, int]:
        edges = [(min(pair), max(pair)) for pair in pairwise((0, *ring, 0))]
        return min(edges, key=lambda edge: speeds[edge])

    rings = permutations(range(1, len(lab.hosts)))
    return max(map(slowest, rings), key=lambda edge: speeds[edge])


Ceiling = Callable[[], tuple[float, ...]]
"""Measures once: bytes a second, of the stream's payload, in one direction, on each line."""


@contextlib.contextmanager
def ceiling_of(place: Place) -> Iterator[Ceiling]:
    if not place.hosts:
        yield lambda: (stream_bytes_per_s(),)
        return
    if shutil.which("iperf3") is None:
        raise LabError("the line is measured by iperf3, which is missing: apt install iperf3")
    servers = [
        place.popen(rank, ["iperf3", "-s"], stdout=subprocess.DEVNULL)
        for rank in range(place.ranks)
    ]
    try:
        yield lambda: tuple(iperf_bytes_per_s(place, *line) for line in place.lines)
    finally:
        for server in servers:
            server.kill()
            server.wait()


def iperf_bytes_per_s(place: Place, rank: int, address: str) -> float:
    """`iperf3 --bidir` between two hosts: what one direction gets, of both the mean."""
    command = ["iperf3", "-c", address, "-t", str(IPERF_S), "--bidir", "-J"]
    for _ in range(IPERF_ATTEMPTS):  # its server may not listen yet, or still be at the last turn
        client = place.popen(rank, command, stdout=subprocess.PIPE)
        output, _ = client.communicate(timeout=30.0)
        end = json.loads(output)["end"] if client.returncode == 0 else {}
        if "sum_received" in end:  # else the server was still at the last turn, and has said so
            both = (end["sum_received"], end["sum_received_bidir_reverse"])
            return float(sum(each["bits_per_second"] for each in both)) / 2 / 8
        time.sleep(0.1)
    raise LabError(f"{' '.join(command)} failed: {output.strip()}")


def stream_bytes_per_s(seconds: float = STREAM_S) -> float:
    """From another process to this one by a plain TCP stream, without any framing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        port = str(listener.getsockname()[1])
        with subprocess.Popen([sys.executable, "-c", _SEND, port, str(seconds)]) as sender:
            try:
                connection, _ = listener.accept()
                with connection:
                    buffer = bytearray(CHUNK_BYTES)
                    connection.recv_into(buffer)  # from here on it flows
                    began, received = time.perf_counter(), 0
                    while count := connection.recv_into(buffer):
                        received += count
                    return received / (time.perf_counter() - began)
            finally:
                sender.kill()


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
                env=inherited() | dict(environment),
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
        assert self.popen.stdin is not None  # noqa: S101 - it was started with a pipe
        with contextlib.suppress(BrokenPipeError):  # `hear` says why
            self.popen.stdin.write(line + "\n")
            self.popen.stdin.flush()

    def hear(self, *, timeout_s: float = PATIENCE_S) -> str:
        """The next line of its standard output; raises LabError if none comes."""
        with contextlib.suppress(queue.Empty):
            if line := self._lines.get(timeout=timeout_s):
                return line
        raise LabError(f"{self.describe()} has not answered; it said\n{self.said()}")

    def describe(self) -> str:
        """Its name, and whether it still runs."""
        code = self.popen.poll()
        return f"{self._log.stem} " + ("(runs)" if code is None else f"(ended with {code})")

    def said(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def _read(self) -> None:
        stdout: IO[str] | None = self.popen.stdout
        assert stdout is not None  # noqa: S101 - it was started with a pipe
        with contextlib.suppress(ValueError):  # closed meanwhile
            for line in stdout:
                self._lines.put(line)
        self._lines.put("")


@dataclass(frozen=True, slots=True)
class Running:
    """A system with all its processes, ready for orders."""

    workers: Sequence[Process]
    agents: Sequence[Process] = ()
    homes: Sequence[Path] = ()

    def carry_out(self, order: Order, *, timeout_s: float = PATIENCE_S) -> tuple[Answer, ...]:
        for worker in self.workers:
            worker.tell(msgspec.json.encode(order).decode())
        return tuple(
            msgspec.json.decode(worker.hear(timeout_s=timeout_s), type=Answer)
            for worker in self.workers
        )

    def traffic(self) -> list[dict[str, int]]:
        """Of each agent, as `pmesh status --json` has it."""
        return [status_of(home)["traffic"] for home in self.homes]

    def end(self) -> None:
        for worker in self.workers:
            worker.tell(msgspec.json.encode(Order(what="end")).decode())
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.popen.wait(5.0)


Start = Callable[[Place, Path, contextlib.ExitStack], Running]


def start_pmesh(
    place: Place, folder: Path, stack: contextlib.ExitStack, *, patch: str = ""
) -> Running:
    """An agent and a trainer for each rank; for the arguments see `start_agents`."""
    agents, ours = start_agents(place, folder, stack, patch=patch)
    environments = [
        environment | {"BENCH_AGENT": str(agent.pid)}
        for agent, (_, environment) in zip(agents, ours, strict=True)
    ]
    workers = _start_workers(place, "pmesh", folder, stack, environments)
    return Running(workers, agents, tuple(home for home, _ in ours))


def start_agents(
    place: Place, folder: Path, stack: contextlib.ExitStack, *, patch: str = ""
) -> tuple[list[Process], list[tuple[Path, dict[str, str]]]]:
    """An agent for each rank; returns them once they have met, and each one's home and settings.

    Args:
        place: where they run.
        folder: for the agents' homes and all that is said.
        stack: ends them.
        patch: source that each agent runs first.
    """
    key = new_key()
    ours: list[tuple[Path, dict[str, str]]] = []
    for rank in range(place.ranks):
        home = folder / f"mac-{rank + 1}"
        home.mkdir(mode=0o700)
        ours.append((home, {"PMESH_HOME": str(home), "PMESH_KEY": key, "PMESH_LOG_LEVEL": "error"}))
    agents: list[Process] = []
    for rank, (home, environment) in enumerate(ours):
        up = [sys.executable, "-c", f"{patch}\n{place.patch}\n{AGENT}", "up", "--name", home.name]
        if not place.hosts:  # else as a user does: all addresses, and mDNS
            up += ["--no-mdns", "--listen", "127.0.0.1:0"]
            if rank:
                up += ["--peer", _await_status(ours[0][0], agents[0])["node"]["addresses"][0]]
        log = folder / f"agent-{rank + 1}.log"
        agents.append(
            stack.enter_context(Process(place, rank, up, environment=environment, log=log))
        )
    for agent, (home, _) in zip(agents, ours, strict=True):
        _await_status(home, agent, members=place.ranks)
    return agents, ours


def start_gloo(place: Place, folder: Path, stack: contextlib.ExitStack) -> Running:
    """A process for each rank, which find each other by a file."""
    store = folder / "gloo"
    environment = {"GLOO_SOCKET_IFNAME": place.interface, "BENCH_STORE": str(store)}
    environments = [environment] * place.ranks
    return Running(_start_workers(place, "gloo", folder, stack, environments))


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


def _start_workers(
    place: Place,
    system: str,
    folder: Path,
    stack: contextlib.ExitStack,
    environments: Sequence[Mapping[str, str]],
) -> list[Process]:
    workers: list[Process] = []
    for rank, environment in enumerate(environments):
        command = [sys.executable, "-m", WORKER, system, str(rank), str(place.ranks)]
        log = folder / f"{system}-{rank}.log"
        python_path = {"PYTHONPATH": str(ROOT), **environment}
        workers.append(
            stack.enter_context(Process(place, rank, command, environment=python_path, log=log))
        )
    for worker in workers:
        worker.hear()  # it has joined
    return workers


def _await_status(home: Path, agent: Process, *, members: int = 1) -> dict[str, Any]:
    def has_met(picture: dict[str, Any]) -> bool:
        return len(picture["view"]["members"]) >= members and bool(picture["node"]["addresses"])

    found = await_status(
        home, has_met, within_s=PATIENCE_S, runs=lambda: agent.popen.poll() is None
    )
    if found is None:
        raise LabError(f"{agent.describe()} has not met {members} members; it said\n{agent.said()}")
    return found


@contextlib.contextmanager
def started(place: Place, names: Sequence[str], folder: Path) -> Iterator[dict[str, Running]]:
    """These systems, one beside the other: only one of them works at a time."""
    with contextlib.ExitStack() as stack:
        running = {name: START[name](place, folder, stack) for name in names}
        yield running
        for system in running.values():
            system.end()
