"""Histories aimed at ops that ranks run by themselves, before their agents know of it."""

import math

from pmesh.core.links.health import WIRED
from pmesh.core.wire.calls import Call
from pmesh.ids import JobName, OpNumber
from simulation import ops
from simulation.agents import DOUBT_S, HEARTBEAT_S
from simulation.cluster import Cluster
from simulation.links import Message
from simulation.network import Conditions
from simulation.ranks import SimulatedRank
from simulation.repeats import HELD
from simulation.trainers import Habits, SimulatedTrainer
from tests.simulation.histories import JOB, agent_of, by_seniority, ranks_of, run_until

BARRIER = Call("barrier", "float32", ())
ONE = OpNumber(1)
LONG_S = 10.0 / HELD
"""An op with this timeout is left to the thread for long."""


def _cluster_at_rest() -> Cluster:
    """Three ranks that have ended op 0, and may run the next one by themselves."""
    habits = Habits(job=JOB, wait_for=3, think_s=1e6, repeats=True)  # we call in their place
    cluster = Cluster(0, size=3, conditions=Conditions(), habits=habits)
    for number in range(3):
        cluster.start(number)
    run_until(cluster, lambda: cluster.is_one_view() and len(cluster.progress()) == 3, 10.0)
    ranks = ranks_of(cluster).values()
    for rank in ranks:
        ops.call_op(rank, BARRIER)
    run_until(cluster, lambda: all(_serves(rank) for rank in ranks), 1.0)
    cluster.run_until(cluster.timeline.now + 2 * HEARTBEAT_S)
    assert all(_serves(rank) for rank in ranks)
    return cluster


def _serves(rank: SimulatedRank) -> bool:
    return rank.repeats is not None and rank.repeats.serves


def what_ends_while_its_rank_is_recalled_is_in_the_report() -> None:
    """V3, O2: one rank has all tokens and has not read them when a view is agreed on."""
    cluster = _cluster_at_rest()
    ring = sorted(ranks_of(cluster).values(), key=lambda rank: rank.rank or 0)
    ahead, behind, lost = ring
    assert ahead.repeats is not None
    ahead.repeats.read_after_s = math.inf
    host = agent_of(cluster, behind).number

    def swallow(_from: int, to: int, channel: str, _message: Message) -> bool:
        return channel != "link" and to == host

    cluster.network.swallow = swallow
    for rank in ring:
        ops.call_op(rank, BARRIER, LONG_S)
    run_until(cluster, lambda: len(ahead.tokens.get(ONE, ())) == 3, 1.0)
    assert ONE not in ahead.ends
    assert ahead.ledger.started == 0
    cluster.network.swallow = None
    agent_of(cluster, lost).trainers[0].die()  # and no lane breaks
    run_until(cluster, lambda: ONE in behind.ends, 2 * WIRED.gone_after_s)
    assert behind.ends[ONE].outcome == ahead.ends[ONE].outcome


def who_has_slept_ends_nothing_by_itself() -> None:
    """V8: it has what it needs when it wakes up, and hears nothing from the others yet."""
    cluster = _cluster_at_rest()
    sleeper = by_seniority(cluster)[2]
    (rank,) = sleeper.jobs.ranks
    others = [other for other in ranks_of(cluster).values() if other is not rank]
    cluster.network.swallow = lambda _from, to, channel, _message: (
        channel == "link" and to == sleeper.number
    )
    cluster.sleep(sleeper.number)
    for other in others:
        ops.call_op(other, BARRIER)
    cluster.run_until(cluster.timeline.now + DOUBT_S + HEARTBEAT_S)
    cluster.wake(sleeper.number)
    cluster.run_until(cluster.timeline.now + 2 * HEARTBEAT_S)  # it looks for sleep, and finds none
    ops.call_op(rank, BARRIER)
    cluster.run_until(cluster.timeline.now + HEARTBEAT_S)
    assert ONE not in rank.ends
    cluster.network.swallow = None
    run_until(cluster, lambda: ONE in rank.ends, 1.0)


def who_is_recalled_before_the_last_one_has_come_has_not_begun() -> None:
    """V3: an op of ranks that are all at one agent ends for all of them at once, or for none."""
    cluster = Cluster(0, size=1, habits=Habits(job=JobName("other"), wait_for=9))
    cluster.start(0)
    (agent,) = cluster.agents.values()
    habits = Habits(job=JOB, wait_for=2, think_s=1e6, repeats=True)  # we call in their place
    for _ in range(2):
        SimulatedTrainer(cluster.timeline, cluster.random, agent, agent.jobs, habits)
    run_until(cluster, lambda: len(agent.jobs.ranks) == 2, 10.0)
    early, late = ranks = agent.jobs.ranks
    for rank in ranks:
        ops.call_op(rank, BARRIER)
    run_until(cluster, lambda: all(_serves(rank) for rank in ranks), 1.0)
    for op in (1, 2):
        ops.call_op(early, BARRIER, LONG_S)
        cluster.run_until(cluster.timeline.now + HEARTBEAT_S)
        if op == 1:
            early.recall()
        assert OpNumber(op) not in early.ends
        ops.call_op(late, BARRIER, LONG_S)
        cluster.run_until(cluster.timeline.now + HEARTBEAT_S)
        assert early.ends[OpNumber(op)] == late.ends[OpNumber(op)]
        assert [rank.op for rank in ranks] == [None, None]
        assert all(_serves(rank) for rank in ranks)
