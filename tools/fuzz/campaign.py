"""Real agents and trainers on loopback, a hostile member and a hostile trainer, and what to watch.

An episode: two agents with a trainer each; liars of one seed for a while; then they are gone, and
the agents must agree, and the trainers go on or have an error. Agents live for many episodes.

While the liars are there, the honest machines must not ban each other, nor a job without a liar's
rank lose anything; when they are gone, nothing of theirs may be left: see `tools.fuzz.oracles`.
"""

import contextlib
import math
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import psutil

from pmesh.agent.limits import OPEN_FILES, plan_files
from pmesh.agent.mesh.keyring import all_keys, latest_key
from pmesh.client.connect import Quorum
from pmesh.client.control import ask_events, ask_status, stop_agent
from pmesh.core.identity.keys import mesh_key_from_text, mesh_key_text
from pmesh.core.identity.rotations import Rotation
from pmesh.core.wire.link import Address
from pmesh.errors import PmeshError
from pmesh.home_paths import socket_path
from pmesh.ids import node_from_text
from tools.fuzz.agent import LONG_STEP, AgentOrder
from tools.fuzz.corpus import KeptCase, load, recorded
from tools.fuzz.honest import SHARED
from tools.fuzz.oracles import (
    MOST_HOME_BYTES,
    find_bans,
    find_lost_places,
    find_strange_files,
    find_unprintable,
    find_unprintable_in_json,
    is_called,
    is_rolled_back,
    nbytes_of,
    rotation_of,
)
from tools.fuzz.outsider import OutsiderOrder
from tools.lab.commands import LabError
from tools.lab.mesh import LabMesh, Node, status_of
from tools.lab.program import LabProgram

LIES_FOR_S = 20.0
PATIENCE_S = 30.0
LOOK_EVERY_S = 0.5
REST_S = 5.0
MORE_AT_REST = {"private MiB": 64, "arenas": 64, "other descriptors": 64}
"""Than before; arenas of Python's allocator stay."""
LIMITS = {
    "private MiB": 300,  # an agent with two trainers takes 60
    # Arenas: half of the machine's memory for all programs, and what the others trained in.
    "shared MiB": psutil.virtual_memory().total / (1 << 20) / 2 + 256,
    "arenas": plan_files(OPEN_FILES).arenas // 2,  # of all programs; the liar is one, with half
    "other descriptors": 512,
}
CONTAINED = "internal error"  # ended one link or session only, and is a defect all the same
DEFECTS = (CONTAINED, LONG_STEP)
NAMES = ("honest-1", "honest-2")
LiarKind: TypeAlias = Literal["member", "trainer", "outsider"]
LIAR = "liar"
QUORUMS = get_args(Quorum)
INVITE, ROTATE = ("pmesh.cli", "invite"), ("pmesh.cli", "key", "rotate")
ROTATES_EVERY = 3  # episodes
RUN_ON_LIAR = ("pmesh.cli", "run", "--on", LIAR, "--restarts", "0", "true")
LIAR_NUMBER = 1000  # plus its seed: each liar is another member


class FindingError(LabError):
    """What must not happen has happened."""


class FuzzedMesh(LabMesh):
    """Two honest agents with their trainers, and whoever lies to them.

    Args:
        runner: What runs a module: `python`, or coverage.
        patience_s: How long the agents have to meet, and trainers to go on. A busy machine needs
            more than the default.
    """

    def __init__(self, runner: tuple[str, ...] = (), *, patience_s: float = PATIENCE_S) -> None:
        super().__init__(3, names=(*NAMES, LIAR))
        self._runner = runner
        self._patience_s = patience_s
        self._agents: dict[str, LabProgram] = {}
        self._trainers: dict[str, LabProgram] = {}
        self._liars: dict[LiarKind, LabProgram] = {}
        self._ids: dict[str, str] = {}
        self._files: set[str] = set()
        self._key = mesh_key_from_text(self._environment["PMESH_KEY"])
        """That of the mesh now."""
        self._rotations: dict[str, Rotation | None] = {}
        self._seeds: set[int] = set()
        """Of the liars that this mesh has had: each may have been removed from it for good."""
        self.worst: dict[str, float] = {}

    def __exit__(self, *_: object) -> None:
        self.end_all()
        super().__exit__()

    def end_all(self) -> None:
        """End all processes; the agents as a user would, so that what they measure is written."""
        agents = self._agents.values()
        for process in [program for program in self.programs if program not in agents]:
            process.end()
        for name, agent in self._agents.items():
            with contextlib.suppress(PmeshError):
                stop_agent(self._home(name))
            agent.end(first=signal.SIGTERM, within_s=PATIENCE_S)
        self._liars, self._trainers, self._agents = {}, {}, {}

    # --- an episode

    def run(self, seed: int, *, lies_for_s: float = LIES_FOR_S, replay: Path | None = None) -> None:
        """Raises FindingError."""
        try:
            if seed in self._seeds:
                self._start_over()
            self._seeds.add(seed)
            self._start_agents()
            begin = self._start_lying_member(seed, replay)
            self._start_trainers(seed)
            before = {name: self._weigh(name) for name in NAMES}
            begin.touch()
            self._start_lying_trainer(seed, replay)
            self._start_outsider(seed)
            self._watch_for(lies_for_s)
            self._end_liars(seed)
            self._check_rest(before)
            self._check_afterwards()
            self._check_texts_and_files()
        except LabError as e:
            raise FindingError(f"{e}\n{self._last_words()}") from e
        finally:
            for process in (*self._liars.values(), *self._trainers.values()):
                process.end()
            self._liars, self._trainers = {}, {}
            self.forget_ended()

    def case(self, liar: Literal["member", "trainer"], seed: int, finding: str) -> KeptCase:
        messages = recorded(self.folder / f"{liar}-{seed}.lies")
        return KeptCase(liar=liar, seed=seed, finding=finding, messages=messages)

    def _start_over(self) -> None:
        """Let the next agents be a mesh that has never met anybody."""
        self.end_all()
        for name in NAMES:
            shutil.rmtree(self._home(name), ignore_errors=True)
        self._key = mesh_key_from_text(self._environment["PMESH_KEY"])
        self._rotations.clear()
        self._seeds.clear()

    def _start_agents(self) -> None:
        for number, name in enumerate(NAMES):
            if name not in self._agents:
                peer = ("--peer", self._address(NAMES[0])) if number else ()
                order = AgentOrder(number + 1)
                self._agents[name] = self._start_agent(name, order, *peer, runner=self._runner)
        self._await(self._agree, "the agents do not meet")
        self._ids = {name: str(self._status(name)["node"]["id"]) for name in NAMES}

    def _start_trainers(self, seed: int) -> None:
        """The liar's machine has a rank in every other episode: its lies are about results, too.

        In the others it has one in another job, and the first job must not notice.
        """
        names = (*NAMES, *[LIAR] * (seed % 2))
        quorum = QUORUMS[seed // 2 % 2]
        for name in names:
            self._trainers[name] = self._start(
                f"trainer of {name}", name, "tools.fuzz.honest", str(len(names)), quorum
            )
        for name in () if seed % 2 else (*NAMES, LIAR):
            ranks = str(len(NAMES) + 1)
            self._trainers[f"shared {name}"] = self._start(
                f"shared trainer of {name}", name, "tools.fuzz.honest", ranks, quorum, SHARED
            )
        self._await(
            lambda: all(self._ops(name) or self._failed(name) for name in NAMES),
            "the trainers do not begin",
        )

    def _start_lying_member(self, seed: int, replay: Path | None) -> Path:
        """Returns the file with which it begins to lie."""
        begin = self.folder / f"begin-{seed}"
        begin.unlink(missing_ok=True)
        lies = {f"{kind}-{seed}.lies" for kind in get_args(LiarKind)}
        self._files |= {begin.name, *lies}
        order = AgentOrder(
            LIAR_NUMBER + seed,
            seed,
            str(self.folder / f"member-{seed}.lies"),
            str(begin),
            str(replay) if replay and load(replay).liar == "member" else "",
        )
        shutil.rmtree(self._home(LIAR), ignore_errors=True)  # another seed is another member
        peers = [word for name in NAMES for word in ("--peer", self._address(name))]
        self._liars["member"] = self._start_agent(LIAR, order, *peers)
        return begin

    def _start_lying_trainer(self, seed: int, replay: Path | None) -> None:
        log = str(self.folder / f"trainer-{seed}.lies")
        case = [str(replay)] if replay and load(replay).liar == "trainer" else []
        arguments = (str(socket_path(self._home(NAMES[0]))), str(seed), log, *case)
        self._liars["trainer"] = self._start(
            f"lying trainer {seed}", NAMES[0], "tools.fuzz.trainer", *arguments
        )

    def _start_outsider(self, seed: int) -> None:
        """And a command that the liar is asked to run: it refuses, and sends output.

        Meanwhile a machine invites others, and changes the mesh key.
        """
        peers = tuple(Address("127.0.0.1", int(self._address(n).rpartition(":")[2])) for n in NAMES)
        log, home = str(self.folder / f"outsider-{seed}.lies"), str(self._home(NAMES[0]))
        order = OutsiderOrder(peers=peers, seed=seed, log=log, home=home)
        text = msgspec.json.encode(order).decode()
        self._liars["outsider"] = self._start("outsider", LIAR, "tools.fuzz.outsider", text)
        self._trainers["run"] = self._start("run", NAMES[0], *RUN_ON_LIAR)
        self._trainers["invite"] = self._start("invite", NAMES[1], *INVITE)
        if seed % ROTATES_EVERY == 0:
            self._trainers["rotate"] = self._start("rotate", NAMES[1], *ROTATE)

    def _end_liars(self, seed: int) -> None:
        for name in [name for name in self._trainers if name not in NAMES]:
            self._trainers.pop(name).end()
        self._liars["outsider"].end()
        self._liars["member"].end(
            first=signal.SIGTERM if seed % 2 else signal.SIGKILL, within_s=PATIENCE_S
        )
        self._liars["trainer"].end()
        self._liars = {}

    def _watch_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
            self._look()

    def _look(self) -> None:
        """Raises FindingError for what no liar may cause."""
        self._key = latest_key(self._home(NAMES[0]), self._key)
        for name, agent in self._agents.items():
            if not agent.alive:
                raise FindingError(f"{name}'s agent has died")
            for defect in (CONTAINED,) if self._runner else DEFECTS:
                if defect in agent.text:
                    raise FindingError(f"{name}: {defect}{agent.text.partition(defect)[2][:4000]}")
            if found := find_bans(agent.text, self._ids.values()):
                raise FindingError(f"{name} has banned the honest {found}")
            self._measure(name)
        if "outsider" in self._liars and not self._liars["outsider"].alive:
            raise FindingError("the outsider, which should go on, has died")
        for name in NAMES:
            output = self._trainers[name].text
            if "WRONG" in output or "Traceback" in output:
                raise FindingError(f"{name}'s trainer: {output[-500:]}")
            if f"shared {name}" in self._trainers and (self._failed(name) or self._alone(name)):
                raise FindingError(f"{name}'s job, in which no liar has a rank: {output[-500:]}")

    def _weigh(self, name: str) -> dict[str, float]:
        process = psutil.Process(self._agents[name].pid)
        memory = process.memory_info()
        held = _descriptors_of(process.pid)
        return {
            "private MiB": (memory.rss - memory.shared) / (1 << 20),
            "shared MiB": memory.shared / (1 << 20),
            "arenas": held["arena"],
            "other descriptors": held.total() - held["arena"],
        }

    def _measure(self, name: str) -> None:
        measured = self._weigh(name) | {"lag ms": self._status(name)["loop_lag_ms"]}
        for what, value in measured.items():
            self.worst[what] = max(self.worst.get(what, 0.0), value)
            if value > LIMITS.get(what, math.inf):  # a busy machine lags: see LONG_STEP
                held = _descriptors_of(self._agents[name].pid).most_common(9)
                raise FindingError(f"{name}: {what} {value:,.0f}; its descriptors: {held}")

    def _check_afterwards(self) -> None:
        self._await(self._agree, "the agents do not agree again")
        self._await(self._have_one_key, "the agents do not have one mesh key")
        before = {name: self._ops(name) for name in NAMES}
        self._await(
            lambda: all(self._failed(n) or self._ops(n) > before[n] for n in NAMES),
            "a trainer neither goes on nor has an error",
        )
        if any(not self._failed(n) and self._last_size(n) == 1 for n in NAMES) and not any(
            self._failed(name) for name in NAMES
        ):
            raise FindingError("a trainer goes on alone, and nobody has an error")

    def _check_rest(self, before: dict[str, dict[str, float]]) -> None:
        """What the liars have caused is gone with them."""
        deadline = time.monotonic() + REST_S
        while more := [
            f"{name} has {now[what] - old[what]:,.0f} {what} more"
            for name, old in before.items()
            for now in [self._weigh(name)]
            for what, most in MORE_AT_REST.items()
            if now[what] - old[what] > most
        ]:
            if time.monotonic() > deadline:
                raise FindingError(f"{REST_S:g} s after the liars: {', '.join(more)}")
            time.sleep(LOOK_EVERY_S)

    def _check_texts_and_files(self) -> None:
        """Nothing that a terminal would obey, and no file out of its place."""
        for name in NAMES:
            home = self._home(name)
            patience_s = self._patience_s
            pictures = {
                "status": ask_status(home, timeout_s=patience_s),
                "events": ask_events(home, timeout_s=patience_s),
            }
            found = {what: find_unprintable_in_json(data) for what, data in pictures.items()}
            found["log"] = find_unprintable(self._agents[name].text)
            found["trainer"] = find_unprintable(self._trainers[name].text)
            for what, text in found.items():
                if text:
                    raise FindingError(f"{name}'s {what} has a control character: {text}")
            members = self._status(name)["view"]["members"]
            if not all(is_called(self._ids[n], n, members) for n in NAMES):
                raise FindingError(f"{name} does not know the names any more: {members}")
            if lost := find_lost_places(home, map(node_from_text, self._ids.values())):
                raise FindingError(f"{name}'s list of members: {lost}")
            before, self._rotations[name] = self._rotations.get(name), rotation_of(home)
            if is_rolled_back(before, self._rotations[name]):
                raise FindingError(f"{name} has gone back from {before}: {self._rotations[name]}")
            if (nbytes := nbytes_of(home)) > MOST_HOME_BYTES:
                raise FindingError(f"{name}'s home has {nbytes >> 20} MiB")
        homes = (*NAMES, LIAR)
        if strange := find_strange_files(self.folder, {*homes, *self._files}):
            raise FindingError(f"somebody has written {strange}")

    # --- what is to be seen

    def _agree(self) -> bool:
        views = [self._status(name)["view"] for name in NAMES]
        names = [sorted(member["name"] for member in view["members"]) for view in views]
        return views[0]["epoch"] == views[1]["epoch"] and names[0] == sorted(NAMES)

    def _have_one_key(self) -> bool:
        keys = {tuple(all_keys(self._home(name))[:1]) for name in NAMES}
        return len(keys) == 1

    def _status(self, name: str) -> dict[str, Any]:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return status_of(self._home(name), timeout_s=self._patience_s)
            except PmeshError as e:  # a starved agent ends sessions that it has kept waiting
                if time.monotonic() > deadline or not self._agents[name].alive:
                    raise FindingError(f"{name}'s agent does not answer: {e}") from e
            time.sleep(LOOK_EVERY_S)

    def _ops(self, name: str) -> int:
        return len(re.findall(r"^op ", self._trainers[name].text, re.MULTILINE))

    def _failed(self, name: str) -> bool:
        return "ERROR" in self._trainers[name].text

    def _alone(self, name: str) -> bool:
        """Its last op had not the values of all."""
        return bool(self._ops(name)) and self._last_size(name) < len(NAMES)

    def _last_size(self, name: str) -> int:
        return int(re.findall(r"^op \d+ of (\d+)", self._trainers[name].text, re.MULTILINE)[-1])

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
        programs = (*self._agents.values(), *self._trainers.values(), *self._liars.values())
        said = [program.shown for program in programs]
        for name, agent in self._agents.items():
            if agent.alive:
                with contextlib.suppress(FindingError):
                    said.append(f"--- jobs at {name}: {self._status(name)['jobs']}")
        return "\n".join(said)

    # --- processes

    def _node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def _home(self, name: str) -> Path:
        return self._node(name).home

    def _address(self, name: str) -> str:
        return self._node(name).await_address(within_s=self._patience_s)

    def _start_agent(
        self, name: str, order: AgentOrder, *options: str, runner: tuple[str, ...] = ()
    ) -> LabProgram:
        text = msgspec.json.encode(order).decode()
        up = ("up", "--name", name, "--no-mdns", "--listen", "127.0.0.1:0", *options)
        agent = self._start(name, name, "tools.fuzz.agent", text, *up, runner=runner)
        self._address(name)
        return agent

    def _start(
        self, label: str, home: str, module: str, *arguments: str, runner: tuple[str, ...] = ()
    ) -> LabProgram:
        words = (*runner, "-m", module, *arguments)
        key = {"PMESH_KEY": mesh_key_text(self._key)}
        return self.start_program(self._node(home), *words, name=label, variables=key)


def _descriptors_of(pid: int) -> Counter[str]:
    """How many descriptors a process has of each kind: "arena", "socket", "pipe" and so on."""
    kinds = Counter[str]()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            target = str(descriptor.readlink())
            kinds["arena" if "memfd:pmesh" in target else target.partition(":")[0]] += 1
    return kinds
