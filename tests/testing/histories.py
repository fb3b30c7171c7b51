"""Histories aimed at rules that random faults rarely put to the test."""

from collections.abc import Callable

import msgspec

from pmesh.core.messages import AskResult, Call, Commit, Heartbeat, decode_untrusted
from pmesh.core.views import Verdict
from pmesh.ids import Epoch, JobName, OpNumber, Rank
from pmesh.testing.agents import GONE_AFTER_S, Agent
from pmesh.testing.cluster import Cluster
from pmesh.testing.jobs import OP_TIMEOUT_S
from pmesh.testing.network import Conditions
from pmesh.testing.trainers import Habits

JOB = JobName("digits")
STEP_S = 0.01


def formed_cluster(size: int, *, think_s: float = 0.3) -> Cluster:
    """A quiet network on which one view holds all agents, and one job runs."""
    habits = Habits(job=JOB, wait_for=size, think_s=think_s)
    cluster = Cluster(0, size=size, conditions=Conditions(), habits=habits)
    for number in range(size):
        cluster.start(number)
    run_until(cluster, lambda: cluster.is_one_view() and len(cluster.progress()) == size, 10.0)
    return cluster


def run_until(cluster: Cluster, condition: Callable[[], bool], patience_s: float) -> None:
    """Let time pass in small steps; an AssertionError if the condition does not come true."""
    end = cluster.timeline.now + patience_s
    while not condition():
        assert cluster.timeline.now < end
        cluster.run_until(cluster.timeline.now + STEP_S)


def by_seniority(cluster: Cluster) -> list[Agent]:
    """The agents, the leader first."""
    view = next(iter(cluster.agents.values())).state.view
    agents = {agent.state.me: agent for agent in cluster.agents.values()}
    return [agents[member] for member in view.by_seniority]


def two_who_cannot_hear_each_other_are_not_in_one_view() -> None:
    """V5: both hear the leader, and could go on with it for ever without an op ending."""
    cluster = formed_cluster(3)
    _, a, b = by_seniority(cluster)
    cluster.network.partition([a.number], [b.number])
    cluster.run_until(cluster.timeline.now + 3 * GONE_AFTER_S)
    for agent in cluster.agents.values():
        assert not {a.state.me, b.state.me} <= set(agent.state.view.members)


def a_lost_commit_is_made_up_for_by_the_next_heartbeat() -> None:
    """V6: without it the member waits for its patience to end, and all for another view."""
    habits = Habits(job=JOB, wait_for=9)  # no job begins: nothing but the joining changes the view
    cluster = Cluster(0, size=3, conditions=Conditions(), habits=habits)
    cluster.start(0)
    cluster.start(1)
    run_until(cluster, cluster.is_one_view, 5.0)
    junior = by_seniority(cluster)[1]
    lost: list[Epoch] = []

    def swallow(_from: int, to: int, channel: str, data: bytes) -> bool:
        message = decode_untrusted(data) if channel == "link" else None
        if to == junior.number and isinstance(message, Commit):
            lost.append(message.view.epoch)
            return True
        return False

    cluster.network.swallow = swallow
    cluster.start(2)
    run_until(cluster, lambda: bool(lost), 5.0)
    run_until(cluster, lambda: junior.state.view.epoch == lost[0], 0.3)


def a_result_that_went_away_with_its_last_holder_is_not_waited_for() -> None:
    """I6: the root's trainer leaves, then its agent dies; the receiver still hears of it."""
    cluster = formed_cluster(2)
    root = next(a for a in cluster.agents.values() if Rank(1) in a.jobs[JOB].trainers)
    other = next(a for a in cluster.agents.values() if a is not root)
    job, op = other.jobs[JOB], OpNumber(7)  # a broadcast from rank 1

    def swallow(from_: int, _to: int, channel: str, data: bytes) -> bool:
        if channel == "link":
            return isinstance(decode_untrusted(data), AskResult)
        return from_ == root.number and (Rank(1), op) in root.jobs[JOB].ends

    while (Rank(0), OpNumber(6)) not in job.ends:
        cluster.run_until(cluster.timeline.now + STEP_S)
    cluster.network.swallow = swallow
    assert (Rank(1), op) not in root.jobs[JOB].ends
    _swallow_broadcast(cluster, root, op, swallow)
    run_until(cluster, lambda: (Rank(1), op) in root.jobs[JOB].ends, 2.0)
    run_until(cluster, lambda: op in job.ledgers[Rank(0)].ops, 2.0)
    number = job.roster.number
    root.trainers[0].leave()
    run_until(cluster, lambda: job.roster.number > number, 2.0)
    assert (Rank(0), op) not in job.ends
    cluster.crash(root.number)
    run_until(cluster, lambda: (Rank(0), op) in job.ends, GONE_AFTER_S)


def _swallow_broadcast(
    cluster: Cluster,
    root: Agent,
    op: OpNumber,
    after: Callable[[int, int, str, bytes], bool],
) -> None:
    """The root sends before its own op has ended: swallow from its start on."""

    def swallow(from_: int, to: int, channel: str, data: bytes) -> bool:
        started = op in root.jobs[JOB].ledgers[Rank(1)].ops if JOB in root.jobs else True
        if channel != "link" and from_ == root.number and started:
            return True
        return after(from_, to, channel, data)

    cluster.network.swallow = swallow


def a_late_and_different_call_is_noticed_when_it_fetches() -> None:
    """O8, I5: no token of the op is under way any more; the result itself must say what it is."""
    cluster = formed_cluster(2, think_s=1e6)  # the trainers call nothing: we do
    jobs = {rank: a.jobs[JOB] for a in cluster.agents.values() for rank in a.jobs[JOB].trainers}
    broadcast, all_reduce = OpNumber(0), OpNumber(1)
    call = Call("broadcast", "float32", (8,), root=1)
    jobs[Rank(1)].start(Rank(1), broadcast, call)
    jobs[Rank(1)].start(Rank(1), all_reduce, Call("all_reduce", "float32", (8,), "sum"))
    # Nobody joins in, so it times out; the view that settles it says who holds the broadcast.
    run_until(cluster, lambda: (Rank(1), all_reduce) in jobs[Rank(1)].ends, 2 * OP_TIMEOUT_S)
    run_until(cluster, lambda: bool(jobs[Rank(0)].roster.outcomes), 1.0)
    jobs[Rank(0)].start(Rank(0), broadcast, msgspec.structs.replace(call, shape=(9,)))
    run_until(cluster, lambda: (Rank(0), broadcast) in jobs[Rank(0)].ends, 1.0)
    cluster.run_until(cluster.timeline.now + 1.0)
    for rank, job in jobs.items():
        end = job.ends[rank, broadcast]
        assert isinstance(end, Verdict)
        assert end.error == "OpMismatch"


def a_half_sent_commit_is_what_the_next_leader_builds_on() -> None:
    """V2: the leader dies; the next one lacks its last view, which the third has installed."""
    cluster = formed_cluster(3)
    leader, second, third = by_seniority(cluster)
    sent: list[Epoch] = []

    def swallow(from_: int, to: int, channel: str, data: bytes) -> bool:
        message = decode_untrusted(data) if channel == "link" else None
        if isinstance(message, Commit) and from_ == leader.number and to == second.number:
            sent.append(message.view.epoch)
            return True
        # The third shows its view too late: not before the second has proposed.
        late = isinstance(message, Heartbeat) and bool(sent) and message.view == sent[0]
        return late and to == second.number and second.state.proposal is None

    resets = cluster.invariants.resets
    cluster.network.swallow = swallow
    third.trainers[0].leave()
    run_until(cluster, lambda: bool(sent) and third.state.view.epoch == sent[0], 2.0)
    cluster.crash(leader.number)
    run_until(cluster, lambda: second.state.view.epoch > sent[0], GONE_AFTER_S)
    run_until(cluster, cluster.is_one_view, GONE_AFTER_S)
    assert cluster.invariants.resets == resets
