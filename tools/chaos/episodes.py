"""Fault after fault in one cluster, each at a random moment in the middle of an op."""

import signal
import statistics
import time
from dataclasses import dataclass
from random import Random
from typing import Literal

from tools.lab.campaign import CLEAN_OPS, CampaignRun, Tally
from tools.lab.cluster import LabCluster, ops_of
from tools.lab.commands import LabError
from tools.lab.mesh import BOTH, Node, Part
from tools.lab.oplog import SeenOp, find_violations, next_step

ANY_PARTS: tuple[tuple[Part, ...], ...] = (("agent",), ("trainer",), BOTH)
WIFI_PATCH = """
import pmesh.net.links.interfaces
from pmesh.net.links.hardware import Hardware
pmesh.net.links.interfaces.read_hardware = lambda names: dict.fromkeys(names, Hardware("wifi"))
"""  # a veth has no radio; all that follows from the kind of an interface follows from this


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault, once it has happened."""

    at: float
    """When: before the first of its signals or packet rules, of the last victim."""
    victims: tuple[Node, ...]
    parts: tuple[Part, ...] = ()
    """What of each victim was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What an episode does to a cluster in which all train."""

    patch: str = ""
    """Source that makes the agents of such a campaign special."""
    patience_s: float = 15.0
    """After which the survivors count as hanging."""

    @property
    def keeps_results(self) -> bool:
        """Whether what the victim had completed binds the survivors: its agent lives (O2)."""
        return False

    def strike(self, cluster: LabCluster, random: Random) -> Struck:
        raise NotImplementedError

    def mend(self, cluster: LabCluster, struck: Struck) -> None:
        """Bring the victims back; how long that takes does not count."""
        cluster.restart(struck.victims, struck.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(Fault):
    """SIGKILL to parts of nodes, chosen at random or the leader."""

    parts: tuple[Part, ...]
    whom: Literal["any", "leader"] = "any"
    count: int = 1
    apart_s: float = 0.0
    """The second follows the first after a random time of at most this."""
    patience_s: float = 10.0

    @property
    def keeps_results(self) -> bool:
        return self.parts == ("trainer",)

    def strike(self, cluster: LabCluster, random: Random) -> Struck:
        victims = random.sample(cluster.nodes, self.count)
        if self.whom == "leader":
            victims = [cluster.leader()]
        at = time.monotonic()
        for index, victim in enumerate(victims):
            if index:
                time.sleep(random.uniform(0.0, self.apart_s))
                at = time.monotonic() if self.apart_s else at
            victim.kill(*self.parts)
        return Struck(at, tuple(victims), self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyKill(Fault):
    """A kill of a random kind each time: for the campaign that counts torn ops."""

    patience_s: float = 10.0

    def strike(self, cluster: LabCluster, random: Random) -> Struck:
        return Kill(parts=random.choice(ANY_PARTS)).strike(cluster, random)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeAgent(Fault):
    """SIGSTOP to an agent, for good: its sockets stay open."""

    def strike(self, cluster: LabCluster, random: Random) -> Struck:
        victim = random.choice(cluster.nodes)
        at = time.monotonic()
        victim.send(signal.SIGSTOP, ["agent"])
        return Struck(at, (victim,), BOTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Fault):
    """Every packet from and to a node vanishes, without a word to anybody."""

    def strike(self, cluster: LabCluster, random: Random) -> Struck:
        victim = random.choice(cluster.nodes)
        at = time.monotonic()
        cluster.lab.cut(victim.host)
        return Struck(at, (victim,))

    def mend(self, cluster: LabCluster, struck: Struck) -> None:
        for victim in struck.victims:
            cluster.lab.mend(victim.host)


MOST_HANGS = 3  # then the campaign ends: each has cost its patience, and more would say no more


def run_faults(run: CampaignRun, fault: Fault, *, nodes: int = 4, calls: str = "sum") -> Tally:
    """A campaign of episodes with one kind of fault; for the calls see `tools.chaos.calls`."""
    options = run.options(nodes, calls=calls)
    with LabCluster(nodes, options, patch=fault.patch, logs=run.logs) as cluster:
        return run_episodes(cluster, fault, run.episodes, run.random())


def run_episodes(cluster: LabCluster, fault: Fault, count: int, random: Random) -> Tally:
    """So many faults, one after the other; every op of every trainer is checked."""
    tally = Tally()
    cluster.start()
    cluster.await_ops(CLEAN_OPS)
    for number in range(count):
        try:
            found = _run_episode(cluster, fault, random, tally)
            tally.violations += [f"episode {number}, {violation}" for violation in found]
        except LabError as e:
            tally.hangs += 1
            tally.violations.append(f"episode {number}: {e}")
            if tally.hangs >= MOST_HANGS:
                break
            cluster.restart_all()
            cluster.await_ops(CLEAN_OPS)
    tally.facts["struck in the middle of an op"] = tally.in_flight
    return tally


def _run_episode(cluster: LabCluster, fault: Fault, random: Random, tally: Tally) -> list[str]:
    """Count what was measured; return what was violated."""
    began = tally.await_clean(cluster)
    before = {node.name: node.life for node in cluster.nodes}
    cluster.await_called(cluster.nodes)
    time.sleep(random.uniform(0.0, statistics.median(tally.clean_s or [0.0])))
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
    tally.recovery_s.append(took)
    ops = _ops_to_compare(cluster, struck, began, mended)
    ops |= {
        f"{v.name} before": _ops_of_the_lost(before[v.name].ops, fault, struck, began)
        for v in struck.victims
    }
    tally.ops_checked += sum(map(len, ops.values()))
    found = find_violations(ops, survivors=[node.name for node in survivors])
    found += [f"{life.name}: {error.says}" for life in lives for error in life.errors(began)]
    cluster.forget_ops(before=time.monotonic())  # a victim's own history may have been far ahead
    what = f"{', '.join(v.name for v in struck.victims)} at {struck.at:.3f}"
    return [f"{what}: {violation}" for violation in found]


def _ops_to_compare(
    cluster: LabCluster, struck: Struck, began: float, mended: float
) -> dict[str, list[SeenOp]]:
    """Of this episode; of a victim, those that it did with the others once it was back."""
    survivors = [node for node in cluster.nodes if node not in struck.victims]
    names = {node.name for node in survivors}
    return ops_of(survivors, lambda op: op.called >= began) | ops_of(
        struck.victims, lambda op: op.called >= mended and names <= set(op.names)
    )


def _ops_of_the_lost(
    ops: dict[int, SeenOp], fault: Fault, struck: Struck, began: float
) -> list[SeenOp]:
    """What a victim had completed before: but for the last one, whose result may be lost with it.

    It may have had the last one alone, and then no survivor has seen it (I4).
    """
    known = sorted(
        (op for op in ops.values() if began <= op.called and op.done <= struck.at),
        key=lambda op: op.done,
    )
    return known if fault.keeps_results else known[:-1]
