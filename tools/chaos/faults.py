"""One class for each way to lose a machine or a part of one, and how it comes back."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

from tools.chaos.cluster import Cluster, Node

Part = Literal["agent", "trainer"]
WIFI_PATCH = """
import pmesh.net.links.interfaces
pmesh.net.links.interfaces._linux_kind = lambda interface: "wifi"
"""  # a veth has no radio; all that follows from the kind of an interface follows from this


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault, once it has happened."""

    at: float
    """When: before the first of its signals or packet rules, of the last victim."""
    victims: tuple[Node, ...]
    parts: tuple[Part, ...] = ()
    """What of each victim was killed."""


class Fault(Protocol):
    """What an episode does to a cluster in which all train."""

    @property
    def patch(self) -> str:
        """What makes the agents of such a campaign special."""
        ...

    @property
    def patience_s(self) -> float:
        """After which the survivors count as hanging."""
        ...

    @property
    def keeps_results(self) -> bool:
        """Whether what the victim had completed binds the survivors: its agent lives (O2)."""
        ...

    def strike(self, cluster: Cluster, random: Random) -> Struck:
        """Do it."""
        ...

    def mend(self, cluster: Cluster, struck: Struck) -> None:
        """Bring the victims back; how long that takes does not count."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL to parts of nodes, chosen at random or the leader."""

    parts: tuple[Part, ...]
    whom: Literal["any", "leader"] = "any"
    count: int = 1
    apart_s: float = 0.0
    """The second follows the first after a random time of at most this."""
    patch: str = ""
    patience_s: float = 10.0

    @property
    def keeps_results(self) -> bool:
        """See `Fault`."""
        return self.parts == ("trainer",)

    def strike(self, cluster: Cluster, random: Random) -> Struck:
        """See `Fault`."""
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

    def mend(self, cluster: Cluster, struck: Struck) -> None:
        """See `Fault`."""
        restart(cluster, struck.victims, self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyKill:
    """A kill of a random kind each time: for the campaign that counts torn ops."""

    patch: str = ""
    patience_s: float = 10.0
    keeps_results: bool = False

    def strike(self, cluster: Cluster, random: Random) -> Struck:
        """See `Fault`."""
        kinds: list[tuple[Part, ...]] = [("agent",), ("trainer",), ("agent", "trainer")]
        return Kill(parts=random.choice(kinds)).strike(cluster, random)

    def mend(self, cluster: Cluster, struck: Struck) -> None:
        """See `Fault`."""
        # Not what has ended: a process that was killed may take a moment to.
        restart(cluster, struck.victims, struck.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAgent:
    """SIGSTOP to an agent, for good: its sockets stay open."""

    patch: str = ""
    patience_s: float = 15.0
    keeps_results: bool = False

    def strike(self, cluster: Cluster, random: Random) -> Struck:
        """See `Fault`."""
        victim = random.choice(cluster.nodes)
        at = time.monotonic()
        if victim.agent is not None:
            victim.agent.send(signal.SIGSTOP)
        return Struck(at, (victim,))

    def mend(self, cluster: Cluster, struck: Struck) -> None:
        """See `Fault`."""
        for victim in struck.victims:
            victim.kill("agent", "trainer")
        restart(cluster, struck.victims, ("agent", "trainer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Every packet from and to a node vanishes, without a word to anybody."""

    patch: str = ""
    patience_s: float = 15.0
    keeps_results: bool = False

    def strike(self, cluster: Cluster, random: Random) -> Struck:
        """See `Fault`."""
        victim = random.choice(cluster.nodes)
        at = time.monotonic()
        cluster.lab.cut(victim.host)
        return Struck(at, (victim,))

    def mend(self, cluster: Cluster, struck: Struck) -> None:
        """See `Fault`."""
        for victim in struck.victims:
            cluster.lab.mend(victim.host)


def restart(cluster: Cluster, nodes: Sequence[Node], parts: Sequence[Part]) -> None:
    """Start again what was killed; a trainer that has outlived its agent comes back by itself."""
    for node in nodes:
        node.kill(*parts)
        ends = [node.agent if part == "agent" else node.trainer for part in parts]
        cluster.wait_for(
            lambda ends=ends: all(p is None or p.ended for p in ends),  # type: ignore[misc]
            f"the end of {node.name}'s processes",
        )
    cluster.start(nodes)
