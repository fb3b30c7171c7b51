"""What goes wrong, at seeded times: crashes, sleeps, cuts, closed connections, lost trainers."""

from collections.abc import Callable

from pmesh.core.links.health import WIRED
from simulation.agents import SimulatedAgent
from simulation.cluster import Cluster, Outcome
from simulation.invariants import Violation
from simulation.network import Conditions
from simulation.trainers import STRAGGLER_AFTER_S, chance

AIMED = 0.2
"""The share of commits that a fault is aimed at: a half-sent commit is the hardest case."""


class PlayedFaults:
    """Plays faults on a cluster until its schedule says that they end."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._random = cluster.random
        self.crashes_only = chance(self._random, 0.2)
        """Nothing is lost or late, and who is dead stays dead: then nobody alive falls out."""
        self._per_second = self._random.choice([0.3, 0.7, 1.5])
        self._kinds: dict[Callable[[int], None], float] = {
            self._crash: 0.25,
            self._sleep: 0.15,
            self._partition: 0.15,
            self._cut: 0.1,
            self._hold_up: 0.15,
            self._drop: 0.1,
            self._kill_trainer: 0.15,
            self._stop_trainer: 0.05,
            self._heal: 0.1,
        }
        if self.crashes_only:
            cluster.network.conditions = Conditions()
        cluster.on_start = self._watch
        first = cluster.schedule.formed_by_s * (self.crashes_only + 2 * self._random.random())
        self._after(first, self._strike)

    def _watch(self, agent: SimulatedAgent) -> None:
        agent.before_commit = self._strike_at_commit

    def _after(self, delay_s: float, what: Callable[[], None]) -> None:
        self._cluster.timeline.after(delay_s, what)

    def _over(self) -> bool:
        return self._cluster.timeline.now > self._cluster.schedule.faults_until_s

    def _strike(self) -> None:
        if self._over():
            return
        self._after(self._random.expovariate(self._per_second), self._strike)
        kinds = [self._crash] if self.crashes_only else list(self._kinds)
        (kind,) = self._random.choices(kinds, [self._kinds[kind] for kind in kinds])
        number = self._random.randrange(self._cluster.size)
        if number in self._cluster.agents:
            kind(number)

    def _crash(self, number: int) -> None:
        self._cluster.crash(number)
        if not self.crashes_only and chance(self._random, 0.7):
            self._after(self._random.random() * 3, lambda: self._cluster.start(number))

    def _sleep(self, number: int) -> None:
        duration_s = self._random.choice([0.3, 0.9, 1.5, 4.0])
        self._cluster.note(number, f"sleeps for {duration_s} s")
        self._cluster.sleep(number)
        self._after(duration_s, lambda: self._cluster.wake(number))

    def _partition(self, number: int) -> None:
        others = [n for n in range(self._cluster.size) if chance(self._random, 0.5)]
        side = [n for n in range(self._cluster.size) if n not in others]
        self._cluster.note(number, f"is cut: {side} from {others}")
        self._cluster.network.partition(side, others)

    def _cut(self, number: int) -> None:
        peer = self._peer_of(number)
        self._cluster.note(number, f"is cut off from {peer}")
        self._cluster.network.cut(number, peer)
        if chance(self._random, 0.6):
            self._cluster.network.cut(peer, number)

    def _hold_up(self, number: int) -> None:
        """Too briefly for anybody to be gone: what was said comes late."""
        peer = self._peer_of(number)
        self._cluster.note(number, f"gets nothing through to {peer} for a while")
        self._cluster.network.cut(number, peer)
        self._mend_later(number, peer)

    def _mend_later(self, number: int, peer: int) -> None:
        duration_s = self._random.random() * WIRED.gone_after_s
        self._after(duration_s, lambda: self._cluster.network.mend(number, peer))

    def _drop(self, number: int) -> None:
        peer = self._peer_of(number)
        self._cluster.note(number, f"loses the connection with {peer}")
        self._cluster.agents[number].drop(peer)

    def _kill_trainer(self, number: int) -> None:
        trainers = self._cluster.agents[number].trainers
        if trainers:
            self._cluster.note(number, "loses a trainer")
            self._random.choice(trainers).die()

    def _stop_trainer(self, number: int) -> None:
        trainers = self._cluster.agents[number].trainers
        if trainers:
            duration_s = self._random.choice([1.0, 2 * STRAGGLER_AFTER_S])
            self._cluster.note(number, f"has a trainer stopped for {duration_s} s")
            self._random.choice(trainers).stop(duration_s)

    def _heal(self, number: int) -> None:
        self._cluster.note(number, "is healed, as all others")
        self._cluster.network.heal()

    def _peer_of(self, number: int) -> int:
        return (number + self._random.randrange(1, self._cluster.size)) % self._cluster.size

    def _strike_at_commit(self, agent: SimulatedAgent) -> None:
        number, network = agent.number, self._cluster.network
        early = self._cluster.timeline.now < self._cluster.schedule.formed_by_s
        if early or self._over() or not chance(self._random, AIMED):
            return
        if not self.crashes_only:
            brief = chance(self._random, 0.5)
            for peer in range(self._cluster.size):
                if peer != number and chance(self._random, 0.5):
                    self._cluster.note(number, f"is cut off from {peer}, about to commit")
                    network.cut(number, peer)
                    if brief:
                        self._mend_later(number, peer)
            if chance(self._random, 0.3):
                self._sleep(number)
        if chance(self._random, 0.2):
            self._cluster.crash(number)  # the commit has been sent to some only
        elif chance(self._random, 0.4):
            self._after(0.2 * self._random.random(), lambda: self._cluster.crash(number))


def run(seed: int, trace: Callable[[str], None] | None = None) -> Outcome:
    """One history: faults, calm, and all invariants; raises `Violation`."""
    cluster = Cluster(seed, trace=trace)
    faults = PlayedFaults(cluster)
    for number in range(cluster.size):
        cluster.start(number)
    cluster.run_until(cluster.schedule.formed_by_s)
    resets = cluster.invariants.resets
    cluster.run_until(cluster.schedule.calm_from_s)
    if faults.crashes_only and cluster.invariants.resets > resets:
        raise Violation("a member fell out of its view although only others have crashed")
    cluster.calm()
    return cluster.settle()
