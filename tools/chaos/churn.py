"""Peers that come and go at random, up to eight and never fewer than two (PCCL's stress regime)."""

import threading
import time
from collections import defaultdict
from itertools import pairwise
from random import Random

from tools.chaos.cluster import CampaignError, Cluster, Node, Process
from tools.chaos.episodes import Run, Tally
from tools.chaos.oplog import Op, find_violations

MOST = 8
FEWEST = 2
CHANGE_S = (0.5, 2.0)
MINUTES = 20
LONGEST_GAP_S = 5.0
_CHECK_S = 10.0


def run_churn(run: Run) -> Tally:
    """So many minutes (`--episodes`) of random starts and SIGKILLs."""
    with Cluster(MOST, run.options(FEWEST), logs=run.logs) as cluster:
        churn = _Churn(cluster, run.random())
        churn.begin()
        until = time.monotonic() + 60.0 * run.episodes
        while time.monotonic() < until and not churn.tally.violations:
            churn.change()
        return churn.end()


class _Churn:
    def __init__(self, cluster: Cluster, random: Random) -> None:
        self.tally = Tally()
        self._cluster = cluster
        self._random = random
        self._trainers: list[Process] = []
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
        self._trainers += [node.trainer for node in first if node.trainer is not None]
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
            parts = self._random.choice([("agent",), ("trainer",), ("agent", "trainer")])
            victim = self._random.choice(productive)
            if victim.trainer is not None and "agent" in parts:
                self._orphans.add(victim.trainer.pid)
            victim.kill(*parts)
            self._changes[f"kills of {' and '.join(parts)}"] += 1
        if time.monotonic() > self._checked_until + _CHECK_S:
            self._check(margin_s=2.0)

    def end(self) -> Tally:
        """What it has come to."""
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
        if node.name in self._starting or not _runs(node.trainer) or not _runs(node.agent):
            return False
        last = node.life.last
        since = node.agent.started if node.agent is not None else 0.0
        return last is not None and last.done > since and len(last.names) > 1

    def _is_free(self, node: Node) -> bool:
        return node.name not in self._starting and not (_runs(node.trainer) and _runs(node.agent))

    def _spawn(self, node: Node) -> None:
        def start() -> None:
            try:
                self._cluster.start([node])
                if node.trainer is not None and node.trainer not in self._trainers:
                    self._trainers.append(node.trainer)
            except CampaignError as e:
                self._failures.append(str(e))
            finally:
                del self._starting[node.name]

        self._changes["starts"] += 1
        self._starting[node.name] = threading.Thread(target=start)
        self._starting[node.name].start()

    def _check(self, *, margin_s: float) -> None:
        """Ops up to a moment ago: later ones may still be reported by others."""
        until = time.monotonic() - margin_s
        ops: dict[str, list[Op]] = {}
        for trainer in list(self._trainers):
            if trainer.life is None:
                continue
            done = sorted(trainer.life.ops.values(), key=lambda op: op.done)
            if trainer.ended:
                done = done[:-1]  # perhaps it alone had the last result, and took it along
            ops[trainer.name] = [
                op
                for op in done
                if self._checked_until < op.done <= until and not trainer.life.knew_to_be_alone(op)
            ]
            if trainer.pid not in self._orphans:
                errors = trainer.life.errors(self._checked_until)
                self.tally.violations += [f"{trainer.name}: {error.says}" for error in errors]
        everything = [op for done in ops.values() for op in done]
        self.tally.ops_checked += len(everything)
        self._completed += [op.done for op in everything]
        self.tally.violations += find_violations(ops) + self._failures
        self._failures.clear()
        self._cluster.forget_ops(before=until)
        self._checked_until = until


def _runs(process: Process | None) -> bool:
    return process is not None and not process.ended
