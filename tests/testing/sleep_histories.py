"""Histories aimed at the rules for whoever has slept: V2 and V8."""

from pmesh.core.messages import Call
from pmesh.ids import OpNumber
from pmesh.testing import ops
from pmesh.testing.agents import DOUBT_S, GONE_AFTER_S, Agent
from pmesh.testing.cluster import Cluster
from pmesh.testing.lane_messages import OpResult
from pmesh.testing.network import Conditions
from pmesh.testing.trainers import Habits
from tests.testing.histories import JOB, by_seniority, formed_cluster, ranks_of, run_until


def who_slept_through_its_expulsion_ends_nothing_old() -> None:
    """V8: all that the others had put into an op is there when it wakes, and too late."""
    cluster = formed_cluster(3, think_s=1e6)  # the trainers call nothing: we do
    sleeper = by_seniority(cluster)[2]
    rank = sleeper.jobs.ranks[0]
    others = [other for other in ranks_of(cluster).values() if other is not rank]
    barrier = Call("barrier", "float32", ())
    cluster.sleep(sleeper.number)
    for other in others:
        ops.call_op(other, barrier)
    run_until(cluster, lambda: all(OpNumber(0) in other.ends for other in others), 5.0)
    cluster.wake(sleeper.number)
    ops.call_op(rank, barrier)
    cluster.run_until(cluster.timeline.now + 1.0)
    assert rank.over is not None
    assert not rank.ends


def who_promised_before_its_sleep_ends_nothing_in_the_view_that_it_wakes_up_to() -> None:
    """V8: its commit was read only after the sleep, and the others had left that view by then."""
    habits = Habits(job=JOB, wait_for=1, think_s=1e6)  # the trainers call nothing: we do
    cluster = Cluster(0, size=3, conditions=Conditions(), habits=habits)
    cluster.start(0)
    cluster.start(1)
    run_until(cluster, cluster.is_one_view, 5.0)
    leader, other = by_seniority(cluster)
    leader.dismiss()
    other.dismiss()
    cluster.network.partition([0, 1], [2])
    cluster.start(2)
    sleeper = cluster.agents[2]
    run_until(cluster, lambda: len(sleeper.jobs.ranks) == 1, 5.0)
    (rank,) = sleeper.jobs.ranks
    cluster.network.heal()

    def fall_asleep(_: Agent) -> None:
        leader.before_commit = None
        ops.call_op(rank, Call("barrier", "float32", ()))  # it waits for the view (V3)
        cluster.sleep(sleeper.number)

    leader.before_commit = fall_asleep
    run_until(cluster, lambda: len(other.state.view.seats) == 3, 5.0)
    for agent in (leader, other):
        agent.drop(sleeper.number)
    cluster.run_until(cluster.timeline.now + DOUBT_S)  # less, and nobody need doubt anything
    run_until(cluster, lambda: len(leader.state.view.seats) == 2, 0.8)
    assert not rank.ends
    cluster.wake(sleeper.number)
    cluster.run_until(cluster.timeline.now + 1.0)


def who_slept_through_several_views_does_not_go_on_alone() -> None:
    """V2: what the others show is not the next view after its own, and they have gone on."""
    cluster = formed_cluster(3)
    leader, other, sleeper = by_seniority(cluster)
    rank = sleeper.jobs.ranks[0]
    cluster.sleep(sleeper.number)
    run_until(cluster, lambda: len(leader.state.view.seats) == 2, 2 * GONE_AFTER_S)
    epoch = leader.state.view.epoch
    other.trainers[0].die()
    run_until(cluster, lambda: leader.state.view.epoch > epoch, 1.0)
    cluster.wake(sleeper.number)
    run_until(cluster, lambda: rank.over is not None, 1.0)
    ends = [end.outcome for end in rank.ends.values() if isinstance(end.outcome, OpResult)]
    assert all(len(result.contributors) > 1 for result in ends)
