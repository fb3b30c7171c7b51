"""A trainer that is stopped is named and left behind; one that computes is waited for."""

import re
import signal
import time

from tools.chaos.cluster import Cluster, Node
from tools.chaos.episodes import CLEAN_OPS, Run, Tally
from tools.chaos.faults import restart
from tools.chaos.oplog import Op, clean_ops_s, find_violations
from tools.chaos.steady import check_undisturbed

STRAGGLER_AFTER_S = 4.0
"""As the trainers of this campaign ask for; the default, a minute, would only take longer."""
COMPUTES_S = 3 * STRAGGLER_AFTER_S
_STEP = 12


def run_stopped_trainers(run: Run) -> Tally:
    """SIGSTOP to a trainer, for good; its agent and its socket stay."""
    random = run.random()
    tally = Tally()
    told: list[float] = []
    options = run.options(straggler_after_s=STRAGGLER_AFTER_S)
    with Cluster(4, options, logs=run.logs) as cluster:
        cluster.start()
        for _ in range(run.episodes):
            began = cluster.await_ops(CLEAN_OPS)
            lives = [node.life for node in cluster.nodes]
            tally.clean_s += clean_ops_s(lives, since=began, until=time.monotonic())
            cluster.await_called(cluster.nodes)
            victim = random.choice(cluster.nodes)
            others = [node for node in cluster.nodes if node is not victim]
            at = time.monotonic()
            if victim.trainer is not None:
                victim.trainer.send(signal.SIGSTOP)
            lives = [node.life for node in others]
            what = f"the next op without {victim.name}, which is stopped"
            patience_s = STRAGGLER_AFTER_S + 15.0
            took = cluster.await_recovery(lives, at, what, timeout_s=patience_s)
            if took < STRAGGLER_AFTER_S / 2:
                # Its agent has ended the op that it had called; the next one waits for it.
                again = time.monotonic()
                took = again - at
                took += cluster.await_recovery(lives, again, what, timeout_s=patience_s)
            tally.recovery_s.append(took)
            told += [_told_s(node, victim, at) for node in others]
            restart(cluster, [victim], ("trainer",))
            cluster.await_ops(1)
            ops: dict[str, list[Op]] = {
                node.name: sorted(node.life.ops.values(), key=lambda op: op.step) for node in others
            }
            tally.ops_checked += sum(map(len, ops.values()))
            tally.violations += find_violations(ops, survivors=ops)
            tally.violations += [f"{n.name}: {e.says}" for n in others for e in n.life.errors(at)]
            cluster.forget_ops(before=began)
    tally.facts = {
        "straggler_after, s": STRAGGLER_AFTER_S,
        "slowest to be told by name, s": max(told),
        "first to go on, s": min(tally.recovery_s),
    }
    return tally


def run_computing_trainers(run: Run) -> Tally:
    """A trainer that computes for three times `straggler_after` between two calls."""
    tally = Tally()
    options = run.options(straggler_after_s=STRAGGLER_AFTER_S)
    for _ in range(run.episodes):
        with Cluster(4, options, logs=run.logs) as cluster:
            for node in cluster.nodes:
                cluster.start_agent(node)
            for node in cluster.nodes:
                cluster.await_agent(node)
                slow = node is cluster.nodes[1]
                computes_s = COMPUTES_S if slow else 0.0
                cluster.start_trainer(node, compute_at_step=_STEP, compute_s=computes_s)
            lives = [node.life for node in cluster.nodes]
            cluster.wait_for(
                lambda lives=lives: all(_STEP + 2 in life.ops for life in lives),  # type: ignore[misc]
                "the ops after a long computation",
                timeout_s=COMPUTES_S + 30.0,
            )
            tally.recovery_s.append(lives[0].ops[_STEP].done - lives[0].ops[_STEP].called)
            check_undisturbed(cluster, tally, since=0.0)
    tally.facts = {"straggler_after, s": STRAGGLER_AFTER_S, "computed, s": COMPUTES_S}
    return tally


def _told_s(node: Node, victim: Node, at: float) -> float:
    """When this node, by its agent or in its trainer, first said who is stopped; else infinity."""
    parts = [part for part in (node.agent, node.trainer) if part is not None]
    told = [
        when - at
        for part in parts
        for when, line in list(part.lines)
        if when >= at and victim.name in line and re.search(r"\bstopped\b", line)
    ]
    return min(told, default=float("inf"))
