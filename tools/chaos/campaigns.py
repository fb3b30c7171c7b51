"""What is no episode: churn, cold starts, a newcomer with 500 MB, partitions, one training run."""

import os
import signal
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import psutil

from tools.chaos.episodes import ANY_PARTS
from tools.lab.campaign import CLEAN_OPS, CampaignRun, Tally
from tools.lab.cluster import LabCluster, ops_of, settled_ops
from tools.lab.commands import LabError
from tools.lab.mesh import LabTrainer, Node
from tools.lab.oplog import Life, SeenOp, TrainerReport, longest_gap_s
from tools.lab.program import LabProgram, runs

MOST = 8
FEWEST = 2
CHANGE_S = (0.5, 2.0)
MINUTES = 20
LONGEST_GAP_S = 5.0
_CHECK_S = 10.0


def run_churn(run: CampaignRun) -> Tally:
    """So many minutes (`--episodes`) of random starts and SIGKILLs."""
    with LabCluster(MOST, run.options(FEWEST), logs=run.logs) as cluster:
        churn = _Churn(cluster, run.random())
        churn.begin()
        until = time.monotonic() + 60.0 * run.episodes
        while time.monotonic() < until and not churn.tally.violations:
            churn.change()
        return churn.end()


class _Churn:
    def __init__(self, cluster: LabCluster, random: Random) -> None:
        self.tally = Tally()
        self._cluster = cluster
        self._random = random
        self._orphans: set[int] = set()  # pids of trainers whose agents were killed
        self._starting: dict[str, threading.Thread] = {}
        self._failures: list[str] = []
        self._completed: list[float] = []
        self._checked_until = 0.0
        self._changes: dict[str, int] = defaultdict(int)

    def begin(self) -> None:
        """Three of them, in the middle of ops."""
        first = self._cluster.nodes[: FEWEST + 1]
        self._cluster.start(first[:FEWEST])
        self._cluster.await_ops(1, first[:FEWEST])  # before it has synced, nobody may enter a job
        self._cluster.start(first)
        self._cluster.await_ops(3, first)
        self._checked_until = time.monotonic()

    def change(self) -> None:
        """Wait for a random time, then start or kill one."""
        time.sleep(self._random.uniform(*CHANGE_S))
        productive = [node for node in self._cluster.nodes if self._works(node)]
        free = [node for node in self._cluster.nodes if self._is_free(node)]
        may_kill = len(productive) > FEWEST
        if free and (not may_kill or self._random.random() < 0.5):  # noqa: PLR2004 - a coin
            self._spawn(self._random.choice(free))
        elif may_kill:
            parts = self._random.choice(ANY_PARTS)
            victim = self._random.choice(productive)
            if victim.trainer is not None and "agent" in parts:
                self._orphans.add(victim.trainer.pid)
            victim.kill(*parts)
            self._changes[f"kills of {' and '.join(parts)}"] += 1
        if time.monotonic() > self._checked_until + _CHECK_S:
            self._check(margin_s=2.0)

    def end(self) -> Tally:
        self._check(margin_s=0.5)
        done = sorted(self._completed)
        longest: dict[int, float] = defaultdict(float)  # that ends in each second
        for earlier, later in pairwise(done):
            longest[int(later)] = max(longest[int(later)], later - earlier)
        self.tally.recovery_s = list(longest.values())
        self.tally.facts |= {name: float(count) for name, count in self._changes.items()}
        self.tally.facts["longest time without a completed op, s"] = max(
            longest.values(), default=0.0
        )
        return self.tally

    def _works(self, node: Node) -> bool:
        """Whether it has done an op with others, by its present agent."""
        if node.name in self._starting or not runs(node.trainer) or not runs(node.agent):
            return False
        last = node.life.last
        since = node.agent.started if node.agent is not None else 0.0
        return last is not None and last.done > since and len(last.names) > 1

    def _is_free(self, node: Node) -> bool:
        return node.name not in self._starting and not (runs(node.trainer) and runs(node.agent))

    def _spawn(self, node: Node) -> None:
        def start() -> None:
            try:
                self._cluster.start([node])
            except LabError as e:
                self._failures.append(str(e))
            finally:
                del self._starting[node.name]

        self._changes["starts"] += 1
        self._starting[node.name] = threading.Thread(target=start)
        self._starting[node.name].start()

    def _check(self, *, margin_s: float) -> None:
        """Ops up to a moment ago: later ones may still be reported by others."""
        until = time.monotonic() - margin_s
        trainers = list(self._cluster.trainers)
        ops, errors = settled_ops(trainers, self._checked_until, until)
        orphans = {trainer.name for trainer in trainers if trainer.pid in self._orphans}
        self.tally.check(ops)
        self.tally.violations += [
            f"{name}: {error.says}"
            for name, raised in errors.items()
            if name not in orphans
            for error in raised
        ]
        self._completed += [op.done for done in ops.values() for op in done]
        self.tally.violations += self._failures
        self._failures.clear()
        self._cluster.forget_ops(before=until)
        self._checked_until = until


AGENTS = 8
STARTS_APART_S = 1.0
"""Between two starts, at most."""
WATCHED_S = 3.0


def run_cold_starts(run: CampaignRun) -> Tally:
    """`pmesh up` on eight hosts, from nothing; the time is counted from the last start on."""
    random = run.random()
    tally = Tally()
    with LabCluster(AGENTS, run.options(), logs=run.logs) as cluster:
        everybody = {node.name for node in cluster.nodes}
        for _ in range(run.episodes):
            for node in random.sample(cluster.nodes, AGENTS):
                cluster.start_cold_agent(node)
                at = time.monotonic()
                time.sleep(random.uniform(0.0, STARTS_APART_S))
            cluster.wait_for(
                lambda: all(_ring(node) == everybody for node in cluster.nodes), "a ring of all"
            )
            agreed = time.monotonic()
            tally.recovery_s.append(agreed - at)
            time.sleep(WATCHED_S)
            views = {str(node.status().get("view", {}).get("epoch")) for node in cluster.nodes}
            if len(views) != 1:
                tally.violations.append(f"{len(views)} views {WATCHED_S:g} s later: {views}")
            tally.violations += [
                f"{node.name}, when all had met: {line}"
                for node in cluster.nodes
                for agent in node.programs(["agent"])
                for line in agent.printed(since=agreed)
                if " is gone" in line or line.startswith("alone")
            ]
            cluster.end(cluster.nodes)
    return tally


def _ring(node: Node) -> set[str]:
    """Whom the agent's last line about the ring names."""
    _, line = node.agent.last_line("ring: ") if node.agent is not None else (0.0, "")
    ring = line.removeprefix("ring: ").partition(";")[0].replace(" (this machine)", "")
    return set(ring.split(" → "))


STATE_BYTES = 500_000_000
LINE_BITS_PER_S = 1_000_000_000
STEP_S = 0.2  # what a step computes
PRODUCTIVE = "until it computes its first step / raw"

_RECEIVE = """
import socket, time
with socket.create_server(("", 9)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    began, left = time.monotonic(), {nbytes}
    buffer = bytearray(1 << 20)
    while left:
        left -= connection.recv_into(buffer)
    connection.sendall(b"!")
    print(time.monotonic() - began, flush=True)
"""
_SEND = """
import socket
with socket.create_connection(("{address}", 9)) as connection:
    data = memoryview(bytes(1 << 20))
    left = {nbytes}
    while left:
        left -= connection.send(data[:left])
    connection.recv(1)
"""


def run_joins(run: CampaignRun) -> Tally:
    """Each time the raw transfer of the same bytes over the same lines, then the newcomer."""
    tally = Tally()
    raw: list[float] = []
    ready: list[float] = []
    still: list[float] = []
    options = run.options(state_bytes=STATE_BYTES, pause_s=STEP_S)
    with LabCluster(5, options, logs=run.logs) as cluster:
        for host in cluster.lab.hosts:
            cluster.lab.shape(host, bits_per_s=LINE_BITS_PER_S)
        *old, newcomer = cluster.nodes
        raw += [raw_transfer_s(cluster) for _ in range(run.episodes)]  # the lines are idle now
        cluster.start(old)
        for _ in range(run.episodes):
            began = tally.await_clean(cluster, old)
            lives = [node.life for node in old]
            cluster.start([newcomer])
            cluster.wait_for(lambda: newcomer.life.last is not None, "the newcomer's first op")
            last = newcomer.life.last
            said = {r.what: r.at for r in reversed(newcomer.life.others)}  # each first
            if last is None or not {"connecting", "entered"} <= said.keys():
                raise LabError("the newcomer has not said when it connected and entered")
            tally.recovery_s.append(last.done - said["connecting"])
            ready.append(said["entered"] - said["connecting"])
            done = [op.done for life in lives for op in list(life.ops.values())]
            still.append(longest_gap_s(done, since=said["connecting"], until=last.done))
            cluster.await_ops(1)
            tally.check(ops_of(cluster.nodes), survivors=[node.name for node in old])
            tally.note_errors(old, 0.0)
            cluster.end([newcomer])
            cluster.forget_ops(before=began)
    tally.facts = {
        "raw transfer of the same bytes, s": statistics.median(raw),
        PRODUCTIVE: statistics.median(ready) / statistics.median(raw),
        "until its first op has ended / raw": statistics.median(tally.recovery_s)
        / statistics.median(raw),
        "the others stood still for, s": statistics.median(still),
    }
    return tally


def raw_transfer_s(cluster: LabCluster) -> float:
    """How long the bytes take from the first host to the last by one plain TCP connection."""
    first, last = cluster.lab.hosts[0], cluster.lab.hosts[-1]
    receive = [sys.executable, "-c", _RECEIVE.format(nbytes=STATE_BYTES)]
    with LabProgram.start("receiver", receive, environment=os.environ, host=last) as receiver:
        receiver.hear()  # it listens
        first.run([sys.executable, "-c", _SEND.format(address=last.ipv4, nbytes=STATE_BYTES)])
        return float(receiver.hear())


APART_S = 10.0
VARIANTS = [(quorum, then) for quorum in ("any", "majority") for then in ("raise", "sync")]


def run_partitions(run: CampaignRun) -> Tally:
    """Each combination of `quorum` and `on_superseded`, as many times as there are episodes."""
    random = run.random()
    tally = Tally()
    together: list[float] = []
    for quorum, then in VARIANTS:
        options = run.options(quorum=quorum, on_superseded=then)
        with LabCluster(4, options, logs=run.logs) as cluster:
            cluster.start()
            for _ in range(run.episodes):
                nodes = random.sample(cluster.nodes, 4)
                together.append(_part_and_heal(cluster, tally, nodes[:2], nodes[2:]))
    tally.facts["slowest to train together again after the cut was mended, s"] = max(together)
    return tally


def _part_and_heal(
    cluster: LabCluster, tally: Tally, one: Sequence[Node], other: Sequence[Node]
) -> float:
    options = cluster.options
    tally.await_clean(cluster)
    at = time.monotonic()
    for node in one:
        cluster.lab.cut(node.host, *(far.host for far in other))
    time.sleep(APART_S)
    mended = time.monotonic()
    sides = {
        side: ops_of(nodes, lambda op: at <= op.done <= mended)
        for side, nodes in enumerate((one, other))
    }
    for node in one:
        cluster.lab.mend(node.host, *(far.host for far in other))
    heal_s = cluster.await_ops(1, timeout_s=30.0) and time.monotonic() - mended
    cluster.await_ops(CLEAN_OPS)
    went_on = _judge_sides(tally, sides, (one, other), at)
    what = f"quorum {options.quorum!r}, on_superseded {options.on_superseded!r}"
    if options.quorum == "any" and len(went_on) != 2:  # noqa: PLR2004 - both sides
        tally.violations.append(f"{what}: only {len(went_on)} of both sides went on")
    if options.quorum == "majority" and len(went_on) != 1:  # two and two: that of the most senior
        tally.violations.append(f"{what}: {len(went_on)} sides went on")
    errors = [(node.name, e) for node in cluster.nodes for e in node.life.errors(at)]
    told = {name for name, e in errors if e.what == "superseded"}
    if options.on_superseded == "sync" and told:
        tally.violations.append(f"{what}: {', '.join(sorted(told))} got HistorySuperseded")
    if options.on_superseded == "raise" and told not in (
        {n.name for n in one},
        {n.name for n in other},
    ):
        tally.violations.append(f"{what}: HistorySuperseded at {sorted(told)}, not at one side")
    tally.violations += [f"{what}: {name}: {e.says}" for name, e in errors if e.what == "error"]
    check_after(cluster, tally, since=mended)
    cluster.forget_ops(before=time.monotonic())
    return heal_s


def _judge_sides(
    tally: Tally,
    sides: dict[int, dict[str, list[SeenOp]]],
    nodes: tuple[Sequence[Node], Sequence[Node]],
    at: float,
) -> list[int]:
    """Which sides went on by themselves; their ops are checked, and when the first one was done."""
    went_on: list[int] = []
    for side, ops in sides.items():
        names = {node.name for node in nodes[side]}
        alone = {n: [op for op in done if set(op.names) == names] for n, done in ops.items()}
        tally.check(ops, survivors=ops if all(ops.values()) else ())
        if all(alone.values()):
            went_on.append(side)
            tally.recovery_s.append(max(done[0].done for done in alone.values()) - at)
    return went_on


def check_after(cluster: LabCluster, tally: Tally, *, since: float) -> None:
    """Compare the ops that all have done together since then."""
    everybody = {node.name for node in cluster.nodes}
    ops = ops_of(cluster.nodes, lambda op: op.called >= since and set(op.names) == everybody)
    tally.check(ops, survivors=ops)


PAUSE_S = 0.02  # of each step, as if it computed for so long
EPOCHS_PER_KILL = 10  # of 19 steps each: longer than a kill, a restart and a return take
# On SIGUSR2 an agent counts its tasks, from the root: those that have ended, and that the collector
# of garbage has not yet looked at, are none.
COUNT_TASKS = """
import signal, trio

def count(*_):
    tasks = [trio.lowlevel.current_root_task()]
    for task in tasks:
        tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    print("chaos: tasks", len(tasks), flush=True)

signal.signal(signal.SIGUSR2, count)
"""


@dataclass(frozen=True, slots=True)
class HeldResources:
    descriptors: int
    threads: int
    shared_regions: int
    resident_bytes: int
    tasks: int


# What may be more after twenty restarts: the slack of a measurement, a twentieth of a real leak. Of
# four ranks one has two lanes for the ring, and up to four more while ops go across it.
SLACK = HeldResources(
    descriptors=2 + 4, threads=2, shared_regions=2, resident_bytes=16 << 20, tasks=2
)


def run_restarts(run: CampaignRun) -> Tally:
    """`--episodes` kills of one node, during one run of digits."""
    epochs = EPOCHS_PER_KILL * run.episodes
    tally = Tally()
    calm = _train(run, tally, epochs, kills=0)
    ends = _train(run, tally, epochs, kills=run.episodes)
    for what, reports in (("undisturbed", calm), ("disturbed", ends)):
        if len({report.digest for report in reports}) != 1:
            tally.violations.append(f"the weights of the {what} run differ")
    change = abs(ends[0].value / calm[0].value - 1) * 100
    tally.facts |= {
        "loss of the undisturbed run": calm[0].value,
        "loss of the disturbed run": ends[0].value,
        "difference of the losses, %": change,
    }
    return tally


def _train(run: CampaignRun, tally: Tally, epochs: int, *, kills: int) -> list[TrainerReport]:
    options = run.options(epochs=epochs, pause_s=PAUSE_S if kills else 0.0)
    with LabCluster(4, options, patch=COUNT_TASKS, logs=run.logs) as cluster:
        cluster.start()
        lives = [node.life for node in cluster.nodes]
        if kills:
            _kill_again_and_again(cluster, tally, kills, run)
            lives = [node.life for node in cluster.nodes]
        cluster.wait_for(
            lambda: all(map(_end_of, lives)), "the end of the training", timeout_s=300.0
        )
        return [end for life in lives for end in _end_of(life)]


def _end_of(life: Life) -> list[TrainerReport]:
    return [report for report in life.others if report.what == "ended"]


def _kill_again_and_again(cluster: LabCluster, tally: Tally, kills: int, run: CampaignRun) -> None:
    random = run.random()
    victim = random.choice(cluster.nodes)
    survivors = [node for node in cluster.nodes if node is not victim]
    cluster.await_ops(50)  # so that caches are full and threads are started
    before = {part.name: _held(cluster, part) for node in survivors for part in node.programs()}
    for _ in range(kills):
        cluster.await_ops(3)
        time.sleep(random.uniform(0.0, 0.1))
        at = time.monotonic()
        victim.kill("agent", "trainer")
        lives = [node.life for node in survivors]
        tally.recovery_s.append(cluster.await_recovery(lives, at, "the next op"))
        cluster.restart([victim])
    cluster.await_ops(20)
    for part in (part for node in survivors for part in node.programs()):
        _compare(tally, part.name, before[part.name], _held(cluster, part))
    tally.check(ops_of(cluster.nodes), survivors=[node.name for node in survivors])


def _held(cluster: LabCluster, part: LabProgram) -> HeldResources:
    tasks = 0
    if not isinstance(part, LabTrainer):
        asked = time.monotonic()
        part.send_signal(signal.SIGUSR2)

        def answers() -> list[str]:
            return [line for line in part.printed(since=asked) if line.startswith("chaos: tasks")]

        cluster.wait_for(lambda: bool(answers()), f"the tasks of {part.name}")
        tasks = int(answers()[0].rpartition(" ")[2])
    process = psutil.Process(part.pid)
    with process.oneshot():
        maps = process.memory_maps(grouped=False)
        return HeldResources(
            descriptors=process.num_fds(),
            threads=process.num_threads(),
            shared_regions=sum("memfd" in region.path for region in maps),
            resident_bytes=process.memory_info().rss,
            tasks=tasks,
        )


def _compare(tally: Tally, name: str, before: HeldResources, after: HeldResources) -> None:
    """Notes the growth, and a violation where it is more than the slack."""
    kind = name.partition(" ")[0]
    for what in HeldResources.__slots__:
        growth = getattr(after, what) - getattr(before, what)
        key = f"most {what.replace('_', ' ')} gained by a surviving {kind}"
        tally.facts[key] = max(tally.facts.get(key, 0.0), float(growth))
        if growth > getattr(SLACK, what):
            tally.violations.append(f"{name} has {growth} more {what} after the restarts")
