"""Histories aimed at V10: at most one side of a partition goes on where a majority is asked for."""

from pmesh.core.messages import Commit
from pmesh.core.views import Terms
from pmesh.ids import Epoch
from pmesh.testing.agents import GONE_AFTER_S, Agent
from pmesh.testing.cluster import Cluster
from pmesh.testing.links import Message
from tests.testing.histories import agent_of, by_seniority, formed_cluster, ranks_of, run_until


def _sides_that_go_on(cluster: Cluster) -> list[Agent]:
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
    cluster.run_until(cluster.timeline.now + 2 * GONE_AFTER_S)
    assert _sides_that_go_on(cluster) == [a, b] or _sides_that_go_on(cluster) == [b, a]
    cluster.network.partition([a.number], [b.number])
    cluster.run_until(cluster.timeline.now + 2 * GONE_AFTER_S)
    assert _sides_that_go_on(cluster) == [a]
    cluster.network.mend(b.number, c.number)
    cluster.network.mend(c.number, b.number)
    cluster.run_until(cluster.timeline.now + 2 * GONE_AFTER_S)
    assert len(b.state.view.seats) == 2
    assert _sides_that_go_on(cluster) == [a]
