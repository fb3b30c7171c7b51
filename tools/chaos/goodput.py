"""How much of a training's speed is left where machines of unequal speed are lost now and then.

Goodput is the samples per second that come into the weights of all, with losses, over the same
without losses. What a lost rank had computed in its round does not count, nor does the time in
which it is away. Agents, trainers and the network are real; what a trainer computes is slept.
"""

import time
from collections.abc import Sequence
from functools import partial

from tools.lab.campaign import CampaignRun, Tally
from tools.lab.cluster import LabCluster, settled_ops
from tools.lab.mesh import LabTrainer, Node

SAMPLE_S = (0.05, 0.05, 0.07, 0.1, 0.1, 0.15, 0.2, 0.4)
"""Of each rank: the quickest is eight times as quick as the slowest."""
PERIOD_S = 60.0  # between two losses
AWAY_S = 10.0  # what a restart takes: the agent, the imports of a trainer, its data
ROUND_S = 10.0
QUIET_PERIODS = 2
PATIENCE_S = 150.0  # eight agents have met and eight trainers begun, on a machine that is busy
GOODPUT = "goodput"


def run_goodput(
    run: CampaignRun,
    *,
    period_s: float = PERIOD_S,
    away_s: float = AWAY_S,
    round_s: float = ROUND_S,
) -> Tally:
    """One rank with its agent is killed in each period and restarted, `episodes` times."""
    random, tally = run.random(), Tally()
    ranks = len(SAMPLE_S)
    options = run.options(ranks, round_s=round_s)
    with LabCluster(ranks, options, logs=run.logs) as cluster:
        for node in cluster.nodes:
            cluster.start_agent(node)
        for node, sample_s in zip(cluster.nodes, SAMPLE_S, strict=True):
            cluster.await_agent(node)
            cluster.start_trainer(node, pause_s=sample_s)
        _await_rounds(cluster, 2, round_s)
        quiet = _speed_in(cluster, QUIET_PERIODS * period_s)
        began = time.monotonic()
        for _ in range(run.episodes):
            due = time.monotonic() + period_s
            time.sleep(random.uniform(0.0, round_s))  # anywhere in a round
            victim = random.choice(cluster.nodes)
            victim.kill("agent", "trainer")
            time.sleep(away_s)
            cluster.start_agent(victim)
            cluster.await_agent(victim)
            cluster.start_trainer(victim, pause_s=SAMPLE_S[victim.host.number - 1])
            time.sleep(max(0.0, due - time.monotonic()))
        disturbed = _speed_since(cluster, began)
        _await_rounds(cluster, 1, round_s)
        ops, errors = settled_ops(cluster.trainers, 0.0, time.monotonic() - 1.0)
        tally.check(ops)
        tally.violations += [f"{name}: {e.says}" for name, told in errors.items() for e in told]
    tally.facts = {
        "losses": float(run.episodes),
        "samples/s without losses": quiet,
        "samples/s with losses": disturbed,
        GOODPUT: disturbed / quiet,
    }
    return tally


def _await_rounds(cluster: LabCluster, count: int, round_s: float) -> None:
    """Until all have ended so many more rounds with each other."""
    since, everybody = time.monotonic(), len(cluster.nodes)

    def is_through(node: Node) -> bool:
        ops = (op for op in node.life.ops.values() if op.done >= since)
        return sum(len(op.names) == everybody for op in ops) >= count

    cluster.wait_for(
        lambda: all(map(is_through, cluster.nodes)),
        "a round of all",
        timeout_s=PATIENCE_S + 4 * round_s,
    )


def _speed_in(cluster: LabCluster, seconds: float) -> float:
    began = time.monotonic()
    time.sleep(seconds)
    return _speed_since(cluster, began)


def _speed_since(cluster: LabCluster, began: float) -> float:
    """Once at least two rounds have ended since then: a busy machine takes long for a short one."""
    counted = partial(_counted_since, cluster.trainers, began)
    cluster.wait_for(
        lambda: len({number for number, _, _ in counted()}) > 1, "two rounds", timeout_s=PATIENCE_S
    )
    return samples_per_s(counted())


def _counted_since(trainers: Sequence[LabTrainer], began: float) -> list[tuple[int, float, float]]:
    return [
        (report.step, report.at, report.value)
        for trainer in trainers
        for report in list(trainer.life.others)
        if report.what == "counted" and report.at >= began
    ]


def samples_per_s(counted: Sequence[tuple[int, float, float]]) -> float:
    """The speed from the end of the first round to the end of the last one.

    Args:
        counted: for each rank and round the number of the round, when it ended, and the samples.

    >>> samples_per_s([(1, 1.0, 9), (1, 1.1, 9), (2, 3.0, 10), (2, 3.1, 10), (3, 5.1, 30)])
    12.5
    """
    ends = dict(sorted((number, at) for number, at, _ in counted))
    first, last = min(ends), max(ends)
    samples = sum(value for number, _, value in counted if number > first)
    return samples / (ends[last] - ends[first])
