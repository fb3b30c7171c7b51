"""Fault after fault in one cluster, each at a random moment in the middle of an op."""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tools.chaos.cluster import CampaignError, Cluster, Node
from tools.chaos.faults import Fault, Struck
from tools.chaos.oplog import Op, clean_ops_s, find_violations, next_step
from tools.chaos.trainer import Options

CLEAN_OPS = 3  # before each fault
MOST_HANGS = 3  # then the campaign ends: each has cost its patience, and more would say no more


@dataclass(slots=True)
class Tally:
    """What the episodes of one campaign have come to."""

    recovery_s: list[float] = field(default_factory=list[float])
    clean_s: list[float] = field(default_factory=list[float])
    in_flight: int = 0
    """Faults that struck when all had called the op and none had completed it."""
    ops_checked: int = 0
    hangs: int = 0
    violations: list[str] = field(default_factory=list[str])
    facts: dict[str, float] = field(default_factory=dict[str, float])
    """What else was measured, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How often, how large, with which dice: what the command line says."""

    episodes: int
    op_bytes: int
    seed: int
    logs: Path | None = None

    def options(self, wait_for: int = 4, **more: Any) -> Options:  # noqa: ANN401 - of Options
        """Of the trainers."""
        return Options(number=0, wait_for=wait_for, op_bytes=self.op_bytes, **more)

    def random(self) -> Random:
        """The dice: the same seed, the same faults, though not at the same instructions."""
        return Random(self.seed)  # noqa: S311 - repeats a run


def run_faults(run: Run, fault: Fault, *, nodes: int = 4, calls: str = "sum") -> Tally:
    """A campaign of episodes with one kind of fault; for the calls see `tools.chaos.calls`."""
    options = run.options(nodes, calls=calls)
    with Cluster(nodes, options, patch=fault.patch, logs=run.logs) as cluster:
        return run_episodes(cluster, fault, run.episodes, run.random())


def run_episodes(cluster: Cluster, fault: Fault, count: int, random: Random) -> Tally:
    """So many faults, one after the other; every op of every trainer is checked."""
    tally = Tally()
    cluster.start()
    cluster.await_ops(CLEAN_OPS)
    for number in range(count):
        try:
            found = _run_episode(cluster, fault, random, tally)
            tally.violations += [f"episode {number}, {violation}" for violation in found]
        except CampaignError as e:
            tally.hangs += 1
            tally.violations.append(f"episode {number}: {e}")
            if tally.hangs >= MOST_HANGS:
                break
            cluster.restart_all()
            cluster.await_ops(CLEAN_OPS)
    tally.facts["struck in the middle of an op"] = tally.in_flight
    return tally


def _run_episode(cluster: Cluster, fault: Fault, random: Random, tally: Tally) -> list[str]:
    """Count what was measured; return what was violated."""
    began = cluster.await_ops(CLEAN_OPS)
    before = {node.name: node.life for node in cluster.nodes}
    clean = clean_ops_s(list(before.values()), since=began, until=time.monotonic())
    cluster.await_called(cluster.nodes)
    time.sleep(random.uniform(0.0, statistics.median(clean) if clean else 0.0))
    struck = fault.strike(cluster, random)
    survivors = [node for node in cluster.nodes if node not in struck.victims]
    lives = [node.life for node in survivors]
    took = cluster.await_recovery(
        lives,
        struck.at,
        f"after {type(fault).__name__} of {', '.join(v.name for v in struck.victims)} at "
        f"{struck.at:.3f}: the next op on {', '.join(node.name for node in survivors)}",
        timeout_s=fault.patience_s,
    )
    step = next_step(lives, struck.at)
    if all(life.calls.get(step, struck.at) < struck.at for life in lives):
        tally.in_flight += 1
    mended = time.monotonic()
    fault.mend(cluster, struck)
    cluster.await_ops(1)
    tally.clean_s += clean
    tally.recovery_s.append(took)
    ops = _ops_to_compare(cluster, struck, began, mended)
    ops |= {
        f"{v.name} before": _ops_of_the_lost(before[v.name].ops, fault, struck, began)
        for v in struck.victims
    }
    tally.ops_checked += sum(map(len, ops.values()))
    found = find_violations(ops, survivors=[node.name for node in survivors])
    for life in lives:
        found += [f"{life.name}: {error.says}" for error in life.errors(began)]
    cluster.forget_ops(before=began)
    what = f"{', '.join(v.name for v in struck.victims)} at {struck.at:.3f}"
    return [f"{what}: {violation}" for violation in found]


def _ops_to_compare(
    cluster: Cluster, struck: Struck, began: float, mended: float
) -> dict[str, list[Op]]:
    """Of this episode; of a victim, those that it did with the others once it was back."""

    def counts(node: Node, op: Op) -> bool:
        if node not in struck.victims:
            return op.called >= began
        together = {n.name for n in cluster.nodes if n not in struck.victims} <= set(op.names)
        return op.called >= mended and together

    return {
        node.name: sorted(
            (op for op in list(node.life.ops.values()) if counts(node, op)),
            key=lambda op: op.done,
        )
        for node in cluster.nodes
    }


def _ops_of_the_lost(ops: dict[int, Op], fault: Fault, struck: Struck, began: float) -> list[Op]:
    """What a victim had completed before: but for the last one, whose result may be lost with it.

    It may have had the last one alone, and then no survivor has seen it (I4).
    """
    known = sorted(
        (op for op in ops.values() if began <= op.called and op.done <= struck.at),
        key=lambda op: op.done,
    )
    return known if fault.keeps_results else known[:-1]
