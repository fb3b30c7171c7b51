"""What a seed draws for a history: the network, the jobs and how their trainers behave."""

from dataclasses import replace
from random import Random

from msgspec import structs

from pmesh.core.topology.graph import UNKNOWN
from pmesh.core.values import Terms
from pmesh.core.wire.views import MeasuredEdge
from pmesh.ids import JobName
from simulation.network import Conditions
from simulation.ops import OP_TIMEOUT_S
from simulation.trainers import REPEATED_KINDS, Habits, chance

SLOW_OP_TIMEOUT_S = 30.0
"""On a slow network a ring of four and two view changes take that long."""


MOST_TOGETHER = 4
"""So many trainers of one job on a node."""


def draw_size(random: Random, *, slow: bool) -> int:
    """How many nodes: mostly a few, because the cost of a history grows with the square."""
    if slow:  # its history is several times as long
        return random.choice([2, 3, 3, 4])
    return random.choice([2, 3, 3, 3, 4, 4, 4, 5, 5, 6, 7, 9])


def draw_slow_conditions(random: Random) -> Conditions:
    """A network on which messages take up to seconds, and segments are lost."""
    return Conditions(
        latency_s=random.choice([0.01, 0.2]),
        slowest_s=random.choice([0.5, 1.0, 2.0]),
        segment_loss=random.choice([0.0, 0.01, 0.1]),
    )


def draw_conditions(random: Random) -> Conditions:
    """A network between a quiet switch and a bad Wi-Fi."""
    return Conditions(
        latency_s=random.choice([0.01, 0.05, 0.2]),
        late_chance=random.choice([0.0, 0.05]),
        loss=random.choice([0.0, 0.0, 0.02, 0.1]),
        repeats=random.choice([0.0, 0.0, 0.05]),
    )


def draw_habits(
    random: Random, size: int, *, until_s: float, slow: bool
) -> list[tuple[Habits, ...]]:
    """One or two jobs, on all or some of the nodes, now and then two trainers of one on a node."""
    habits: list[list[Habits]] = [[] for _ in range(size)]
    for name in ("digits", "words")[: random.choice([1, 1, 2])]:
        hosts = [n for n in range(size) if chance(random, 0.8)] or [0]
        hosts += [hosts[0]] * chance(random, 0.2)
        wait_for = random.choice([len(hosts), max(1, len(hosts) - 1), min(2, len(hosts))])
        terms = draw_terms(random, len(hosts))
        mistakes = random.choice([0.0, 0.0, 0.02, 0.3])
        think_s = random.choice([0.02, 0.1, 0.3])
        for host in hosts:
            habit = Habits(
                job=JobName(name),
                wait_for=wait_for,
                terms=terms,
                comes_back=chance(random, 0.7),
                think_s=think_s,
                mistakes=mistakes,
                pauses=0.0 if slow else random.choice([0.0, 0.0, 0.02]),
                until_s=until_s,
                ops=random.choice([1000, 30]),
                op_timeout_s=SLOW_OP_TIMEOUT_S if slow else OP_TIMEOUT_S,
            )
            habits[host].append(habit)
    return [tuple(theirs) for theirs in habits]


def draw_repeats(random: Random, habits: list[tuple[Habits, ...]]) -> list[tuple[Habits, ...]]:
    """In half of the jobs the trainers call the same again and again, and most agents mind it."""
    repeating = {job for job in ("digits", "words") if chance(random, 0.5)}
    drawn = [
        tuple(
            replace(each, kinds=REPEATED_KINDS, repeats=chance(random, 0.8))
            if each.job in repeating
            else each
            for each in theirs
        )
        for theirs in habits
    ]
    for job in sorted(repeating & {each.job for theirs in drawn for each in theirs}):
        if chance(random, 0.2):
            drawn = _put_together(random, drawn, job)
    return drawn


def _put_together(
    random: Random, habits: list[tuple[Habits, ...]], job: str
) -> list[tuple[Habits, ...]]:
    """All trainers of a job on one node, and not too many."""
    theirs = [each for here in habits for each in here if each.job == job][:MOST_TOGETHER]
    terms = structs.replace(theirs[0].terms, min_ranks=min(theirs[0].terms.min_ranks, len(theirs)))
    wait_for = min(theirs[0].wait_for, len(theirs))
    placed = [tuple(each for each in here if each.job != job) for here in habits]
    placed[random.randrange(len(habits))] += tuple(
        replace(each, wait_for=wait_for, terms=terms) for each in theirs
    )
    return placed


def draw_terms(random: Random, trainers: int) -> Terms:
    """What the trainers of a job ask for."""
    return Terms(
        min_ranks=random.choice([1, 1, 1, max(1, trainers - 1)]),
        on_loss=random.choice(["continue", "continue", "continue", "raise"]),
        quorum=random.choice(["any", "any", "majority"]),
    )


def draw_edges(random: Random, size: int) -> list[dict[int, MeasuredEdge]]:
    """All alike, or so that the ring is not the order of the node ids: what each measures."""
    if chance(random, 0.7):  # planning costs time
        return [{b: UNKNOWN for b in range(size) if b != a} for a in range(size)]
    trips = [[random.choice([300, 1000, 5000]) for _ in range(size)] for _ in range(size)]
    edges = [{b: MeasuredEdge(trips[a][b]) for b in range(size) if b != a} for a in range(size)]
    remeasure(Random(trips[0][0]), edges)  # noqa: S311 - the seed replays the history
    return edges


def remeasure(random: Random, edges: list[dict[int, MeasuredEdge]]) -> None:
    """Each agent measures another bandwidth on each of its edges, in place."""
    for row in edges:
        for b, edge in row.items():
            row[b] = MeasuredEdge(edge.round_trip_us, random.choice([10, 100, 1000]))
