"""The systems that are compared, as processes: started, told what to do, measured, ended.

Their ranks run on the loopback of this machine, or one in each host of a network lab.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from pathlib import Path
from random import Random

import msgspec

from tools.bench.cases import DRAWN, MEGABIT, Case
from tools.bench.results import Order, RankAnswer
from tools.bench.worker import work
from tools.lab.call import words_for
from tools.lab.commands import LabError
from tools.lab.mesh import ROOT, LabMesh, Node, inherited, status_of
from tools.lab.net import LabHost, NetLab, loopbacks
from tools.lab.program import PATIENCE_S, LabProgram

AGENT_PID = "BENCH_AGENT"
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
class RankHosts:
    """So many ranks, each with an address of its own or all with one."""

    hosts: tuple[LabHost, ...]
    """Of each rank; those of one agent are side by side."""
    lines: tuple[tuple[int, str], ...] = ()
    """What iperf3 measures: the rank of a host, and the address of the other end."""
    patch: str = ""
    """Source that each agent runs first."""
    per_agent: int = 1
    """How many of pmesh's trainers each agent has."""

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    @property
    def machines(self) -> tuple[LabHost, ...]:
        """The hosts, each once."""
        return self.hosts[:: self.per_agent]

    @property
    def in_lab(self) -> bool:
        return bool(self.hosts[0].lab)

    @property
    def interface(self) -> str:
        return "eth0" if self.in_lab else "lo"

    def free_ports(self) -> list[int]:
        if self.in_lab:
            return [FIRST_PORT] * self.ranks
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(self.ranks)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            return [each.getsockname()[1] for each in sockets]

    def sent_bytes(self) -> int:
        """What has left the hosts since the lab was made, all headers included; 0 on loopback.

        Acknowledgements, heartbeats and mDNS count as well. The kernel hands the interface segments
        of up to 64 KiB with one header, as it does for a network card that cuts them.
        """
        counter = "/sys/class/net/eth0/statistics/tx_bytes"
        return sum(int(host.run(["cat", counter])) for host in self.machines if self.in_lab)


SPEEDS_PATCH = """
import psutil
stats_of_all = psutil.net_if_stats
def shaped():
    return {{n: s._replace(speed={speeds}.get(n, s.speed)) for n, s in stats_of_all().items()}}
psutil.net_if_stats = shaped
"""  # a veth claims 10 Gbit/s, whatever the lab gives it


@contextlib.contextmanager
def place_of(case: Case, *, draw: int = 0) -> Iterator[RankHosts]:
    """This machine's loopback, or a host for each agent in the network of the case.

    Args:
        case: Which.
        draw: Of a mixed network, which of many.
    """
    cables = case.cables_bits_per_s
    if not case.in_lab:
        yield RankHosts(hosts=loopbacks(case.ranks), per_agent=case.per_agent)
        return
    with NetLab(case.machines, networks=max(1, len(cables))) as lab:
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
        yield RankHosts(
            hosts=tuple(host for host in lab.hosts for _ in range(case.per_agent)),
            per_agent=case.per_agent,
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
def ceiling_of(place: RankHosts) -> Iterator[Ceiling]:
    if not place.in_lab:
        yield lambda: (stream_bytes_per_s(),)
        return
    if shutil.which("iperf3") is None:
        raise LabError("the line is measured by iperf3, which is missing: apt install iperf3")
    with contextlib.ExitStack() as stack:
        for host in place.machines:
            server = host.popen(["iperf3", "-s"], stdout=subprocess.DEVNULL)
            stack.callback(server.wait)
            stack.callback(server.kill)
        yield lambda: tuple(iperf_bytes_per_s(place, *line) for line in place.lines)


def iperf_bytes_per_s(place: RankHosts, rank: int, address: str) -> float:
    """`iperf3 --bidir` between two hosts: what one direction gets, of both the mean."""
    command = ["iperf3", "-c", address, "-t", str(IPERF_S), "--bidir", "-J"]
    for _ in range(IPERF_ATTEMPTS):  # its server may not listen yet, or still be at the last turn
        client = place.hosts[rank].popen(command, stdout=subprocess.PIPE)
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


@dataclass(frozen=True, slots=True)
class RunningSystem:
    """A system with all its processes, ready for orders."""

    workers: Sequence[LabProgram]
    nodes: Sequence[Node] = ()

    def carry_out(self, order: Order, *, timeout_s: float = PATIENCE_S) -> tuple[RankAnswer, ...]:
        for worker in self.workers:
            worker.tell(msgspec.json.encode(order).decode())
        return tuple(
            msgspec.json.decode(worker.hear(within_s=timeout_s), type=RankAnswer)
            for worker in self.workers
        )

    def traffic(self) -> list[dict[str, int]]:
        """Of each agent, as `pmesh status --json` has it."""
        return [status_of(node.home)["traffic"] for node in self.nodes]

    def end(self) -> None:
        for worker in self.workers:
            worker.tell(msgspec.json.encode(Order(what="end")).decode())
        for worker in self.workers:
            with contextlib.suppress(LabError):
                worker.join(within_s=5.0)


Start = Callable[[RankHosts, Path, contextlib.ExitStack], RunningSystem]


def start_pmesh(
    place: RankHosts, folder: Path, stack: contextlib.ExitStack, *, patch: str = ""
) -> RunningSystem:
    """A trainer for each rank, and their agents; for the arguments see `start_agents`."""
    nodes = start_agents(place, folder, stack, patch=patch)
    environments = [
        node.environment | {AGENT_PID: str(node.pid)}
        for node in nodes
        for _ in range(place.per_agent)
    ]
    return RunningSystem(_start_workers(place, "pmesh", folder, stack, environments), nodes)


def start_agents(
    place: RankHosts, folder: Path, stack: contextlib.ExitStack, *, patch: str = ""
) -> list[Node]:
    """An agent on each machine; returns them once they have met.

    Args:
        place: where they run.
        folder: for the agents' homes.
        stack: ends them.
        patch: source that each agent runs first.
    """
    mesh = LabMesh(
        place.machines,
        folder=folder,
        patch=f"{patch}\n{place.patch}",
        environment=lambda _: {"PMESH_LOG_LEVEL": "error"},
    )
    stack.enter_context(mesh)
    mesh.start_agents()
    mesh.await_view()
    return mesh.nodes


def start_gloo(place: RankHosts, folder: Path, stack: contextlib.ExitStack) -> RunningSystem:
    """A process for each rank."""
    return RunningSystem(_start_workers(place, "gloo", folder, stack, gloo_settings(place, folder)))


def gloo_settings(place: RankHosts, folder: Path) -> list[dict[str, str]]:
    """What each rank of gloo reads from its environment; they find each other by a file."""
    settings = {"GLOO_SOCKET_IFNAME": place.interface, "BENCH_STORE": str(folder / "gloo")}
    return [settings] * place.ranks


def start_mlx(place: RankHosts, folder: Path, stack: contextlib.ExitStack) -> RunningSystem:
    """A process for each rank, which find each other by a host file."""
    return RunningSystem(_start_workers(place, "mlx", folder, stack, ring_settings(place, folder)))


def ring_settings(place: RankHosts, folder: Path) -> list[dict[str, str]]:
    """What each rank of MLX's ring reads from its environment; the ports are free for now."""
    file = folder / "hosts.json"
    hosts = zip(place.hosts, place.free_ports(), strict=True)
    file.write_text(json.dumps([[f"{host.ipv4}:{port}"] for host, port in hosts]))
    return [{"MLX_RANK": str(rank), "MLX_HOSTFILE": str(file)} for rank in range(place.ranks)]


START: Mapping[str, Start] = {"pmesh": start_pmesh, "gloo": start_gloo, "mlx": start_mlx}


def start_ranks(
    hosts: Sequence[LabHost],
    name: str,
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    *,
    folder: Path,
    stack: contextlib.ExitStack,
) -> list[LabProgram]:
    """A program of Python for each rank: `commands` are its words. Its errors go into a file."""
    settings = inherited() | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    return [
        stack.enter_context(
            LabProgram.start(
                f"{name}-{rank}",
                [sys.executable, *command],
                environment=settings | dict(environment),
                host=hosts[rank],
                errors=folder / f"{name}-{rank}.log",
                told=True,
            )
        )
        for rank, (command, environment) in enumerate(zip(commands, environments, strict=True))
    ]


def _start_workers(
    place: RankHosts,
    system: str,
    folder: Path,
    stack: contextlib.ExitStack,
    environments: Sequence[Mapping[str, str]],
) -> list[LabProgram]:
    commands = [words_for(work, system, rank, place.ranks) for rank in range(place.ranks)]
    workers = start_ranks(place.hosts, system, commands, environments, folder=folder, stack=stack)
    for worker in workers:
        worker.hear()  # it has joined
    return workers


@contextlib.contextmanager
def started(
    place: RankHosts, names: Sequence[str], folder: Path
) -> Iterator[dict[str, RunningSystem]]:
    """These systems, one beside the other: only one of them works at a time."""
    with contextlib.ExitStack() as stack:
        running = {name: START[name](place, folder, stack) for name in names}
        yield running
        for system in running.values():
            system.end()
