"""One training run in which a node is killed and restarted twenty times, and an undisturbed one."""

import signal
import time
from dataclasses import dataclass

import psutil

from tools.chaos.cluster import Cluster, Node, Process
from tools.chaos.episodes import Run, Tally
from tools.chaos.oplog import Life, Report, find_violations

MODULE = "tools.chaos.digits"
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
class Held:
    """What a process holds of the system."""

    descriptors: int
    threads: int
    shared_regions: int
    resident_bytes: int
    tasks: int


# What may be more after twenty restarts: the slack of a measurement, a twentieth of a real leak. Of
# four ranks one has two lanes for the ring, and up to four more while ops go across it.
SLACK = Held(descriptors=2 + 4, threads=2, shared_regions=2, resident_bytes=16 << 20, tasks=2)


def run_restarts(run: Run) -> Tally:
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


def _train(run: Run, tally: Tally, epochs: int, *, kills: int) -> list[Report]:
    options = run.options(epochs=epochs, pause_s=PAUSE_S if kills else 0.0)
    with Cluster(4, options, patch=COUNT_TASKS, logs=run.logs) as cluster:
        for node in cluster.nodes:
            cluster.start_agent(node)
        for node in cluster.nodes:
            cluster.await_agent(node)
            cluster.start_trainer(node, MODULE)
        lives = [node.life for node in cluster.nodes]
        if kills:
            _kill_again_and_again(cluster, tally, kills, run)
            lives = [node.life for node in cluster.nodes]
        cluster.wait_for(
            lambda: all(map(_end_of, lives)), "the end of the training", timeout_s=300.0
        )
        return [end for life in lives for end in _end_of(life)]


def _end_of(life: Life) -> list[Report]:
    return [report for report in life.others if report.what == "ended"]


def _kill_again_and_again(cluster: Cluster, tally: Tally, kills: int, run: Run) -> None:
    random = run.random()
    victim = random.choice(cluster.nodes)
    survivors = [node for node in cluster.nodes if node is not victim]
    cluster.await_ops(50)  # so that caches are full and threads are started
    before = {part.name: _held(cluster, part) for part in _parts(survivors)}
    for _ in range(kills):
        cluster.await_ops(3)
        time.sleep(random.uniform(0.0, 0.1))
        at = time.monotonic()
        victim.kill("agent", "trainer")
        lives = [node.life for node in survivors]
        tally.recovery_s.append(cluster.await_recovery(lives, at, "the next op"))
        cluster.await_ends(victim)
        cluster.start_agent(victim)
        cluster.await_agent(victim)
        cluster.start_trainer(victim, MODULE)
    cluster.await_ops(20)
    for part in _parts(survivors):
        _compare(tally, part.name, before[part.name], _held(cluster, part))
    ops = {n.name: sorted(n.life.ops.values(), key=lambda op: op.step) for n in cluster.nodes}
    tally.ops_checked += sum(map(len, ops.values()))
    tally.violations += find_violations(ops, survivors=[node.name for node in survivors])


def _parts(nodes: list[Node]) -> list[Process]:
    return [part for node in nodes for part in (node.agent, node.trainer) if part is not None]


def _held(cluster: Cluster, part: Process) -> Held:
    tasks = 0
    if part.life is None:
        asked = time.monotonic()
        part.send(signal.SIGUSR2)

        def answers() -> list[str]:
            return [line for line in part.printed(since=asked) if line.startswith("chaos: tasks")]

        cluster.wait_for(lambda: bool(answers()), f"the tasks of {part.name}")
        tasks = int(answers()[0].rpartition(" ")[2])
    process = psutil.Process(part.pid)
    with process.oneshot():
        maps = process.memory_maps(grouped=False)
        return Held(
            descriptors=process.num_fds(),
            threads=process.num_threads(),
            shared_regions=sum("memfd" in region.path for region in maps),
            resident_bytes=process.memory_info().rss,
            tasks=tasks,
        )


def _compare(tally: Tally, name: str, before: Held, after: Held) -> None:
    """Notes the growth, and a violation where it is more than the slack."""
    kind = name.partition(" ")[0]
    for what in Held.__slots__:
        growth = getattr(after, what) - getattr(before, what)
        key = f"most {what.replace('_', ' ')} gained by a surviving {kind}"
        tally.facts[key] = max(tally.facts.get(key, 0.0), float(growth))
        if growth > getattr(SLACK, what):
            tally.violations.append(f"{name} has {growth} more {what} after the restarts")
