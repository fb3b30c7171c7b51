"""All ranks of one system, started as its own pages say, and the lines that they print."""

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from tools.bench.systems import RankHosts, ring_settings, start_ranks
from tools.compare.judge import CallRecord, RankRecord
from tools.lab.call import words_for
from tools.lab.mesh import LabMesh, inherited, new_key
from tools.lab.program import LabProgram

System: TypeAlias = Literal["pmesh", "gloo", "mlx", "macfleet"]
MACFLEET_RANK = Path(__file__).with_name("macfleet_rank.py")
Fleet: TypeAlias = dict[str, Any]
"""Settings of `macfleet_rank.py`."""


@dataclass(slots=True)
class Ranks:
    """The ranks of one system: each names its process in what it prints."""

    programs: Sequence[LabProgram]
    agents: Mapping[int, int] = field(default_factory=dict[int, int])
    """What else runs on the machine of a rank for it: the process of its agent or launcher."""

    def lines(self) -> list[dict[str, Any]]:
        """All that ranks have reported, in the order in which they printed it."""
        found = [line for program in self.programs for line in program.reports if "rank" in line]
        return sorted(found, key=lambda line: float(line["at"]))

    def pids(self) -> dict[int, int]:
        return {line["rank"]: line["pid"] for line in self.lines()}

    def send(self, rank: int, number: signal.Signals, *, to_all: bool = False) -> None:
        """A signal to the process of the rank, or to all that runs on its machine."""
        for pid in [self.pids()[rank], *([self.agents[rank]] if to_all and self.agents else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def steps(self) -> dict[int, int]:
        """Of each rank, the last step that it has begun."""
        return {line["rank"]: line["step"] for line in self.lines() if "step" in line}


class RankWatch:
    """What became of ranks, as one looks again and again."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._ends = dict[int, float]()

    def look(self) -> None:
        """Note who has ended; call this often."""
        for rank, pid in self._ranks.pids().items():
            if rank not in self._ends and not _runs(pid):
                self._ends[rank] = time.monotonic()

    @property
    def ended(self) -> set[int]:
        return {*self._ends}

    def training(self, rank: int) -> RankRecord:
        lines = [line for line in self._ranks.lines() if line["rank"] == rank]
        steps = {line["step"]: line for line in lines if "step" in line}
        return RankRecord(
            steps={step: line["at"] for step, line in steps.items()},
            weights={step: line["weights"] for step, line in steps.items()},
            ended=self._ends.get(rank),
            error=_error(lines),
        )

    def call(self, rank: int, *, since: float) -> CallRecord:
        lines = [line for line in self._ranks.lines() if line["rank"] == rank]
        got = next((line for line in lines if "values" in line), None)
        if got is not None:
            return CallRecord(size=got["size"], values=tuple(got["values"]))
        ended = self._ends.get(rank)
        at = next((line["at"] for line in lines if "error" in line), ended or time.monotonic())
        return CallRecord(ended=ended is not None, error=_error(lines), after_s=at - since)


def _error(lines: Sequence[Mapping[str, Any]]) -> str:
    return next((str(line["error"]) for line in lines if "error" in line), "")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """Starts ranks of any system in one place, until its stack ends them."""

    place: RankHosts
    folder: Path
    stack: contextlib.ExitStack
    macfleet_python: Path | None = None
    started: list[Ranks] = field(default_factory=list[Ranks])
    """All that this has started."""

    def start(
        self,
        system: System,
        function: Callable[..., object],
        *arguments: object,
        fleet: Fleet | None = None,
        job: str = "",
        strange: int | None = None,
    ) -> Ranks:
        """Start a rank for each host.

        Args:
            system: of which library.
            function: of `tools.compare.ranks`; the system and the number of ranks come first.
            arguments: what it gets after these.
            fleet: settings of MacFleet's ranks.
            job: what MacFleet's ranks do.
            strange: a rank that has another key or token, where there is such a thing.
        """
        words = words_for(function, system, self.place.ranks, *arguments)
        match system:
            case "pmesh":
                ranks = self._start_pmesh(words, strange)
            case "gloo":
                ranks = self._start_gloo(words)
            case "mlx":
                ranks = self._start_mlx(words)
            case "macfleet":
                ranks = self._start_macfleet(job, fleet or {}, strange)
        self.started.append(ranks)
        return ranks

    def _start_pmesh(self, words: Sequence[str], strange: int | None) -> Ranks:
        mesh = self.stack.enter_context(
            LabMesh(
                self.place.hosts,
                folder=self.folder,
                environment=lambda k: {"PMESH_KEY": new_key()} if k - 1 == strange else {},
            )
        )
        mesh.start_agents()
        if strange is None:
            mesh.await_view()
        for node in mesh.nodes:
            node.await_address()
        environments = [
            node.environment | {"COMPARE_RANK": str(k)} for k, node in enumerate(mesh.nodes)
        ]
        programs = self._programs("pmesh", [words] * self.place.ranks, environments)
        return Ranks(programs, {k: node.pid for k, node in enumerate(mesh.nodes)})

    def _start_gloo(self, words: Sequence[str]) -> Ranks:
        """By torchrun, one on each machine."""
        port = str(self.place.free_ports()[0])
        at = ("--master-addr", self.place.hosts[0].ipv4, "--master-port", port)
        nodes = ("--nnodes", str(self.place.ranks), "--nproc-per-node", "1", *at)
        commands = [
            ["-m", "torch.distributed.run", *nodes, "--node-rank", str(rank), *words]
            for rank in range(self.place.ranks)
        ]
        environment = {"GLOO_SOCKET_IFNAME": self.place.interface, "OMP_NUM_THREADS": "1"}
        programs = self._programs("gloo", commands, [environment] * self.place.ranks)
        return Ranks(programs, {rank: program.pid for rank, program in enumerate(programs)})

    def _start_mlx(self, words: Sequence[str]) -> Ranks:
        """By `mlx.launch`, or where it would need ssh, with the environment that it makes."""
        if self.place.in_lab:
            commands = [words] * self.place.ranks
            return Ranks(self._programs("mlx", commands, ring_settings(self.place, self.folder)))
        launch = "from mlx._distributed_utils.launch import main; main()"
        port = str(_free_run(self.place.ranks))
        options = ("-n", str(self.place.ranks), "-p", port, "--backend", "ring")
        return Ranks(
            self._programs("mlx", [["-c", launch, *options, sys.executable, *words]], [{}])
        )

    def _start_macfleet(self, job: str, fleet: Fleet, strange: int | None) -> Ranks:
        token = secrets.token_urlsafe(32)
        tokens = [secrets.token_urlsafe(32) if k == strange else token for k in self._numbers]
        settings = fleet_settings(self.place) | {"tokens": tokens} | fleet
        return Ranks([self.start_macfleet_rank(job, k, settings) for k in self._numbers])

    def start_macfleet_rank(self, job: str, rank: int, settings: Fleet) -> LabProgram:
        """One rank with a home of its own, where MacFleet keeps its files."""
        home = self.folder / f"macfleet-{rank}"
        home.mkdir(exist_ok=True)
        return self.stack.enter_context(
            LabProgram.start(
                f"macfleet-{rank}",
                [
                    str(self.macfleet_python),
                    str(MACFLEET_RANK),
                    job,
                    str(rank),
                    json.dumps(settings),
                ],
                environment=inherited() | {"HOME": str(home), "OMP_NUM_THREADS": "1"},
                host=self.place.hosts[rank],
                errors=self.folder / f"macfleet-{rank}.log",
                told=True,
            )
        )

    @property
    def _numbers(self) -> range:
        return range(self.place.ranks)

    def _programs(
        self,
        system: str,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
    ) -> list[LabProgram]:
        return start_ranks(
            self.place.hosts, system, commands, environments, folder=self.folder, stack=self.stack
        )


def fleet_settings(place: RankHosts) -> Fleet:
    """What MacFleet's ranks are told unless a row says something else."""
    return {
        "hosts": [host.ipv4 for host in place.hosts],
        "port": _free_run(10 * place.ranks),
        "join_s": 40.0,
        "compression": "none",
        "counts": place.in_lab,
        "pause_s": 0.02,
    }


def _free_run(count: int) -> int:
    """The first of so many ports in a row, the first and the last of which are free."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            first = int(one.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                other.bind(("127.0.0.1", first + count))
                return first
