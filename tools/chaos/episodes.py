"""Fault after fault in one cluster, each at a random moment in the middle of an op."""

import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from tools.lab.campaign import CLEAN_OPS, CampaignRun, Tally
from tools.lab.cluster import LabCluster, ops_of, trainers_of
from tools.lab.commands import LabError
from tools.lab.mesh import BOTH, LabTrainer, Node, Part
from tools.lab.oplog import Life, SeenOp, find_violations, next_step

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
    trainers: tuple[LabTrainer, ...] = ()
    """The killed ones, if the others of their nodes live."""
    what: str = ""
    """Which kind of its fault this was, if the tally counts them."""

    @property
    def keeps_results(self) -> bool:
        """Whether what the victims had completed binds the survivors: their agents live (O2)."""
        return self.parts == ("trainer",)

    @property
    def lost(self) -> list[LabTrainer]:
        """The trainers that are not there any more, or have lost their agent."""
        return list(self.trainers) or trainers_of(self.victims)

    @property
    def names(self) -> str:
        """The names of what was struck."""
        return ", ".join(x.life.name for x in self.trainers) or ", ".join(
            victim.name for victim in self.victims
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What an episode does to a cluster in which all train."""

    patch: str = ""
    """Source that makes the agents of such a campaign special."""
    patience_s: float = 15.0
    """After which the survivors count as hanging."""

    def strike(self, cluster: LabCluster, random: Random) -> Struck:
        raise NotImplementedError

    def mend(self, cluster: LabCluster, struck: Struck) -> None:
        """Bring the victims back; how long that takes does not count."""
        cluster.restart(struck.victims, struck.parts, struck.trainers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(Fault):
    """SIGKILL to parts of nodes, chosen at random or the leader."""

    parts: tuple[Part, ...]
    whom: Literal["any", "leader"] = "any"
    count: int = 1
    apart_s: float = 0.0
    """The second follows the first after a random time of at most this."""
    patience_s: float = 10.0

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
class KillRanks(Fault):
    """SIGKILL of one trainer or two, of an agent below its trainers, or of a whole node."""

    patience_s: float = 15.0
    whom: tuple[str, ...] = ("trainer", "trainer", "trainer", "two", "agent", "node")
    apart_s: float = 0.0
    """For how long nobody is killed again."""

    def strike(self, cluster: LabCluster, random: Random) -> Struck:
        match random.choice(self.whom):
            case "trainer":
                node = random.choice(cluster.nodes)
                trainer = random.choice(node.trainers)
                return _kill([trainer], cluster.nodes, f"kills of {_place_of(trainer, node)}")
            case "two":
                trainers = random.sample(trainers_of(cluster.nodes), 2)
                return _kill(trainers, cluster.nodes, "kills of two trainers at once")
            case "agent":
                struck = Kill(parts=("agent",)).strike(cluster, random)
                return replace(struck, what="kills of an agent")
            case _:
                struck = Kill(parts=BOTH).strike(cluster, random)
                return replace(struck, what="kills of a node")

    def mend(self, cluster: LabCluster, struck: Struck) -> None:
        Fault.mend(self, cluster, struck)
        time.sleep(max(0.0, struck.at + self.apart_s - time.monotonic()))


def _kill(trainers: Sequence[LabTrainer], nodes: Sequence[Node], what: str) -> Struck:
    victims = tuple(node for node in nodes if set(trainers) & set(node.trainers))
    at = time.monotonic()
    for trainer in trainers:
        trainer.send_signal(signal.SIGKILL)
    return Struck(at, victims, ("trainer",), tuple(trainers), what)


def _place_of(trainer: LabTrainer, node: Node) -> str:
    """Return which rank of its agent it is: they are ranks in the order in which they have come."""
    if len(node.trainers) == 1:
        return "an agent's only trainer"
    ages = sorted(node.trainers, key=lambda each: each.started)
    return {ages[0]: "an agent's first trainer", ages[-1]: "an agent's last trainer"}.get(
        trainer, "one between"
    )


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
        """Start the victims anew: one that was silent and is back soon would get longer (V12)."""
        for victim in struck.victims:
            cluster.lab.mend(victim.host)
        cluster.restart(struck.victims)


MOST_HANGS = 3  # then the campaign ends: each has cost its patience, and more would say no more


def run_faults(run: CampaignRun, fault: Fault, *, nodes: int = 4, calls: str = "sum") -> Tally:
    """A campaign of episodes with one kind of fault; for the calls see `tools.chaos.calls`."""
    options = run.options(nodes, calls=calls)
    with LabCluster(nodes, options, patch=fault.patch, logs=run.logs) as cluster:
        return run_episodes(cluster, fault, run.episodes, run.random())


PLACEMENTS = ((2, 3, 1), (1, 2, 1, 3))
"""How many trainers each host has; a campaign has half of its episodes with each."""


def run_ranks(run: CampaignRun) -> Tally:
    """Kills among hosts that have unequal numbers of trainers."""
    tally, random = Tally(), run.random()
    placements = PLACEMENTS[:1] if run.short else PLACEMENTS
    for number, placement in enumerate(placements):
        count = (run.episodes + len(placements) - 1 - number) // len(placements)
        options = run.options(sum(placement), calls="ranks")
        with LabCluster(placement, options, logs=run.logs) as cluster:
            run_episodes(cluster, KillRanks(), count, random, tally)
    return tally


def run_together(run: CampaignRun) -> Tally:
    """Kills of trainers of which one agent has all."""
    # A leader makes at most 16 views a second, and an episode takes two to four.
    fault = KillRanks(whom=("trainer", "trainer", "two"), apart_s=0.3)
    with LabCluster((4,), run.options(4), logs=run.logs) as cluster:
        return run_episodes(cluster, fault, run.episodes, run.random())


def run_episodes(
    cluster: LabCluster, fault: Fault, count: int, random: Random, tally: Tally | None = None
) -> Tally:
    """So many faults, one after the other; every op of every trainer is checked.

    Args:
        cluster: Where; nothing runs there yet.
        fault: What is done.
        count: How often.
        random: The dice.
        tally: What there is already, to which this is added.
    """
    tally = tally or Tally()
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
    before = trainers_of(cluster.nodes)
    cluster.await_called(cluster.nodes)
    time.sleep(random.uniform(0.0, statistics.median(tally.clean_s or [0.0])))
    struck = fault.strike(cluster, random)
    lost = struck.lost
    survivors = [trainer for trainer in before if trainer not in lost]
    lives = [trainer.life for trainer in survivors]
    took = cluster.await_recovery(
        lives,
        struck.at,
        f"after {type(fault).__name__} of {struck.names} at {struck.at:.3f}: the next op on "
        f"{', '.join(life.name for life in lives)}",
        timeout_s=fault.patience_s,
    )
    if struck.what:
        tally.count(struck.what)
    step = next_step(lives, struck.at)
    if all(life.calls.get(step, struck.at) < struck.at for life in lives):
        tally.in_flight += 1
    mended = time.monotonic()
    fault.mend(cluster, struck)
    cluster.await_ops(1)
    tally.recovery_s.append(took)
    ops = _ops_to_compare(cluster, lives, began, mended)
    ops |= {
        f"{each.life.name} before": _ops_of_the_lost(each.life.ops, struck, began) for each in lost
    }
    tally.ops_checked += sum(map(len, ops.values()))
    found = find_violations(ops, survivors=[life.name for life in lives])
    found += [f"{life.name}: {error.says}" for life in lives for error in life.errors(began)]
    cluster.forget_ops(before=time.monotonic())  # a victim's own history may have been far ahead
    return [f"{struck.names} at {struck.at:.3f}: {violation}" for violation in found]


def _ops_to_compare(
    cluster: LabCluster, survivors: Sequence[Life], began: float, mended: float
) -> dict[str, list[SeenOp]]:
    """Of this episode; of a victim, those that it did with all others once it was back."""
    everybody = sorted(node.name for node in cluster.nodes for _ in node.trainers)
    stayed = {life.name for life in survivors}
    ops = ops_of(cluster.nodes, lambda op: op.called >= began)
    return {
        name: seen
        if name in stayed
        else [op for op in seen if op.called >= mended and sorted(op.names) == everybody]
        for name, seen in ops.items()
    }


def _ops_of_the_lost(ops: dict[int, SeenOp], struck: Struck, began: float) -> list[SeenOp]:
    """What a victim had completed before: but for the last one, whose result may be lost with it.

    It may have had the last one alone, and then no survivor has seen it (I4).
    """
    known = sorted(
        (op for op in list(ops.values()) if began <= op.called and op.done <= struck.at),
        key=lambda op: op.done,
    )
    return known if struck.keeps_results else known[:-1]
