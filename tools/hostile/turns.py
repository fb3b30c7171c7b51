"""Attacks of so many seconds, each beside its control in the same start, in turn; medians count."""

import contextlib
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import psutil
from msgspec.structs import replace

from pmesh.core.wire.link import Address
from pmesh.home_paths import socket_path
from tools.fuzz.honest import SHARED
from tools.fuzz.oracles import find_bans
from tools.hostile.attackers import AttackOrder, anything
from tools.hostile.packets import BLACK_HOLE_SUBNET, BLACK_HOLES
from tools.lab.cluster import LabCluster
from tools.lab.commands import LabError
from tools.lab.mesh import Node, new_key
from tools.lab.net import LabHost
from tools.lab.oplog import TrainerOptions, longest_gap_s
from tools.lab.program import LabProgram, runs

SOFT_LIMIT = (
    "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (256, r.getrlimit(r.RLIMIT_NOFILE)[1]))"
)
ANYTHING = anything.__name__
TELL_BANS = "from tools.fuzz.agent import tell_bans; tell_bans()"
OP_BYTES = 16 * 1024
SAMPLE_S = 0.25
READY_S = 60.0
REST_S = 30.0  # how long is waited for the figures of before; what takes longer is told as this
AT_REST = 0.95  # of the ops/s of before
SETTLED_S = 6.0
SETTLED = 0.8  # of the ops/s of before: other programs of this machine come and go
SPARE_DESCRIPTORS = 2  # a question about the status is one
# All that is sent there vanishes: it is asked for by hardware address, and dropped at once.
_BLACK_HOLE = f"""
ip link add sink type veth peer name drain
ip link set sink arp off up
ip link set drain arp off up
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/ipv4/conf/eth0/proxy_arp
echo 0 > /proc/sys/net/ipv4/neigh/eth0/proxy_delay
ip route add {BLACK_HOLE_SUBNET} dev sink
"""
_MANY_ADDRESSES = "\n".join(f"ip addr add {host}/24 dev eth0" for host in BLACK_HOLES)


class AttackTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured while an attack, or its control, went on."""

    ops_per_s: float
    slowest_s: float
    """The longest time between the ends of two ops."""
    more_descriptors: float
    more_mib: float
    """Of an agent and its children, their share of shared pages counted in part (PSS)."""
    join_s: float
    """Until a third machine was in the view of all."""
    rest_s: float
    """From the end until ops/s and descriptors were as before."""
    faults: tuple[str, ...] = ()
    """Agents that died, errors that trainers raised."""

    @classmethod
    def median_of(cls, turns: Sequence[Self]) -> Self:
        """Of each figure; all faults."""
        figures = {
            name: statistics.median(getattr(turn, name) for turn in turns)
            for name in cls.__struct_fields__
            if name != "faults"
        }
        return cls(**figures, faults=tuple(fault for turn in turns for fault in turn.faults))


class Weight(NamedTuple):
    descriptors: int
    nbytes: int

    def above(self, base: "Weight") -> "Weight":
        return Weight(self.descriptors - base.descriptors, self.nbytes - base.nbytes)

    @staticmethod
    def most_of(weights: Sequence["Weight"]) -> "Weight":
        return Weight(max(w.descriptors for w in weights), max(w.nbytes for w in weights))


class Pairs(NamedTuple):
    controls: list[AttackTurn]
    attacks: list[AttackTurn]

    @property
    def ratio(self) -> float:
        """The median of each attack's ops/s by its own control's: other programs come and go."""
        pairs = zip(self.attacks, self.controls, strict=True)
        return statistics.median(a.ops_per_s / max(c.ops_per_s, 1e-9) for a, c in pairs)

    @property
    def faults(self) -> list[str]:
        return [fault for turn in (*self.controls, *self.attacks) for fault in turn.faults]

    @property
    def facts(self) -> dict[str, float]:
        """Medians; the descriptors and the memory are of the agent that took most more of them."""
        control, attack = AttackTurn.median_of(self.controls), AttackTurn.median_of(self.attacks)
        return {
            "ops/s of the control": control.ops_per_s,
            "ops/s": attack.ops_per_s,
            "ratio": self.ratio,
            "slowest op later by, s": attack.slowest_s - control.slowest_s,
            "more descriptors": attack.more_descriptors,
            "more memory, MiB": attack.more_mib,
            "join, s": attack.join_s,
            "at rest again after, s": attack.rest_s,
        }


def run_turns(
    order: AttackOrder, turns: int, logs: Path | None = None, *, controls: bool = True
) -> Pairs:
    """So many turns, each a control and an attack; or attacks alone, whose figures say little."""
    shared = {"PMESH_KEY": new_key(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options = TrainerOptions(number=0, wait_for=2, op_bytes=OP_BYTES)
    measured: dict[bool, list[AttackTurn]] = {True: [], False: []}
    patch = f"{SOFT_LIMIT}; {TELL_BANS}" if order.kind == ANYTHING else SOFT_LIMIT
    with LabCluster(4, options, patch=patch, environment=lambda _: shared, logs=logs) as cluster:
        _prepare(cluster.nodes[3].host, order.kind)
        for number in range(2 * turns):
            if not (controls or number % 2):
                continue
            _revive(cluster)
            now = replace(order, control=number % 2 == 0, seed=order.seed + number)
            now = replace(now, peers=_doors(cluster), path=str(socket_path(cluster.nodes[0].home)))
            with (
                _sharing(cluster, order.kind) as sharing,
                _start(cluster, now, os.environ | shared) as attacker,
            ):
                turn = _Turn(cluster, now, attacker, sharing.close).run()
            measured[now.control].append(turn)
            who = "control" if now.control else "attack "
            print(f"  {who} {msgspec.json.encode(turn).decode()}", flush=True)
    return Pairs(measured[True], measured[False])


def _prepare(host: LabHost, kind: str) -> None:
    host.run(["sh", "-ec", _MANY_ADDRESSES if kind == "knock" else _BLACK_HOLE])


@contextlib.contextmanager
def _sharing(cluster: LabCluster, kind: str) -> Iterator[contextlib.ExitStack]:
    """For who sends anything: both machines have a rank in another job, with one of the attacker's.

    When that job has failed, they begin it again.
    """
    with contextlib.ExitStack() as stack:
        for node in cluster.nodes[:2] if kind == ANYTHING else ():
            command = (
                f"while :; do {sys.executable} -m tools.fuzz.honest 3 any {SHARED}; sleep 1; done "
                ">/dev/null 2>&1"
            )
            shell = ["sh", "-c", command]
            stack.enter_context(
                LabProgram.start(
                    f"ranks of {node.name}", shell, environment=node.environment, host=node.host
                )
            )
        yield stack


def _revive(cluster: LabCluster) -> None:
    """Two machines that train; what the turn before has broken is started again."""
    pair = cluster.nodes[:2]
    if not all(runs(node.agent) and runs(node.trainer) for node in pair):
        cluster.restart(pair)
    cluster.await_ops(20, pair)


@contextlib.contextmanager
def _start(
    cluster: LabCluster, order: AttackOrder, environment: dict[str, str]
) -> Iterator[LabProgram]:
    """The attacker: a host of its own, or for what is done at a Unix socket, the first machine."""
    command = [sys.executable, "-m", "tools.hostile.attackers"]
    with LabProgram.start(
        "the attacker",
        [*command, msgspec.json.encode(order).decode()],
        environment=environment,
        host=cluster.nodes[0 if order.kind == "local" else 3].host,
        told=True,
    ) as attacker:
        yield attacker
        if attacker.join(within_s=READY_S):
            raise LabError(attacker.shown)


def _doors(cluster: LabCluster) -> tuple[Address, ...]:
    doors: list[Address] = []
    for node in cluster.nodes[:2]:
        addresses: list[str] = node.status()["node"]["addresses"]
        own = next(a for a in addresses if a.startswith(f"{node.host.ipv4}:"))
        doors.append(Address(node.host.ipv4, int(own.rpartition(":")[2])))
    return tuple(doors)


class _Turn:
    def __init__(
        self,
        cluster: LabCluster,
        order: AttackOrder,
        attacker: LabProgram,
        at_end: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._at_end = at_end
        self._pair = cluster.nodes[:2]
        self._third = cluster.nodes[2]
        self._seconds = order.seconds
        self._attacker = attacker
        self._base: list[Weight] = []
        self._most = Weight(0, 0)
        self._few_again = math.inf
        """When the descriptors were as few as before."""
        self._join_s = math.inf

    def run(self) -> AttackTurn:
        """The control or the attack; a third machine joins when a fifth of it is over."""
        facts: dict[str, Any] = json.loads(self._attacker.hear())
        before = time.monotonic()
        time.sleep(max(2.0, self._seconds / 6))
        clean = self._ops_per_s(before, time.monotonic())
        self._base = [weigh(node) for node in self._pair]
        rosters = self._rosters()
        began = time.monotonic()
        self._attacker.tell("go")
        self._watch(began + self._seconds / 5)
        self._cluster.start_agent(self._third)
        self._watch(began + self._seconds)
        most, ended = self._most, time.monotonic()
        self._at_end()
        self._watch(ended + REST_S, lambda: self._has_settled(ended, clean))
        rest_s = self._rest_s(ended, clean)
        self._watch(ended + REST_S, lambda: self._join_s < math.inf)
        turn = AttackTurn(
            ops_per_s=self._ops_per_s(began, ended),
            slowest_s=longest_gap_s(self._done(), since=began, until=ended),
            more_descriptors=most.descriptors,
            more_mib=most.nbytes / 2**20,
            join_s=min(self._join_s, self._seconds + REST_S),
            rest_s=rest_s,
            faults=(*self._faults(began, facts), *self._apart(began, rosters)),
        )
        self._cluster.end([self._third])
        self._cluster.forget_ops(before=ended)
        return turn

    def _watch(self, until: float, holds: Callable[[], bool] = lambda: False) -> None:
        """Weigh the agents again and again, until then or until this holds."""
        while time.monotonic() < until and not holds():
            more = [w.above(b) for w, b in zip(map(weigh, self._pair), self._base, strict=True)]
            self._most = Weight.most_of([self._most, *more])
            self._look_for_third()
            time.sleep(SAMPLE_S)

    def _look_for_third(self) -> None:
        agents = [node.agent for node in self._cluster.nodes[:3] if node.agent is not None]
        third = self._third.agent
        if third is None or self._join_s < math.inf:
            return
        rings = [agent.last_line("ring: ", since=third.started) for agent in agents]
        if all(all(node.name in line for node in self._cluster.nodes[:3]) for _, line in rings):
            self._join_s = max(at for at, _ in rings) - third.started
            third.send_signal(signal.SIGTERM)  # the two are at rest when they are alone again

    def _has_settled(self, ended: float, clean: float) -> bool:
        now = time.monotonic()
        weights = zip(map(weigh, self._pair), self._base, strict=True)
        if all(w.descriptors <= b.descriptors + SPARE_DESCRIPTORS for w, b in weights):
            self._few_again = min(self._few_again, now)
        settled = self._ops_per_s(now - SETTLED_S / 2, now) >= SETTLED * clean
        return now >= max(ended + SETTLED_S, self._few_again) and settled

    def _rest_s(self, ended: float, clean: float) -> float:
        """Until the first second with the ops/s of before, or of afterwards if those are fewer."""
        now = time.monotonic()
        rest = AT_REST * min(clean, self._ops_per_s(now - SETTLED_S / 2, now))
        at = max(ended, self._few_again)
        while at < now - 1.0 and self._ops_per_s(at, at + 1.0) < rest:
            at += SAMPLE_S
        return min(at, now) - ended if now < ended + REST_S else REST_S

    def _done(self) -> list[float]:
        """When the slower of the two trainers has done its ops."""
        return [op.done for op in list(self._pair[0].life.ops.values())]

    def _ops_per_s(self, since: float, until: float) -> float:
        return sum(since < at <= until for at in self._done()) / (until - since)

    def _faults(self, since: float, facts: dict[str, Any]) -> Iterator[str]:
        expected = [*self._pair] if self._join_s < math.inf else [*self._pair, self._third]
        for node in expected:
            if node.agent is not None and node.agent.ended:
                yield f"{node.name}'s agent has died: {last_words(node.agent)}"
        for node in self._pair:
            yield from (f"{node.name}: {error.says}" for error in node.life.errors(since))
            yield from (
                f"{node.name}: a wrong sum" for op in list(node.life.ops.values()) if not op.right
            )
        if facts.get("refused", True) is not True:
            yield "another user was let in"

    def _rosters(self) -> list[tuple[str, int | None]]:
        """Of the job that trains, as each of the two knows it."""
        jobs = [(node, job) for node in self._pair for job in node.status().get("jobs", [])]
        job = self._cluster.options.job
        return [(node.name, found["roster"]) for node, found in jobs if found["name"] == job]

    def _apart(self, since: float, rosters: list[tuple[str, int | None]]) -> Iterator[str]:
        """What may not come between the two: a ban, an op of one alone, a view of their job."""
        if (now := self._rosters()) != rosters:
            yield f"the job's roster was {rosters}, and is {now}"
        ids = {node.name: node.status().get("node", {}).get("id", "") for node in self._pair}
        both = {node.name for node in self._pair}
        for node in self._pair:
            printed = [] if node.agent is None else node.agent.printed(since=since)
            for banned in find_bans("\n".join(printed), ids.values()):
                yield f"{node.name} has banned {banned}"
            alone = [op for op in list(node.life.ops.values()) if set(op.names) != both]
            if alone:
                yield f"{node.name} has done {len(alone)} ops without the other"


def last_words(process: LabProgram) -> str:
    """The last line that it printed, but for the frames of a traceback."""
    words = [line.strip(" |+-") for line in process.printed()]
    return next((line for line in reversed(words) if line), "")


def weigh(node: Node) -> Weight:
    """The node's agent and its children, now; nothing if it has died."""
    if node.agent is None:
        return Weight(0, 0)
    try:
        agent = psutil.Process(node.agent.pid)
        family = [agent, *agent.children(recursive=True)]
        nbytes = sum(process.memory_full_info().pss for process in family)
        return Weight(agent.num_fds(), nbytes)
    except psutil.Error:
        return Weight(0, 0)
