"""Real agents and trainers on loopback, a hostile member and a hostile trainer, and what to watch.

An episode: two agents with a trainer each; liars of one seed for a while; then they are gone, and
the agents must agree, and the trainers go on or have an error. Agents live for many episodes.
"""

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self, get_args

import msgspec
import psutil

from pmesh.client.connect import Quorum
from pmesh.client.control import stop_agent
from pmesh.errors import PmeshError
from pmesh.paths import socket_path
from tools.fuzz.agent import LONG_STEP, Order
from tools.fuzz.corpus import Case, load, recorded
from tools.lab.agents import await_status, inherited, new_key, status_of

LIES_FOR_S = 20.0
PATIENCE_S = 30.0
LOOK_EVERY_S = 0.5
LIMITS = {
    "private MiB": 300,  # an agent with two trainers takes 60
    # Arenas: half of the machine's memory for all programs, and what the others trained in.
    "shared MiB": psutil.virtual_memory().total / (1 << 20) / 2 + 256,
    "descriptors": 512,
}
CONTAINED = "internal error"  # ended one link or session only, and is a defect all the same
DEFECTS = (CONTAINED, LONG_STEP)
NAMES = ("honest-1", "honest-2")
LIAR = "liar"
QUORUMS = get_args(Quorum)
LAST_LINES = 12
LIAR_NUMBER = 1000  # plus its seed: each liar is another member


class FindingError(Exception):
    """What must not happen has happened."""


class Process:
    """A program whose output goes into a file."""

    def __init__(self, log: Path, command: list[str], environment: dict[str, str]) -> None:
        self.log = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.pid = self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self._popen.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(PATIENCE_S)
        self._popen.kill()
        self._popen.wait()


class Arena:
    """Two honest agents with their trainers, and whoever lies to them.

    Args:
        runner: What runs a module: `python`, or coverage.
        patience_s: How long the agents have to meet, and trainers to go on. A busy machine needs
            more than the default.
    """

    def __init__(self, runner: tuple[str, ...] = (), *, patience_s: float = PATIENCE_S) -> None:
        self._runner = runner
        self._patience_s = patience_s
        self._folder = tempfile.TemporaryDirectory(prefix="pmesh-fuzz-")
        self._path = Path(self._folder.name)
        self._key = new_key()
        self._agents: dict[str, Process] = {}
        self._trainers: dict[str, Process] = {}
        self._liars: dict[Literal["member", "trainer"], Process] = {}
        self.worst: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.end_all()
        self._folder.cleanup()

    def end_all(self) -> None:
        """End all processes; the agents as a user would, so that what they measure is written."""
        for process in (*self._liars.values(), *self._trainers.values()):
            process.end()
        for name, agent in self._agents.items():
            with contextlib.suppress(PmeshError):
                stop_agent(self._home(name))
            agent.end(signal.SIGTERM)
        self._liars, self._trainers, self._agents = {}, {}, {}

    # --- an episode

    def run(self, seed: int, *, lies_for_s: float = LIES_FOR_S, replay: Path | None = None) -> None:
        """Raises FindingError."""
        try:
            self._start_agents()
            begin = self._start_lying_member(seed, replay)
            self._start_trainers(seed)
            begin.touch()
            self._start_lying_trainer(seed, replay)
            self._watch_for(lies_for_s)
            self._end_liars(seed)
            self._check_afterwards()
        except FindingError as e:
            raise FindingError(f"{e}\n{self._last_words()}") from e
        finally:
            for process in (*self._liars.values(), *self._trainers.values()):
                process.end()

    def case(self, liar: Literal["member", "trainer"], seed: int, finding: str) -> Case:
        messages = recorded(self._path / f"{liar}-{seed}.lies")
        return Case(liar=liar, seed=seed, finding=finding, messages=messages)

    def _start_agents(self) -> None:
        for number, name in enumerate(NAMES):
            if name not in self._agents:
                peer = ("--peer", self._address(NAMES[0])) if number else ()
                order = Order(number + 1)
                self._agents[name] = self._start_agent(name, order, *peer, runner=self._runner)
        self._await(self._agree, "the agents do not meet")

    def _start_trainers(self, seed: int) -> None:
        """The liar's machine has a rank in every other episode: its lies are about results, too."""
        names = (*NAMES, *[LIAR] * (seed % 2))
        quorum = QUORUMS[seed // 2 % 2]
        for name in names:
            self._trainers[name] = self._start(
                f"trainer of {name}", name, "tools.fuzz.honest", str(len(names)), quorum
            )
        self._await(
            lambda: all(self._ops(name) or self._failed(name) for name in NAMES),
            "the trainers do not begin",
        )

    def _start_lying_member(self, seed: int, replay: Path | None) -> Path:
        """Returns the file with which it begins to lie."""
        begin = self._path / f"begin-{seed}"
        begin.unlink(missing_ok=True)
        order = Order(
            LIAR_NUMBER + seed,
            seed,
            str(self._path / f"member-{seed}.lies"),
            str(begin),
            str(replay) if replay and load(replay).liar == "member" else "",
        )
        shutil.rmtree(self._home(LIAR), ignore_errors=True)  # another seed is another member
        peers = [word for name in NAMES for word in ("--peer", self._address(name))]
        self._liars["member"] = self._start_agent(LIAR, order, *peers)
        return begin

    def _start_lying_trainer(self, seed: int, replay: Path | None) -> None:
        log = str(self._path / f"trainer-{seed}.lies")
        case = [str(replay)] if replay and load(replay).liar == "trainer" else []
        arguments = (str(self._socket(NAMES[0])), str(seed), log, *case)
        self._liars["trainer"] = self._start(
            f"lying trainer {seed}", NAMES[0], "tools.fuzz.trainer", *arguments
        )

    def _end_liars(self, seed: int) -> None:
        self._liars["member"].end(signal.SIGTERM if seed % 2 else signal.SIGKILL)
        self._liars["trainer"].end()
        self._liars = {}

    def _watch_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
            self._look()

    def _look(self) -> None:
        """Raises FindingError for what no liar may cause."""
        for name, agent in self._agents.items():
            if not agent.alive:
                raise FindingError(f"{name}'s agent has died")
            for defect in (CONTAINED,) if self._runner else DEFECTS:
                if defect in agent.output:
                    raise FindingError(
                        f"{name}: {defect}{agent.output.partition(defect)[2][:4000]}"
                    )
            self._measure(name, agent)
        for name in NAMES:
            output = self._trainers[name].output
            if "WRONG" in output or "Traceback" in output:
                raise FindingError(f"{name}'s trainer: {output[-500:]}")

    def _measure(self, name: str, agent: Process) -> None:
        process = psutil.Process(agent.pid)
        memory = process.memory_info()
        measured = {
            "private MiB": (memory.rss - memory.shared) / (1 << 20),
            "shared MiB": memory.shared / (1 << 20),
            "descriptors": process.num_fds(),
            "lag ms": self._status(name)["loop_lag_ms"],
        }
        for what, value in measured.items():
            self.worst[what] = max(self.worst.get(what, 0.0), value)
            if value > LIMITS.get(what, math.inf):  # a busy machine lags: see LONG_STEP
                raise FindingError(f"{name}: {what} {value:,.0f}")

    def _check_afterwards(self) -> None:
        self._await(self._agree, "the agents do not agree again")
        before = {name: self._ops(name) for name in NAMES}
        self._await(
            lambda: all(self._failed(n) or self._ops(n) > before[n] for n in NAMES),
            "a trainer neither goes on nor has an error",
        )
        if any(not self._failed(n) and self._last_size(n) == 1 for n in NAMES) and not any(
            self._failed(name) for name in NAMES
        ):
            raise FindingError("a trainer goes on alone, and nobody has an error")

    # --- what is to be seen

    def _agree(self) -> bool:
        views = [self._status(name)["view"] for name in NAMES]
        names = [sorted(member["name"] for member in view["members"]) for view in views]
        return views[0]["epoch"] == views[1]["epoch"] and names[0] == sorted(NAMES)

    def _status(self, name: str) -> dict[str, Any]:
        try:
            return status_of(self._home(name))
        except PmeshError as e:
            raise FindingError(f"{name}'s agent does not answer: {e}") from e

    def _ops(self, name: str) -> int:
        return len(re.findall(r"^op ", self._trainers[name].output, re.MULTILINE))

    def _failed(self, name: str) -> bool:
        return "ERROR" in self._trainers[name].output

    def _last_size(self, name: str) -> int:
        return int(re.findall(r"^op \d+ of (\d+)", self._trainers[name].output, re.MULTILINE)[-1])

    def _await(self, holds: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + self._patience_s
        while not holds():
            if time.monotonic() > deadline:
                raise FindingError(otherwise)
            time.sleep(LOOK_EVERY_S)
            self._look_if_up()

    def _look_if_up(self) -> None:
        if all(name in self._trainers for name in NAMES):
            self._look()

    def _last_words(self) -> str:
        """What everybody has printed last, and what the agents that live know of jobs."""
        processes = (*self._agents.values(), *self._trainers.values(), *self._liars.values())
        said = [
            f"--- {p.log.stem}\n" + "\n".join(p.output.splitlines()[-LAST_LINES:])
            for p in processes
        ]
        for name, agent in self._agents.items():
            if agent.alive:
                with contextlib.suppress(FindingError):
                    said.append(f"--- jobs at {name}: {self._status(name)['jobs']}")
        return "\n".join(said)

    # --- processes

    def _home(self, name: str) -> Path:
        return self._path / name

    def _socket(self, name: str) -> Path:
        return socket_path(self._home(name))

    def _address(self, name: str) -> str:
        found = await_status(
            self._home(name),
            lambda picture: picture["node"]["addresses"],
            within_s=self._patience_s,
        )
        if found is None:
            raise FindingError(f"{name}'s agent does not start")
        return str(found["node"]["addresses"][0])

    def _start_agent(
        self, name: str, order: Order, *options: str, runner: tuple[str, ...] = ()
    ) -> Process:
        text = msgspec.json.encode(order).decode()
        up = ("up", "--name", name, "--no-mdns", "--listen", "127.0.0.1:0", *options)
        agent = self._start(name, name, "tools.fuzz.agent", text, *up, runner=runner)
        self._address(name)
        return agent

    def _start(
        self, label: str, home: str, module: str, *arguments: str, runner: tuple[str, ...] = ()
    ) -> Process:
        environment = inherited() | {
            "PMESH_HOME": str(self._home(home)),
            "PMESH_KEY": self._key,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        }
        log = self._path / f"{label}.log"
        log.unlink(missing_ok=True)
        command = [sys.executable, *runner, "-m", module, *arguments]
        return Process(log, command, environment)
