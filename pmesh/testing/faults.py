"""What goes wrong, at seeded times: crashes, sleeps, cuts, closed connections, lost trainers."""

from collections.abc import Callable

from pmesh.testing.agents import Agent
from pmesh.testing.cluster import CALM_FROM_S, FAULTS_UNTIL_S, Cluster, Outcome
from pmesh.testing.trainers import chance

AIMED = 0.2
"""The share of commits that a fault is aimed at: a half-sent commit is the hardest case."""

AIMED_FROM_S = 3.0
"""Before that most clusters have no common view yet to break."""


class Faults:
    """Plays faults on a cluster until `FAULTS_UNTIL_S`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._random = cluster.random
        self._crashes_only = chance(self._random, 0.2)
        self._per_second = self._random.choice([0.2, 0.5, 1.0])
        self._kinds: dict[Callable[[int], None], float] = {
            self._crash: 0.25,
            self._sleep: 0.15,
            self._partition: 0.15,
            self._cut: 0.15,
            self._drop: 0.1,
            self._kill_trainer: 0.1,
            self._heal: 0.1,
        }
        cluster.on_start = self._watch
        self._after(self._random.random() * 8, self._strike)

    def _watch(self, agent: Agent) -> None:
        agent.before_commit = self._strike_at_commit

    def _after(self, delay_s: float, what: Callable[[], None]) -> None:
        self._cluster.timeline.after(delay_s, what)

    def _over(self) -> bool:
        return self._cluster.timeline.now > FAULTS_UNTIL_S

    def _strike(self) -> None:
        if self._over():
            return
        self._after(self._random.expovariate(self._per_second), self._strike)
        kinds = [self._crash] if self._crashes_only else list(self._kinds)
        (kind,) = self._random.choices(kinds, [self._kinds[kind] for kind in kinds])
        number = self._random.randrange(self._cluster.size)
        if number in self._cluster.agents:
            kind(number)

    def _crash(self, number: int) -> None:
        self._cluster.crash(number)
        if not self._crashes_only and chance(self._random, 0.7):
            self._after(self._random.random() * 3, lambda: self._cluster.start(number))

    def _sleep(self, number: int) -> None:
        duration_s = self._random.choice([0.3, 0.9, 1.5, 4.0])
        self._cluster.note(number, f"sleeps for {duration_s} s")
        self._cluster.network.freeze(number)
        self._after(duration_s, lambda: self._cluster.network.thaw(number))

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

    def _drop(self, number: int) -> None:
        peer = self._peer_of(number)
        self._cluster.note(number, f"loses the connection with {peer}")
        self._cluster.agents[number].drop(peer)

    def _kill_trainer(self, number: int) -> None:
        trainers = self._cluster.agents[number].trainers
        if trainers:
            self._cluster.note(number, "loses a trainer")
            self._random.choice(trainers).leave()

    def _heal(self, number: int) -> None:
        self._cluster.note(number, "is healed, as all others")
        self._cluster.network.heal()

    def _peer_of(self, number: int) -> int:
        return (number + self._random.randrange(1, self._cluster.size)) % self._cluster.size

    def _strike_at_commit(self, agent: Agent) -> None:
        number, network = agent.number, self._cluster.network
        early = self._cluster.timeline.now < AIMED_FROM_S
        if early or self._over() or not chance(self._random, AIMED):
            return
        if not self._crashes_only:
            for peer in range(self._cluster.size):
                if peer != number and chance(self._random, 0.5):
                    self._cluster.note(number, f"is cut off from {peer}, about to commit")
                    network.cut(number, peer)
            if chance(self._random, 0.3):
                self._sleep(number)
        if chance(self._random, 0.5):
            self._after(0.2 * self._random.random(), lambda: self._cluster.crash(number))


def run(seed: int, trace: Callable[[str], None] | None = None) -> Outcome:
    """One history: faults, calm, and all invariants; raises `Violation`."""
    cluster = Cluster(seed, trace=trace)
    Faults(cluster)
    for number in range(cluster.size):
        cluster.start(number)
    cluster.run_until(CALM_FROM_S)
    cluster.calm()
    return cluster.settle()
