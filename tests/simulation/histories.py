"""Histories aimed at rules that random faults rarely put to the test.

Histories aimed at V10: at most one side of a partition goes on where a majority is asked for.

A history aimed at residuals (O9), in which compression is known only by what it keeps.

Histories aimed at the rules for whoever has slept: V2 and V8.
"""

from collections.abc import Callable
from dataclasses import replace

import msgspec

from pmesh.core.links.health import DEAF, WIRED
from pmesh.core.values import Terms, Verdict, View
from pmesh.core.wire.calls import Call
from pmesh.core.wire.lanes import AskResult
from pmesh.core.wire.views import Commit, Heartbeat
from pmesh.ids import Epoch, JobName, OpNumber, TrainerId
from simulation import ops
from simulation.agents import DOUBT_S, SimulatedAgent
from simulation.cluster import Cluster
from simulation.lane_messages import OpResult, Token
from simulation.links import Message
from simulation.network import Conditions
from simulation.ops import OP_TIMEOUT_S
from simulation.ranks import SimulatedRank
from simulation.trainers import Habits

JOB = JobName("digits")
STEP_S = 0.01


def formed_cluster(
    size: int, *, think_s: float = 0.3, terms: Terms | None = None, seed: int = 0
) -> Cluster:
    """A quiet network on which one view holds all agents, and one job runs."""
    habits = Habits(job=JOB, wait_for=size, think_s=think_s, terms=terms or Terms())
    cluster = Cluster(seed, size=size, conditions=Conditions(), habits=habits)
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


def by_seniority(cluster: Cluster) -> list[SimulatedAgent]:
    """The agents, the leader first."""
    view = next(iter(cluster.agents.values())).state.view
    agents = {agent.state.me: agent for agent in cluster.agents.values()}
    return [agents[member] for member in view.by_seniority]


def ranks_of(cluster: Cluster) -> dict[TrainerId, SimulatedRank]:
    """The ranks of the job, by their trainers' numbers."""
    return {rank.id: rank for agent in cluster.agents.values() for rank in agent.jobs.ranks}


def agent_of(cluster: Cluster, rank: SimulatedRank) -> SimulatedAgent:
    """Where a rank lives."""
    return next(agent for agent in cluster.agents.values() if rank in agent.jobs.ranks)


def a_lost_commit_is_made_up_for_by_the_next_heartbeat() -> None:
    """V6: without it the member waits for its patience to end, and all for another view."""
    habits = Habits(job=JOB, wait_for=9)  # no job begins: nothing but the joining changes the view
    cluster = Cluster(0, size=3, conditions=Conditions(), habits=habits)
    cluster.start(0)
    cluster.start(1)
    run_until(cluster, cluster.is_one_view, 5.0)
    junior = by_seniority(cluster)[1]
    lost: list[Epoch] = []

    def swallow(_from: int, to: int, _channel: str, message: Message) -> bool:
        if to == junior.number and isinstance(message, Commit):
            lost.append(message.view.epoch)
            return True
        return False

    cluster.network.swallow = swallow
    cluster.start(2)
    run_until(cluster, lambda: bool(lost), 5.0)
    run_until(cluster, lambda: junior.state.view.epoch == lost[0], 0.3)


def a_half_sent_commit_is_what_the_next_leader_builds_on() -> None:
    """V2: the leader dies; the next one lacks its last view, which the third has installed."""
    cluster = formed_cluster(3)
    leader, second, third = by_seniority(cluster)
    sent: list[Epoch] = []

    def swallow(from_: int, to: int, _channel: str, message: Message) -> bool:
        if isinstance(message, Commit) and from_ == leader.number and to == second.number:
            sent.append(message.view.epoch)
            return True
        # The third shows its view too late: not before the second has proposed.
        late = isinstance(message, Heartbeat) and bool(sent) and message.view == sent[0]
        return late and to == second.number and second.state.proposal is None

    resets = cluster.invariants.resets
    cluster.network.swallow = swallow
    third.trainers[0].die()
    run_until(cluster, lambda: bool(sent) and third.state.view.epoch == sent[0], 2.0)
    cluster.crash(leader.number)
    run_until(cluster, lambda: second.state.view.epoch > sent[0], WIRED.gone_after_s)
    run_until(cluster, cluster.is_one_view, WIRED.gone_after_s)
    assert cluster.invariants.resets == resets


def _swallow_results_of(cluster: Cluster, root: SimulatedRank, op: OpNumber) -> None:
    """Nobody gets what the root sends of a broadcast, nor its retained result."""
    host = agent_of(cluster, root).number

    def swallow(from_: int, _to: int, channel: str, message: Message) -> bool:
        if channel == "link":
            return isinstance(message, AskResult)
        return from_ == host and getattr(message, "op", None) == op

    cluster.network.swallow = swallow


def _next_broadcast(cluster: Cluster, root: TrainerId) -> OpNumber:
    """Let the job run until its next op is a broadcast from this trainer, of two."""
    ranks = ranks_of(cluster)

    def is_next() -> bool:
        number = OpNumber(ranks[root].ledger.started + 1)
        return number % 4 == 2 and 7 * number % 2 == ranks[root].rank

    run_until(cluster, is_next, 10.0)
    return OpNumber(ranks[root].ledger.started + 1)


def _broadcast_that_only_the_root_completes() -> tuple[
    Cluster, SimulatedRank, SimulatedRank, OpNumber
]:
    """Return the root, the receiver, and the op; its result is lost on the way."""
    cluster = formed_cluster(2)
    ranks = ranks_of(cluster)
    # 7 * op % 2 is 0 for each op that is a broadcast.
    root, other = ranks[TrainerId(0)], ranks[TrainerId(1)]
    op = _next_broadcast(cluster, root.id)
    _swallow_results_of(cluster, root, op)
    run_until(cluster, lambda: op in root.ends and op in other.ledger.ops, 4.0)
    return cluster, root, other, op


def a_result_that_went_away_with_its_last_holder_is_not_waited_for() -> None:
    """I6: the root's trainer dies, then its agent; the receiver still hears of it."""
    cluster, root, other, op = _broadcast_that_only_the_root_completes()
    number, host = other.roster.number, agent_of(cluster, root)
    host.trainers[0].die()
    run_until(cluster, lambda: other.roster.number > number, 2.0)
    assert op not in other.ends
    cluster.crash(host.number)
    run_until(cluster, lambda: op in other.ends, WIRED.gone_after_s)


def what_a_dead_trainer_has_completed_is_fetched_from_its_agent() -> None:
    """O2: the root's trainer dies; its agent is a holder, and serves the result."""
    cluster, root, other, op = _broadcast_that_only_the_root_completes()
    agent_of(cluster, root).trainers[0].die()
    run_until(cluster, lambda: other.roster.rank_of(root.id) is None, 2.0)
    cluster.network.swallow = None
    run_until(cluster, lambda: op in other.ends, 2.0)
    assert other.ends[op].outcome == root.ends[op].outcome


def what_one_rank_has_forgotten_has_ended_at_all() -> None:
    """O2, O4: one rank has heard that all have ended the all-gather, another has not; one dies."""
    cluster = formed_cluster(3, think_s=1e6)  # the trainers call nothing: we do
    lost, ahead, behind = (rank for _, rank in sorted(ranks_of(cluster).items()))
    host = agent_of(cluster, behind)
    cluster.network.swallow = lambda _from, to, _channel, message: (
        to == host.number and isinstance(message, Heartbeat)
    )
    for rank in (lost, ahead, behind):
        ops.call_op(rank, Call("all_gather", "float32", (8,)))
    run_until(cluster, lambda: ahead.ledger.stable == 0, 1.0)
    assert behind.ledger.stable < 0
    ops.call_op(ahead, Call("all_reduce", "float32", (8,), "sum"))
    cluster.crash(agent_of(cluster, lost).number)
    run_until(cluster, lambda: len(behind.roster.trainers) == 2, 1.0)
    for rank in (ahead, behind):
        assert isinstance(rank.ends[OpNumber(0)].outcome, OpResult)


def a_late_and_different_call_is_noticed_when_it_fetches() -> None:
    """O8, I5: no token of the op is under way any more; the result itself must say what it is."""
    cluster = formed_cluster(2, think_s=1e6)  # the trainers call nothing: we do
    late, root = (rank for _, rank in sorted(ranks_of(cluster).items()))
    broadcast, all_reduce = OpNumber(0), OpNumber(1)
    call = Call("broadcast", "float32", (8,), root=1)
    ops.call_op(root, call)
    ops.call_op(root, Call("all_reduce", "float32", (8,), "sum"))
    # Nobody joins in, so it times out; the view that settles it says who holds the broadcast.
    run_until(cluster, lambda: all_reduce in root.ends, 2 * OP_TIMEOUT_S)
    run_until(cluster, lambda: bool(late.roster.outcomes), 1.0)
    ops.call_op(late, msgspec.structs.replace(call, shape=(9,)))
    run_until(cluster, lambda: broadcast in late.ends, 1.0)
    cluster.run_until(cluster.timeline.now + 1.0)
    for rank in (late, root):
        outcome = rank.ends[broadcast].outcome
        assert isinstance(outcome, Verdict)
        assert outcome.error == "OpMismatch"


def broadcasts_of_two_roots_fail_at_both() -> None:
    """I5: neither root waits for anybody, so no data tells them; their heartbeats do."""
    cluster = formed_cluster(2, think_s=1e6)
    ranks = [rank for _, rank in sorted(ranks_of(cluster).items())]
    for root, rank in enumerate(ranks):
        ops.call_op(rank, Call("broadcast", "float32", (8,), root=root))
    cluster.run_until(cluster.timeline.now + 2.0)
    for rank in ranks:
        assert isinstance(rank.ends[OpNumber(0)].outcome, Verdict)


def a_lane_that_swallows_everything_is_replaced() -> None:
    """V6: heartbeats flow, and tokens do not; the op runs again, and nobody is lost."""
    cluster = formed_cluster(2)
    rank = ranks_of(cluster)[TrainerId(0)]
    cluster.network.swallow = lambda _from, _to, channel, _message: channel != "link"
    cluster.run_until(cluster.timeline.now + 0.5)
    cluster.network.swallow = None
    stuck = rank.ledger.started
    run_until(cluster, lambda: rank.ledger.ended >= stuck, OP_TIMEOUT_S - 1.0)
    assert isinstance(rank.ends[OpNumber(stuck)].outcome, OpResult)
    assert len(rank.roster.trainers) == len(cluster.agents)


def below_min_ranks_ops_wait_until_somebody_is_back() -> None:
    """The survivors neither go on nor fail, while their deadline has not come."""
    cluster = formed_cluster(3, terms=Terms(min_ranks=3))
    *survivors, lost = by_seniority(cluster)
    cluster.crash(lost.number)
    ranks = [rank for agent in survivors for rank in agent.jobs.ranks]
    run_until(cluster, lambda: all(len(rank.roster.trainers) == 2 for rank in ranks), 1.0)
    cluster.run_until(cluster.timeline.now + 0.5)  # what was complete somewhere is fetched
    before = [rank.ledger.ended for rank in ranks]
    cluster.run_until(cluster.timeline.now + 1.0)
    assert [rank.ledger.ended for rank in ranks] == before
    cluster.start(lost.number)
    run_until(cluster, lambda: all(rank.ledger.ended > min(before) + 4 for rank in ranks), 12.0)


def a_loss_is_raised_where_the_job_asks_for_it() -> None:
    """on_loss="raise": one op fails with RankLost at all survivors, and the next ones do not."""
    cluster = formed_cluster(3, terms=Terms(on_loss="raise"))
    *survivors, lost = by_seniority(cluster)
    ranks = [rank for agent in survivors for rank in agent.jobs.ranks]
    cluster.crash(lost.number)
    cluster.run_until(cluster.timeline.now + 3.0)
    for rank in ranks:
        failed = [end.outcome for end in rank.ends.values() if isinstance(end.outcome, Verdict)]
        assert [verdict.error for verdict in failed] == ["RankLost"]


def the_history_of_more_ranks_goes_on() -> None:
    """V9: two of three trainers go on with theirs, though the view of the third is heavier."""
    cluster = _parted(3)
    heavier = cluster.agents[0].jobs.ranks[0]
    pair = [cluster.agents[number].jobs.ranks[0] for number in (3, 4)]
    cluster.network.heal()
    run_until(cluster, cluster.is_one_view, 10.0)
    assert heavier.over is not None
    for rank in pair:
        assert rank.over is None
        assert rank.rank is not None


def _parted(size: int) -> Cluster:
    """Five agents, three trainers of which two are cut off from a view of three."""
    cluster = formed_cluster(size + 2)
    job = {agent.number: agent.jobs.ranks[0] for agent in cluster.agents.values()}
    for number in (1, 2):
        cluster.agents[number].dismiss()
    run_until(cluster, lambda: len(job[0].roster.trainers) == size, 3.0)
    cluster.network.partition([0, 1, 2], [3, 4])
    run_until(cluster, lambda: len(job[0].roster.trainers) == 1, 2 * WIRED.gone_after_s)
    run_until(cluster, lambda: len(job[3].roster.trainers) == 2, 2 * WIRED.gone_after_s)
    return cluster


def what_comes_before_its_view_is_not_lost() -> None:
    """V4: the ring runs again at once, although one rank learns last that it does."""
    cluster = formed_cluster(3)
    leader, junior, lost = by_seniority(cluster)
    view = leader.state.view.epoch

    def swallow(_from: int, to: int, _channel: str, message: Message) -> bool:
        late = isinstance(message, Commit) or (isinstance(message, Heartbeat) and bool(held))
        return to == junior.number and late

    held: list[bool] = [True]
    cluster.network.swallow = swallow
    cluster.crash(lost.number)
    run_until(cluster, lambda: leader.state.view.epoch > view, 1.0)
    rank, early = leader.jobs.ranks[0], junior.jobs.ranks[0]
    run_until(cluster, lambda: rank.op is not None and rank.op.phase == "ring", 1.0)
    op = rank.ledger.started
    cluster.run_until(cluster.timeline.now + 0.1)  # its token is there
    held.clear()
    run_until(cluster, lambda: min(rank.ledger.ended, early.ledger.ended) >= op, 1.0)


def a_root_is_the_trainer_that_it_was_at_the_call() -> None:
    """O4, O5: rank 1 is the root; when rank 0 is lost, it is rank 0 and still the root."""
    cluster = formed_cluster(3, think_s=1e6)  # the trainers call nothing: we do
    lost, root, receiver = (rank for _, rank in sorted(ranks_of(cluster).items()))
    call = Call("broadcast", "float32", (8,), root=1)
    ops.call_op(receiver, call)
    cluster.crash(agent_of(cluster, lost).number)
    run_until(cluster, lambda: len(receiver.roster.trainers) == 2, 2.0)
    assert receiver.roster.ids.index(root.id) == 0
    ops.call_op(root, call)
    run_until(cluster, lambda: OpNumber(0) in receiver.ends, 1.0)
    outcome = receiver.ends[OpNumber(0)].outcome
    assert isinstance(outcome, OpResult)
    assert outcome.values == (root.value(OpNumber(0)),)


def nobody_enters_a_sync_that_somebody_has_completed() -> None:
    """O6: the other rank still lacks the result, and fetches it; the newcomer waits."""
    cluster = formed_cluster(2, think_s=1e6)  # the trainers call nothing: we do
    done, late = (rank for _, rank in sorted(ranks_of(cluster).items()))
    host = agent_of(cluster, late)
    cluster.network.swallow = lambda _from, to, channel, _message: (
        channel != "link" and to == host.number
    )
    for rank in (done, late):
        ops.call_op(rank, Call("sync", "float32", (8,), "sum"))
    run_until(cluster, lambda: OpNumber(0) in done.ends, 1.0)
    waiting = host.jobs.enlist(JOB, 1, Terms(), int, lambda _rank: None)
    cluster.network.swallow = None
    run_until(cluster, lambda: OpNumber(0) in late.ends, 2 * WIRED.gone_after_s)
    assert waiting.rank is None


def _sides_that_go_on(cluster: Cluster) -> list[SimulatedAgent]:
    """The agents that have a rank whose ops may run."""
    return [
        agent
        for agent in cluster.agents.values()
        if any(rank.may_run and rank.rank is not None for rank in agent.jobs.ranks)
    ]


def what_too_few_have_installed_does_not_run() -> None:
    """V10: a, b and c vote for a view that b does not install; it votes again, with d and e."""
    cluster = formed_cluster(5, terms=Terms(quorum="majority"))
    a, b, c, d, e = by_seniority(cluster)
    numbers = [agent.number for agent in (a, b, c, d, e)]
    sent: list[Epoch] = []

    def swallow(_from: int, to: int, _channel: str, message: Message) -> bool:
        if isinstance(message, Commit) and to == b.number:
            sent.append(message.view.epoch)
        return bool(sent) and to == b.number

    cluster.network.swallow = swallow
    cluster.network.partition(numbers[:3], numbers[3:])
    run_until(cluster, lambda: bool(sent) and c.state.view.epoch == sent[0], 5.0)
    cluster.network.heal()
    cluster.network.partition([a.number, c.number], [b.number, d.number, e.number])
    cluster.network.swallow = None
    cluster.run_until(cluster.timeline.now + 5.0)
    going_on = {agent.number for agent in _sides_that_go_on(cluster)}
    assert going_on == {b.number, d.number, e.number}
    cluster.invariants.finish()


def who_knows_of_a_later_primary_does_not_help_an_earlier_one() -> None:
    """V10: b was of the primary {a, b}, which a alone goes on with; b and c are no majority."""
    cluster = formed_cluster(3, terms=Terms(quorum="majority"))
    a, b, c = (agent_of(cluster, rank) for _, rank in sorted(ranks_of(cluster).items()))
    cluster.network.partition([c.number], [a.number, b.number])
    cluster.run_until(cluster.timeline.now + (DEAF + 1) * WIRED.gone_after_s)
    assert _sides_that_go_on(cluster) == [a, b] or _sides_that_go_on(cluster) == [b, a]
    cluster.network.partition([a.number], [b.number])
    cluster.run_until(cluster.timeline.now + 2 * WIRED.gone_after_s)
    assert _sides_that_go_on(cluster) == [a]
    cluster.network.mend(b.number, c.number)
    cluster.network.mend(c.number, b.number)
    cluster.run_until(cluster.timeline.now + 2 * WIRED.gone_after_s)
    assert len(b.state.view.seats) == 2
    assert _sides_that_go_on(cluster) == [a]


def who_fetches_a_sum_keeps_the_residual_of_its_own_part_in_it() -> None:
    """O9: all have given to it, also the one whom the last token did not reach."""
    cluster = formed_cluster(3, think_s=1e6)  # the trainers call nothing: we do
    ring = sorted(ranks_of(cluster).values(), key=lambda rank: rank.rank or 0)
    unlucky, beyond, last = ring  # the token of `beyond` comes to `unlucky` by way of `last`
    number, op = unlucky.roster.number, OpNumber(0)
    host = agent_of(cluster, unlucky).number

    def swallow(_from: int, to: int, _channel: str, message: Message) -> bool:
        if to != host or not isinstance(message, Token):
            return False
        return message.number == number and message.origin == beyond.id

    cluster.network.swallow = swallow
    for rank in ring:
        ops.call_op(rank, Call("all_reduce", "float32", (8,), "sum"))
    run_until(cluster, lambda: op in beyond.ends and op in last.ends, OP_TIMEOUT_S)
    assert op not in unlucky.ends
    run_until(cluster, lambda: op in unlucky.ends, 2 * OP_TIMEOUT_S)
    end = unlucky.ends[op]
    assert isinstance(end.outcome, OpResult)
    assert end.outcome == beyond.ends[op].outcome
    assert end.staged == end.outcome.number == number < unlucky.roster.number


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

    def fall_asleep(_: SimulatedAgent) -> None:
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
    for seed in range(4):  # what it does alone takes a moment, and the others may be quicker
        _sleep_through_several_views(formed_cluster(3, seed=seed))


def _sleep_through_several_views(cluster: Cluster) -> None:
    leader, other, sleeper = by_seniority(cluster)
    rank = sleeper.jobs.ranks[0]
    cluster.sleep(sleeper.number)
    run_until(cluster, lambda: len(leader.state.view.seats) == 2, 2 * WIRED.gone_after_s)
    epoch = leader.state.view.epoch
    other.trainers[0].die()
    run_until(cluster, lambda: leader.state.view.epoch > epoch, 1.0)
    cluster.wake(sleeper.number)
    run_until(cluster, lambda: rank.over is not None, 1.0)
    ends = [end.outcome for end in rank.ends.values() if isinstance(end.outcome, OpResult)]
    assert all(len(result.contributors) > 1 for result in ends)


def who_has_gone_on_alone_parts_nobody_else() -> None:
    """V2: two still continue, though the third shows a later view without them."""
    cluster = formed_cluster(3)
    *others, alone = by_seniority(cluster)
    view = alone.state.view
    epoch = Epoch(view.epoch.counter + 1, *alone.state.me)
    (seat,) = (seat for seat in view.seats if seat.member == alone.state.me)
    alone.state = replace(
        alone.state, view=View(epoch, (seat,)), promised=epoch, highest_counter=epoch.counter
    )
    sizes = set[int]()

    def both_have_gone_on() -> bool:
        sizes.update(len(other.state.view.seats) for other in others)
        return all(len(other.state.view.seats) == 2 for other in others)

    run_until(cluster, both_have_gone_on, 2.0)
    assert sizes == {3, 2}
