"""A virtual cluster: agents on a seeded network, faults for a while, and then calm."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from pmesh.core.topology.graph import UNKNOWN
from pmesh.core.values import Roster
from pmesh.core.views.bound import agreement_bound_s
from pmesh.core.views.quorum import has_majorities, needed_voters
from pmesh.errors import ProtocolError
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, TrainerId
from simulation.agents import SimulatedAgent
from simulation.drawing import (
    draw_conditions,
    draw_edges,
    draw_habits,
    draw_repeats,
    draw_size,
    draw_slow_conditions,
    remeasure,
)
from simulation.healing import Healing
from simulation.invariants import Invariants, Violation
from simulation.links import Message
from simulation.network import Conditions, Network, Timeline
from simulation.trainers import Habits


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When things happen in a history."""

    formed_by_s: float
    """By then most clusters have a common view; in most histories nothing has gone wrong before."""
    faults_until_s: float
    calm_from_s: float
    round_trip_s: float
    """What messages and their answers take, as a rule."""
    bounds: int
    """How many times the bound on agreement it may take until all is well."""

    def settled_by_s(self, members: int) -> float:
        """By then all members agree on one view, and their jobs get on."""
        return (
            self.calm_from_s + self.bounds * agreement_bound_s(members, self.round_trip_s) + JOBS_S
        )


JOBS_S = 20.0
"""Jobs need this beyond the agreement: ops of 4 s each, a stopped trainer 3, an enlistment's 6,
trainers back after 1."""

USUAL = Schedule(formed_by_s=3.0, faults_until_s=16.0, calm_from_s=17.0, round_trip_s=0.4, bounds=1)

SLOW = Schedule(formed_by_s=10.0, faults_until_s=40.0, calm_from_s=45.0, round_trip_s=8.0, bounds=4)
"""The same where messages take up to seconds. A segment that is lost again and again makes a peer
fall silent for so long that it is given up. Then the bound counts anew."""

SLOW_SHARE = 4
"""One seed of so many has a slow network."""

CHANGES = 4
"""How often the bandwidths change during the faults (V13)."""

AHEAD = 4
"""After the faults each job must end this many more ops at all its ranks."""

Progress = dict[tuple[JobName, Epoch, TrainerId, Member], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run has seen."""

    simulated_s: float
    settled_s: float
    """How long after the last fault all was well."""
    installs: int
    ops_ended: int
    ops_failed: int
    entered: int
    """How many trainers have entered a job that was running."""
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
        slow = conditions is None and seed % SLOW_SHARE == SLOW_SHARE - 1
        self.schedule = SLOW if slow else USUAL
        self.random = Random(seed)  # noqa: S311 - the seed replays the history
        self.timeline = Timeline()
        self.size = size or draw_size(self.random, slow=slow)
        draw = draw_slow_conditions if slow else draw_conditions
        self.conditions = conditions or draw(self.random)
        self.network: Network[Message] = Network(self.timeline, self.random, self.conditions)
        self.agents: dict[int, SimulatedAgent] = {}
        self.invariants = Invariants(
            self.timeline,
            lambda: (rank for agent in self.agents.values() for rank in agent.jobs.ranks),
        )
        self.on_start: Callable[[SimulatedAgent], None] | None = None
        """Called for each agent that starts."""
        self._trace = trace
        drawn = draw_habits(self.random, self.size, until_s=self.schedule.calm_from_s, slow=slow)
        drawn = draw_repeats(Random(seed), drawn)  # noqa: S311 - the seed replays the history
        self._habits = [(habits,)] * self.size if habits else drawn
        self.edges = draw_edges(self.random, self.size)
        """By host: what it measures of the way to each other host; agents read it at each tick."""
        if self.edges[0].get(1, UNKNOWN) != UNKNOWN:
            again = Random(seed)  # noqa: S311 - of its own, so that all else stays as it was
            for number in range(1, CHANGES + 1):
                at_s = self.schedule.faults_until_s * number / CHANGES
                self.timeline.after(at_s, remeasure, again, self.edges)
        self.healing = Healing()
        self._asleep_since: dict[int, float] = {}

    def start(self, number: int) -> None:
        """Start a node's agent, if none runs."""
        if number in self.agents:
            return
        member = Member(node_of(number), Incarnation(self.random.getrandbits(62) + 1))
        self.note(number, f"starts as {member.incarnation % 1000}")
        self.agents[number] = SimulatedAgent(
            number,
            member,
            timeline=self.timeline,
            network=self.network,
            random=self.random,
            invariants=self.invariants,
            healing=self.healing,
            habits=self._habits[number],
            peers=self.edges[number],
            note=self.note,
        )
        if self.on_start is not None:
            self.on_start(self.agents[number])

    def crash(self, number: int) -> None:
        """Kill a node's agent, and the trainers with it."""
        agent = self.agents.pop(number, None)
        if agent is not None:
            self._asleep_since.pop(number, None)
            self.note(number, "crashes")
            agent.crash()

    def sleep(self, number: int) -> None:
        """A node's agent stands still, and its trainers with it."""
        self._asleep_since.setdefault(number, self.timeline.now)
        self.network.freeze(number)

    def wake(self, number: int) -> None:
        """It goes on, and reads what has come meanwhile."""
        since = self._asleep_since.pop(number, None)
        agent = self.agents.get(number)
        if since is not None and agent is not None:
            self.note(number, "wakes up")
            agent.wake(self.timeline.now - since)

    def note(self, number: int, event: str) -> None:
        """A line of the trace."""
        if self._trace is not None:
            self._trace(f"{self.timeline.now:9.4f} node {number} {event}")

    def calm(self) -> None:
        """All faults end; every node runs."""
        self.healing.begin(self.timeline.now)
        self.network.conditions = self.conditions.calm
        self.network.heal()
        for number in range(self.size):
            self.wake(number)
            self.start(number)

    def run_until(self, end: float) -> None:
        """Let simulated time pass; what no honest peer would send is a violation too."""
        try:
            self.timeline.run_until(end)
        except ProtocolError as e:
            raise Violation(f"an honest message is refused: {e}") from e

    def settle(self) -> Outcome:
        """After `calm`: until one view holds everyone and each job gets on; else a Violation."""
        goals: Progress | None = None
        while self.timeline.now < self.schedule.settled_by_s(self.size):
            self.run_until(self.timeline.now + 0.5)
            progress, agreed = self.progress(), self.is_one_view()
            self.healing.check(agreed=agreed, members=self.size, now=self.timeline.now)
            if not agreed or self._who_waits():
                continue  # a job that has lost its quorum needs a view for each op that times out
            if goals is None or goals.keys() != progress.keys():
                goals = {key: mark + AHEAD for key, mark in progress.items()}
            elif all(mark >= goals[key] for key, mark in progress.items()):
                self.invariants.finish()
                return self._outcome()
        standing = "; ".join(map(_standing, self.agents.values()))
        raise Violation(f"no convergence: {self._who_waits()} wait; {standing}")

    def is_one_view(self) -> bool:
        """Whether all live agents are members of the view that all have installed."""
        live = list(self.agents.values())
        view = live[0].state.view
        return len(view.seats) == len(live) and all(
            agent.state.view.epoch == view.epoch and agent.state.flushed_at is None
            for agent in live
        )

    def progress(self) -> Progress:
        """Of each rank that has its trainer and may go on: the op up to which all have ended."""
        return {
            (rank.roster.job, rank.roster.born, rank.id, rank.trainer.member): rank.ledger.ended
            for agent in self.agents.values()
            for rank in agent.jobs.ranks
            if rank.leaving is None and not self._has_lost_its_quorum(rank.roster)
        }

    def _who_waits(self) -> list[str]:
        """Trainers that have not entered yet, but where the job itself stands still for good."""
        view = next(iter(self.agents.values())).state.view
        return [
            f"a trainer of {trainer.habits.job} on {agent.name}"
            for agent in self.agents.values()
            for trainer in agent.trainers
            if trainer.waits
            and not self._is_stuck(view.roster_of(trainer.habits.job), trainer.habits)
        ]

    def _is_stuck(self, roster: Roster | None, habits: Habits) -> bool:
        if roster is not None:
            return self._has_lost_its_quorum(roster)
        employed = sum(t.habits.job == habits.job for a in self.agents.values() for t in a.trainers)
        return employed < habits.wait_for

    def _has_lost_its_quorum(self, roster: Roster) -> bool:
        """V10: who was restarted has no vote, so a job may have to wait for ever."""
        if roster.quorate:
            return False
        known = [primary for agent in self.agents.values() for primary in agent.state.primaries]
        if any(
            (primary.job, primary.born) == (roster.job, roster.born)
            and primary.epoch > roster.primary.epoch
            for primary in known
        ):
            return True
        voting = {agent.state.me for agent in self.agents.values()}
        return not has_majorities(voting, needed_voters(roster, known))

    def _outcome(self) -> Outcome:
        return Outcome(
            simulated_s=self.timeline.now,
            settled_s=self.timeline.now - self.schedule.calm_from_s,
            installs=self.invariants.installs,
            ops_ended=self.invariants.ops_ended,
            ops_failed=self.invariants.ops_failed,
            entered=self.invariants.entered,
            messages=self.network.delivered,
        )


def _standing(agent: SimulatedAgent) -> str:
    state = agent.state
    jobs = ",".join(
        f"{rank.roster.job}#{rank.roster.number}:{rank.id}{'F' * bool(rank.fences)}"
        f"({rank.ledger.ended},{rank.ledger.started}{rank.op and rank.op.phase})"
        for rank in agent.jobs.ranks
    )
    return (
        f"{agent.name} {state.view.epoch.counter}/{len(state.view.seats)}"
        f" promised {state.promised.counter} flushed {state.flushed_at} {jobs}"
    )


def node_of(number: int) -> NodeId:
    """The node id of a simulated host."""
    return NodeId(bytes(30) + number.to_bytes(2))
