"""Agents that train together measure the edges between them, and others send nothing for that."""

from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.jobs.ranks import MEASURED_BYTES
from pmesh.agent.mesh.probing import ANSWER_EVERY_S, PROBE_EVERY_S, PROBES, Probing
from pmesh.core.links.bandwidth import STEADY_S
from pmesh.core.wire.link import MAX_PROBE_BYTES, AskProbe, LinkMessage, Probe
from pmesh.ids import Member
from tests.worlds.builders import ANNA, BERT, CARA
from tests.worlds.trainer import until
from tests.worlds.village import village
from tests.worlds.village_ops import reduce_all


class Edge:
    """From Bert to Anna, who measures it."""

    def __init__(self, mbit_s: float) -> None:
        self.mbit_s = mbit_s
        self.asked: list[tuple[Member, AskProbe]] = []
        self.answered: list[LinkMessage] = []
        self.anna = Probing(self._from_anna)
        self.bert = Probing(lambda _, message: self.answered.append(message))

    def _from_anna(self, to: Member, message: LinkMessage) -> None:
        assert isinstance(message, AskProbe)
        self.asked.append((to, message))

    async def carry(self, *members: Member) -> int:
        """Let Anna ask, and bring what Bert answers; returns for how many bytes she has asked."""
        self.anna.ask(members)
        if not self.asked:
            return 0
        _, ask = self.asked.pop()
        self.bert.answer(ANNA, ask)
        for part in self.answered:
            assert isinstance(part, Probe)
            await trio.sleep(8 * len(part.padding) / self.mbit_s / 1e6)
            self.anna.receive(BERT, part)
        self.answered.clear()
        return ask.nbytes

    async def measure(self) -> int:
        """Carry three probes; returns for how many bytes."""
        asked = 0
        for _ in range(PROBES):
            asked += await self.carry(BERT)
            await trio.sleep(ANSWER_EVERY_S)
        return asked


async def test_probes_that_are_disturbed_say_nothing_beside_one_that_is_not(
    clock: MockClock,
) -> None:
    del clock
    edge = Edge(94)
    while not edge.anna.settled_mbit_s(BERT):
        await edge.measure()
    for disturbed_mbit_s in (10, 30, 10, 30):
        await trio.sleep(PROBE_EVERY_S)
        for mbit_s in (disturbed_mbit_s, 94, disturbed_mbit_s):
            edge.mbit_s = mbit_s
            await edge.carry(BERT)
            await trio.sleep(ANSWER_EVERY_S)
        assert edge.anna.settled_mbit_s(BERT) == 94


@pytest.mark.parametrize("mbit_s", [5, 94, 940])
async def test_a_probe_shows_the_bandwidth_and_takes_a_thousandth_of_a_minute_at_most(
    mbit_s: int, clock: MockClock
) -> None:
    del clock
    edge = Edge(mbit_s)
    assert edge.anna.settled_mbit_s(BERT) == 0
    while not edge.anna.settled_mbit_s(BERT):
        await edge.measure()
    assert edge.anna.settled_mbit_s(BERT) == pytest.approx(mbit_s, rel=0.01)
    assert await edge.carry(BERT) == 0
    await trio.sleep(STEADY_S)
    asked = await edge.measure()  # once more, since the first one may have been disturbed
    assert asked <= min(3 * MAX_PROBE_BYTES, max(mbit_s, 10) * 60e6 / 8 / 1000)
    await trio.sleep(PROBE_EVERY_S - 2 * ANSWER_EVERY_S)
    assert await edge.carry(BERT) == 0
    await trio.sleep(2 * ANSWER_EVERY_S)
    assert await edge.measure() == pytest.approx(asked, rel=0.01)


async def test_while_data_flow_nothing_is_probed(clock: MockClock) -> None:
    del clock
    edge = Edge(94)
    for _ in range(5):
        edge.anna.note(BERT, 94, "data")
        await trio.sleep(STEADY_S - 1)
        assert await edge.carry(BERT) == 0


async def test_a_probe_that_never_comes_is_asked_for_again_and_only_one_at_a_time(
    clock: MockClock,
) -> None:
    del clock
    edge = Edge(94)
    edge.anna.ask([BERT, CARA])
    edge.anna.ask([BERT, CARA])
    edge.anna.ask([BERT, CARA])
    assert {to for to, _ in edge.asked} == {BERT, CARA}
    assert len(edge.asked) == 2
    await trio.sleep(10)
    edge.anna.ask([BERT])
    assert len(edge.asked) == 3


async def test_who_asks_too_often_is_not_answered_and_what_nobody_asked_for_says_nothing(
    clock: MockClock,
) -> None:
    del clock
    edge = Edge(94)
    edge.bert.answer(ANNA, AskProbe(10_000))
    edge.bert.answer(ANNA, AskProbe(10_000))
    assert [len(part.padding) for part in edge.answered if isinstance(part, Probe)] == [8192, 1808]
    edge.anna.receive(BERT, Probe(bytes(8192)))
    assert edge.anna.settled_mbit_s(BERT) == 0
    edge.anna.note(BERT, 94, "data")
    edge.anna.forget(BERT)
    assert edge.anna.settled_mbit_s(BERT) == 0


async def test_machines_that_train_together_learn_of_every_edge_and_the_others_stay_idle(
    clock: MockClock,
) -> None:
    async with village(clock, 4) as here:
        agents = [machine.agent.membership for machine in here.machines]
        members = [agent.state.me for agent in agents]
        pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
        known: Callable[[], set[frozenset[int]]] = lambda: {  # noqa: E731 - looked at again
            frozenset((a, b)) for a, b in pairs if agents[a].probing.settled_mbit_s(members[b])
        }
        await trio.sleep(PROBE_EVERY_S)
        assert known() == set()
        trainers = await here.job(*here.machines[:3])
        edges = {frozenset((a, b)) for a, b in pairs if 3 not in {a, b}}
        await until(lambda: known() == edges)
        await reduce_all(trainers)
        await until(lambda: all(any(a.reported_mbit_s(m) for m in members) for a in agents[:3]))


async def test_the_data_of_an_op_measure_the_edge_that_they_come_over(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        await reduce_all(await here.job(*here.machines))
        one, other = (machine.agent for machine in here.machines)
        (lane,) = [lane for lane in here.machines[0].lanes() if not lane.sending]
        member = other.membership.state.me
        for nbytes, settled in ((MEASURED_BYTES - 1, 0), (2 * MEASURED_BYTES, 17)):
            one.membership.probing.forget(member)
            lane.paced = nbytes, 1.0
            one.jobs.poll()
            assert one.membership.probing.settled_mbit_s(member) == settled
        one.membership.probing.forget(member)
        one.jobs.poll()  # nothing has come since
        assert one.membership.probing.settled_mbit_s(member) == 0
