"""Two cables to each host: the one in use is pulled or goes dead, comes back, comes and goes."""

import statistics
import time
from collections.abc import Callable
from random import Random

from pmesh.core.links.paths import RELAYED
from tools.chaos.steady import check_undisturbed
from tools.lab.campaign import CampaignRun, Tally
from tools.lab.cluster import LabCluster
from tools.lab.commands import LabError
from tools.lab.mesh import Node
from tools.lab.net import LabHost, NetLab
from tools.lab.oplog import clean_ops_s

NETWORKS = 2
HOSTS = (3, 4)
FOUND_S = 3.0
"""By then a cable that is back is found, and what that may disturb has happened."""
OUT_S = (1.0, 4.0)
"""How long a cable stays out, once the others have gone on."""
LOOK_S = 0.1
PLUGGED_S = 20.0
"""How long a better cable is waited for: four times the bar."""
LINE_BITS_PER_S = 1_000_000_000
SLOWER_BITS_PER_S = 200_000_000
FLAP_S = 1.0
FLAP_SHARE = "ops a second over those on the stable path alone"
FASTER_PATCH = """
import pmesh.net.links.interfaces as interfaces
from pmesh.net.links.hardware import Hardware
interfaces.read_hardware = lambda names: {
    name: Hardware("thunderbolt" if name == "eth1" else "wired") for name in names
}
"""  # a veth claims one speed whatever the lab gives it; so eth1 is the better one by its kind

Harm = Callable[[NetLab, LabHost, int], None]


def pull(lab: NetLab, host: LabHost, network: int) -> None:
    """The host's interface loses its carrier."""
    lab.unplug(host, network)


def vanish(lab: NetLab, host: LabHost, network: int) -> None:
    """Packets from and to the host vanish in this network; the carrier stays."""
    lab.cut(host, network=network)


class _Use:
    """Over which of its cables a host has sent and received most since the last look."""

    def __init__(self, lab: NetLab, host: LabHost) -> None:
        self._lab, self._host = lab, host
        self._before = self._count()

    def look(self) -> int:
        before, self._before = self._before, self._count()
        carried = [now - then for then, now in zip(before, self._before, strict=True)]
        return carried.index(max(carried))

    def _count(self) -> list[int]:
        return [self._lab.carried_bytes(self._host, network) for network in range(NETWORKS)]


def run_harm(run: CampaignRun, harm: Harm) -> Tally:
    """Harm the cable in use in the middle of an op, and repair it some seconds later."""
    random, tally = run.random(), Tally()
    for index, hosts in enumerate(HOSTS):
        if episodes := (run.episodes + index) // len(HOSTS):
            with _cluster(run, hosts) as cluster:
                _begin(cluster)
                for _ in range(episodes):
                    _harm_once(cluster, harm, random, tally)
    return tally


def _harm_once(cluster: LabCluster, harm: Harm, random: Random, tally: Tally) -> None:
    lab, victim = cluster.lab, random.choice(cluster.nodes)
    use = _Use(lab, victim.host)
    began = tally.await_clean(cluster)
    network = use.look()
    lives = [node.life for node in cluster.nodes]
    cluster.await_called(cluster.nodes)
    time.sleep(random.uniform(0.0, statistics.median(tally.clean_s)))
    at = time.monotonic()
    harm(lab, victim.host, network)
    what = f"the next op, after {harm.__name__} of {victim.name}'s eth{network} at {at:.3f}"
    tally.recovery_s.append(cluster.await_recovery(lives, at, what))
    time.sleep(random.uniform(*OUT_S))
    lab.plug(victim.host, network)
    lab.mend(victim.host)
    time.sleep(FOUND_S)
    _await_paths(cluster)
    cluster.await_ops(1)
    _check(cluster, tally, began, what)


def run_plugs(run: CampaignRun) -> Tally:
    """The better one of a host's two cables is plugged in for the first time, and once again.

    Then all begin anew: a cable that is pulled often is for a while not trusted.
    """
    random, tally = run.random(), Tally()
    for first in range(0, run.episodes, 2):
        with _cluster(run, HOSTS[0], patch=FASTER_PATCH) as cluster:
            _shape(cluster.lab, SLOWER_BITS_PER_S, LINE_BITS_PER_S)
            victim = random.choice(cluster.nodes)
            cluster.lab.unplug(victim.host, 1)
            _begin(cluster, without=victim)
            for again in range(min(2, run.episodes - first)):
                if again:
                    time.sleep(random.uniform(*OUT_S))
                _plug_once(cluster, victim, tally)
    return tally


def _plug_once(cluster: LabCluster, victim: Node, tally: Tally) -> None:
    began = tally.await_clean(cluster)
    at = time.monotonic()
    cluster.lab.plug(victim.host, 1)
    what = f"{victim.name}'s eth1, plugged in at {at:.3f},"
    use = _Use(cluster.lab, victim.host)
    while use.look() != 1:
        if time.monotonic() > at + PLUGGED_S:
            raise LabError(f"{what} was not used within {PLUGGED_S:g} s")
        time.sleep(LOOK_S)
    tally.recovery_s.append(time.monotonic() - at)
    cluster.await_ops(1)
    cluster.lab.unplug(victim.host, 1)
    cluster.await_ops(1)
    _check(cluster, tally, began, what)


def run_flaps(run: CampaignRun) -> Tally:
    """The better of a host's cables comes and goes every second; before and after, it is out."""
    random, tally = run.random(), Tally()
    with _cluster(run, HOSTS[0], patch=FASTER_PATCH) as cluster:
        _shape(cluster.lab, LINE_BITS_PER_S, LINE_BITS_PER_S)
        _begin(cluster)
        victim = random.choice(cluster.nodes)
        began = tally.await_clean(cluster)
        cluster.lab.unplug(victim.host, 1)
        cluster.await_ops(1)
        half_s = FLAP_S * run.episodes
        tally.clean_s = _ops_in(cluster, half_s, lambda: time.sleep(FLAP_S))

        def flap() -> None:
            cluster.lab.plug(victim.host, 1)
            time.sleep(FLAP_S)
            cluster.lab.unplug(victim.host, 1)
            time.sleep(FLAP_S)

        tally.recovery_s = _ops_in(cluster, 2 * half_s, flap)
        cluster.await_ops(1)
        tally.clean_s += _ops_in(cluster, half_s, lambda: time.sleep(FLAP_S))
        _check(cluster, tally, began, f"while {victim.name}'s eth1 came and went")
    tally.facts[FLAP_SHARE] = len(tally.recovery_s) / max(1, len(tally.clean_s))
    return tally


def _ops_in(cluster: LabCluster, seconds: float, step: Callable[[], None]) -> list[float]:
    """How long each op took of those that all have done in this time, while steps were made."""
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        step()
    lives = [node.life for node in cluster.nodes]
    return clean_ops_s(lives, since=began, until=began + seconds)


def _cluster(run: CampaignRun, hosts: int, *, patch: str = "") -> LabCluster:
    lab = NetLab(hosts, networks=NETWORKS)
    return LabCluster(hosts, run.options(hosts), patch=patch, logs=run.logs, lab=lab)


def _shape(lab: NetLab, *bits_per_s: int) -> None:
    """Lines of these speeds, one for each network.

    Bare ones are as fast as the processors, so neither would carry more than the other.
    """
    for host in lab.hosts:
        for network, speed in enumerate(bits_per_s):
            lab.shape(host, bits_per_s=speed, network=network)


def _begin(cluster: LabCluster, *, without: Node | None = None) -> None:
    """Until all train, and each link has both paths, but for those to the host without a cable."""
    cluster.start()
    cluster.await_ops(1)  # before, views come and go: they find each other one by one
    _await_paths(cluster, without=without)


def _await_paths(cluster: LabCluster, *, without: Node | None = None) -> None:
    def has_all_paths(node: Node) -> bool:
        members = node.status().get("view", {"members": []})["members"]
        direct = {
            member["name"]: sum(path["kind"] != RELAYED for path in member["paths"])
            for member in members
        }
        return all(
            direct.get(other.name, 0) == (1 if without in {node, other} else NETWORKS)
            for other in cluster.nodes
            if other is not node
        )

    cluster.wait_for(lambda: all(map(has_all_paths, cluster.nodes)), "both paths of each link")


def _check(cluster: LabCluster, tally: Tally, began: float, what: str) -> None:
    before = len(tally.violations)
    check_undisturbed(cluster, tally, since=began)
    tally.violations[before:] = [f"{what}: {said}" for said in tally.violations[before:]]
    cluster.forget_ops(before=began)
