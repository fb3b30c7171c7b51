"""Histories aimed at the rules for links: V5, V11, V12 and V13."""

from pmesh.core.links.health import LONGEST_SILENCE_S, WIRED
from pmesh.core.values import Verdict
from pmesh.core.wire.views import MeasuredEdge
from pmesh.ids import TrainerId
from simulation.agents import SimulatedAgent
from simulation.cluster import Cluster
from simulation.network import Conditions
from simulation.trainers import Habits
from tests.simulation.histories import JOB, by_seniority, formed_cluster, ranks_of, run_until


def cut_to_a_chain(cluster: Cluster, *chain: SimulatedAgent) -> None:
    """Each can only reach its neighbours in the chain; of four, nobody forwards from end to end."""
    for place, agent in enumerate(chain):
        others = [other.number for other in chain[place + 2 :]]
        cluster.network.partition([agent.number], others)


def two_whom_nobody_can_connect_are_not_in_one_view() -> None:
    """V5: both hear the leader, and could go on with it for ever without an op ending."""
    cluster = formed_cluster(4)
    leader, a, between, b = by_seniority(cluster)
    cut_to_a_chain(cluster, a, leader, between, b)
    cluster.run_until(cluster.timeline.now + LONGEST_SILENCE_S + 2 * WIRED.gone_after_s)
    for agent in cluster.agents.values():
        assert not {a.state.me, b.state.me} <= set(agent.state.view.members)
    for agent in (leader, between):
        assert len(agent.state.view.members) == 3


def two_who_cannot_reach_each_other_stay_in_one_view_with_a_third() -> None:
    """V5: the third forwards, so that nobody is lost, and ops end as before."""
    cluster = formed_cluster(3)
    _, a, b = by_seniority(cluster)
    view, ended = a.state.view, min(cluster.progress().values())
    cluster.network.partition([a.number], [b.number])
    cluster.run_until(cluster.timeline.now + LONGEST_SILENCE_S + WIRED.gone_after_s)
    assert cluster.is_one_view()
    assert set(a.state.view.members) == set(view.members)
    assert cluster.invariants.resets == 0
    assert min(cluster.progress().values()) > ended + 10


def who_starts_behind_a_wall_joins_over_a_third() -> None:
    """V5: a newcomer reaches one member of two, which forwards."""
    habits = Habits(job=JOB, wait_for=3, think_s=0.3)
    cluster = Cluster(0, size=3, conditions=Conditions(), habits=habits)
    cluster.network.partition([0], [2])
    for number in range(3):
        cluster.start(number)
    run_until(cluster, lambda: cluster.is_one_view() and len(cluster.progress()) == 3, 20.0)
    cluster.crash(1)
    run_until(
        cluster, lambda: all(len(a.state.view.seats) == 1 for a in cluster.agents.values()), 20.0
    )


def orders_of(
    cluster: Cluster, until_s: float, *, slow: int, fast: int
) -> list[tuple[TrainerId, ...]]:
    """The orders that a job's four ranks have in turn, while ever other edges are slow.

    Two edges that have no end in common are slow at a time, so the best ring does without them.
    """
    orders, measurement = list[tuple[TrainerId, ...]](), 0
    while cluster.timeline.now < until_s:
        for a, row in enumerate(cluster.edges):
            for b in row:
                row[b] = MeasuredEdge(500, slow if a ^ b == 1 + measurement % 3 else fast)
        measurement += 1
        cluster.run_until(cluster.timeline.now + 3.0)
        order = ranks_of(cluster)[TrainerId(0)].roster.ids
        if order not in orders[-1:]:
            orders.append(order)
    return orders


def noise_does_not_change_the_ring() -> None:
    """V13: each edge is now slower and now faster than the others, by a fifth."""
    cluster = formed_cluster(4)
    assert len(orders_of(cluster, 120.0, slow=100, fast=120)) == 1


def a_ring_changes_once_a_minute_at_most() -> None:
    """V13: every three seconds other edges are ten times as fast as the rest."""
    cluster = formed_cluster(4)
    orders = orders_of(cluster, 250.0, slow=100, fast=1000)
    assert 1 < len(orders) <= 1 + 250 // 60 + 1
    failed = [end for rank in ranks_of(cluster).values() for end in rank.ends.values()]
    assert not any(isinstance(end.outcome, Verdict) for end in failed)


def agreements_end_where_messages_take_seconds() -> None:
    """V11: each deadline of a good network is over before an answer can come."""
    habits = Habits(job=JOB, wait_for=9)  # no job begins: nothing but the joining changes the view
    cluster = Cluster(0, size=3, conditions=Conditions(latency_s=2.0), habits=habits)
    for number in range(3):
        cluster.start(number)
    run_until(cluster, cluster.is_one_view, 60.0)


def agreements_end_where_messages_outlast_a_silence() -> None:
    """V12: a link that is given up must not begin again with the limits of a cable."""
    habits = Habits(job=JOB, wait_for=9)  # no job begins: nothing but the joining changes the view
    cluster = Cluster(0, size=4, conditions=Conditions(latency_s=6.0), habits=habits)
    for number in range(4):
        cluster.start(number)
    run_until(cluster, cluster.is_one_view, 120.0)  # without the rule more than 200 s


def who_has_not_read_a_proposal_is_not_left_out() -> None:
    """V11: the way to one member stands still for longer than its answer may take."""
    cluster = formed_cluster(3)
    leader, other, late = by_seniority(cluster)
    cluster.network.cut(leader.number, late.number)
    other.trainers[0].die()  # a reason for a view
    cluster.run_until(cluster.timeline.now + 1.8)
    cluster.network.mend(leader.number, late.number)
    cluster.run_until(cluster.timeline.now + 1.0)
    for agent in cluster.agents.values():
        assert len(agent.state.view.seats) == len(cluster.agents)
    assert cluster.invariants.resets == 0


def who_is_silent_to_one_and_not_to_another_is_not_lost() -> None:
    """V12: the way between two members stands still for twice the usual silence, and mends."""
    cluster = formed_cluster(4)
    leader, a, between, b = by_seniority(cluster)
    cut_to_a_chain(cluster, a, leader, between, b)
    cluster.run_until(cluster.timeline.now + 2 * WIRED.gone_after_s)
    assert all(len(agent.state.view.seats) == 4 for agent in cluster.agents.values())
    cluster.network.heal()
    cluster.run_until(cluster.timeline.now + LONGEST_SILENCE_S)
    assert all(len(agent.state.view.seats) == 4 for agent in cluster.agents.values())
