"""A virtual cluster: agents on a seeded network, faults for a while, and then calm."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from pmesh.errors import ProtocolError
from pmesh.ids import Incarnation, JobName, Member
from pmesh.testing.agents import Agent, node_of
from pmesh.testing.invariants import Invariants, Violation
from pmesh.testing.network import Conditions, Network
from pmesh.testing.timeline import Timeline
from pmesh.testing.trainers import Habits, chance

FAULTS_UNTIL_S = 16.0
CALM_FROM_S = 17.0
SETTLED_BY_S = 30.0
"""Long enough for every deadline in a row after the last fault: gone 2, flushes 1 each with
skips of 1, joins pairwise, an op's 4, trainers back after 1. The
longest in 3,000 seeds took 8 s."""

AHEAD = 4
"""After the faults each job must end this many more ops at all its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run has seen."""

    simulated_s: float
    settled_s: float
    """How long after the last fault all was well."""
    installs: int
    ops_ended: int
    ops_failed: int
    messages: int


class Cluster:
    """Agents 0 to n - 1, each with its own trainers; the seed decides everything."""

    def __init__(
        self,
        seed: int,
        *,
        size: int | None = None,
        conditions: Conditions | None = None,
        habits: Habits | None = None,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        """What is not given is drawn; `habits` are those of one trainer on each node."""
        self.random = Random(seed)  # noqa: S311 - the seed replays the history
        self.timeline = Timeline()
        self.size = size or self.random.choice([2, 3, 3, 4, 4, 5])
        self.conditions = conditions or draw_conditions(self.random)
        self.network = Network(self.timeline, self.random, self.conditions)
        self.invariants = Invariants(
            lambda: (job for agent in self.agents.values() for job in agent.jobs.values())
        )
        self.agents: dict[int, Agent] = {}
        self.on_start: Callable[[Agent], None] | None = None
        """Called for each agent that starts."""
        self._trace = trace
        drawn = draw_habits(self.random, self.size)
        self._habits = [(habits,)] * self.size if habits else drawn
        self._round_trips = draw_round_trips(self.random, self.size)

    def start(self, number: int) -> None:
        """Start a node's agent, if none runs."""
        if number in self.agents:
            return
        member = Member(node_of(number), Incarnation(self.random.getrandbits(62) + 1))
        self.note(number, f"starts as {member.incarnation % 1000}")
        self.agents[number] = Agent(
            number,
            member,
            timeline=self.timeline,
            network=self.network,
            random=self.random,
            invariants=self.invariants,
            habits=self._habits[number],
            peers={n: rtt for n, rtt in enumerate(self._round_trips[number]) if n != number},
            note=self.note,
        )
        if self.on_start is not None:
            self.on_start(self.agents[number])

    def crash(self, number: int) -> None:
        """Kill a node's agent, and the trainers with it."""
        agent = self.agents.pop(number, None)
        if agent is not None:
            self.note(number, "crashes")
            agent.crash()

    def note(self, number: int, event: str) -> None:
        """A line of the trace."""
        if self._trace is not None:
            self._trace(f"{self.timeline.now:9.4f} node {number} {event}")

    def calm(self) -> None:
        """All faults end; every node runs."""
        self.network.conditions = Conditions(latency_s=self.conditions.latency_s)
        self.network.heal()
        for number in range(self.size):
            self.network.thaw(number)
            self.start(number)

    def run_until(self, end: float) -> None:
        """Let simulated time pass; what no honest peer would send is a violation too."""
        try:
            self.timeline.run_until(end)
        except ProtocolError as e:
            raise Violation(f"an honest message is refused: {e}") from e

    def settle(self) -> Outcome:
        """After `calm`: until one view holds everyone and each job gets on; else a Violation."""
        goals: dict[tuple[JobName, object, int], int] | None = None
        while self.timeline.now < SETTLED_BY_S:
            self.run_until(self.timeline.now + 0.5)
            if not self.is_one_view():
                goals = None
            elif goals is None or goals.keys() != self.progress().keys():
                goals = {key: mark + AHEAD for key, mark in self.progress().items()}
            elif all(mark >= goals[key] for key, mark in self.progress().items()):
                return self._outcome()
        raise Violation("no convergence: " + "; ".join(map(_standing, self.agents.values())))

    def is_one_view(self) -> bool:
        """Whether all live agents are members of the view that all have installed."""
        live = list(self.agents.values())
        view = live[0].state.view
        return len(view.seats) == len(live) and all(
            agent.state.view.epoch == view.epoch and agent.state.flushed_at is None
            for agent in live
        )

    def progress(self) -> dict[tuple[JobName, object, int], int]:
        """Of each rank of each job that has its trainer: the op up to which all have ended."""
        return {
            (job.roster.job, job.roster.born, rank): ledger.ended
            for agent in self.agents.values()
            for job in agent.jobs.values()
            for rank, ledger in job.ledgers.items()
            if job.trainers[rank].alive
        }

    def _outcome(self) -> Outcome:
        return Outcome(
            simulated_s=self.timeline.now,
            settled_s=self.timeline.now - CALM_FROM_S,
            installs=self.invariants.installs,
            ops_ended=self.invariants.ops_ended,
            ops_failed=self.invariants.ops_failed,
            messages=self.network.delivered,
        )


def draw_conditions(random: Random) -> Conditions:
    """A network between a quiet switch and a bad Wi-Fi."""
    return Conditions(
        latency_s=random.choice([0.01, 0.05, 0.2]),
        late_chance=random.choice([0.0, 0.05]),
        loss=random.choice([0.0, 0.0, 0.02, 0.1]),
        repeats=random.choice([0.0, 0.0, 0.05]),
    )


def draw_habits(random: Random, size: int) -> list[tuple[Habits, ...]]:
    """One or two jobs, on all or some of the nodes, now and then two trainers of one on a node."""
    habits: list[list[Habits]] = [[] for _ in range(size)]
    for name in ("digits", "words")[: random.choice([1, 1, 2])]:
        hosts = [n for n in range(size) if chance(random, 0.8)] or [0]
        hosts += [hosts[0]] * chance(random, 0.2)
        wait_for = random.choice([len(hosts), max(1, len(hosts) - 1), min(2, len(hosts))])
        mistakes = random.choice([0.0, 0.0, 0.02, 0.3])
        think_s = random.choice([0.02, 0.1, 0.3])
        for host in hosts:
            habit = Habits(
                job=JobName(name),
                wait_for=wait_for,
                think_s=think_s,
                in_flight=random.choice([1, 2]),
                mistakes=mistakes,
                pauses=random.choice([0.0, 0.0, 0.02]),
                until_s=CALM_FROM_S,
                ops=random.choice([1000, 30]),
            )
            habits[host].append(habit)
    return [tuple(theirs) for theirs in habits]


def draw_round_trips(random: Random, size: int) -> list[list[int]]:
    """Microseconds; equal, or so that the ring is not the order of the node ids."""
    if chance(random, 0.7):  # planning costs time
        return [[0] * size for _ in range(size)]
    trips = [[random.choice([300, 1000, 5000]) for _ in range(size)] for _ in range(size)]
    return [[trips[min(a, b)][max(a, b)] for b in range(size)] for a in range(size)]


def _standing(agent: Agent) -> str:
    state = agent.state
    jobs = ",".join(
        f"{job.roster.job}#{job.roster.number}{'F' * job.fenced}"
        f"{[(ledger.ended, ledger.started) for ledger in job.ledgers.values()]}"
        for job in agent.jobs.values()
    )
    return (
        f"{agent.name} {state.view.epoch.counter}/{len(state.view.seats)}"
        f" promised {state.promised.counter} flushed {state.flushed_at} {jobs}"
    )
