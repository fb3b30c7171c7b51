"""Agents that train together measure the edges between them, and others send nothing for that."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.jobs.ranks import MEASURED_BYTES
from pmesh.agent.mesh.probing import (
    ANSWER_EVERY_S,
    CHECK_EVERY_S,
    OTHERS_EVERY_S,
    PROBE_EVERY_S,
    PROBES,
    PathBandwidth,
    ProbedPath,
    Probing,
)
from pmesh.core.links.bandwidth import STEADY_S
from pmesh.core.wire.probes import MAX_PROBE_BYTES, AskProbe, Probe
from pmesh.net.lanes.lane import Throughput
from tests.agent.mesh.paths import path_to
from tests.worlds.builders import BERT, CARA
from tests.worlds.trainer import until
from tests.worlds.village import village
from tests.worlds.village_ops import reduce_all

UNKNOWN = "", ""
"""Addresses that no path is known to have."""


class MeasuredPath:
    """A path from Bert to Anna, who measures it."""

    def __init__(self, mbit_s: float, *, round_trip_s: float = 0.0) -> None:
        self.mbit_s = mbit_s
        self.round_trip_s = round_trip_s
        self.asked: list[AskProbe] = []
        self.answered: list[Probe] = []
        self.settled: list[int] = []
        self.anna = PathBandwidth(
            self._from_anna, lambda: self.settled.append(self.anna.settled_mbit_s)
        )
        self.bert = PathBandwidth(self._from_bert, lambda: None)

    def path(self, hosts: tuple[str, str] = ("", ""), *, in_use: bool = True) -> ProbedPath:
        """To Anna's agent."""
        here, there = hosts
        return ProbedPath(self.anna, ({here}, {there}), in_use)

    def _from_anna(self, message: AskProbe | Probe) -> None:
        assert isinstance(message, AskProbe)
        self.asked.append(message)

    def _from_bert(self, message: AskProbe | Probe) -> None:
        assert isinstance(message, Probe)
        self.answered.append(message)

    async def carry(self, *, in_use: bool = True) -> int:
        """Ask if it is due, and bring what Bert answers; returns for how many bytes was asked."""
        if self.anna.due_at(in_use=in_use) <= trio.current_time():
            self.anna.ask()
        return await self.bring()

    async def bring(self) -> int:
        if not self.asked:
            return 0
        ask = self.asked.pop()
        self.bert.answer(ask)
        await trio.sleep(self.round_trip_s)
        for part in self.answered:
            await trio.sleep(8 * len(part.padding) / self.mbit_s / 1e6)
            self.anna.receive(part)
        self.answered.clear()
        return ask.nbytes

    async def measure(self) -> int:
        """Carry three probes; returns for how many bytes."""
        asked = 0
        for _ in range(PROBES):
            asked += await self.carry()
            await trio.sleep(ANSWER_EVERY_S)
        return asked


async def test_probes_that_are_disturbed_say_nothing_beside_one_that_is_not(
    clock: MockClock,
) -> None:
    del clock
    way = MeasuredPath(94)
    while not way.anna.settled_mbit_s:
        await way.measure()
    for disturbed_mbit_s in (10, 30, 10, 30):
        await trio.sleep(PROBE_EVERY_S)
        for mbit_s in (disturbed_mbit_s, 94, disturbed_mbit_s):
            way.mbit_s = mbit_s
            await way.carry()
            await trio.sleep(ANSWER_EVERY_S)
        assert way.anna.settled_mbit_s == 94


@pytest.mark.parametrize("mbit_s", [5, 94, 940])
async def test_three_probes_show_the_bandwidth_and_later_one_in_a_quarter_of_an_hour_confirms_it(
    mbit_s: int, clock: MockClock
) -> None:
    del clock
    way = MeasuredPath(mbit_s)
    assert way.anna.settled_mbit_s == 0
    while not way.anna.settled_mbit_s:
        await way.measure()
    assert way.anna.settled_mbit_s == pytest.approx(mbit_s, rel=0.01)
    assert await way.carry() == 0
    await trio.sleep(STEADY_S)
    asked = await way.measure()  # once more, since the first one may have been disturbed
    quarter_of_an_hour_bytes = max(mbit_s, 10) * PROBE_EVERY_S * 1e6 / 8
    assert 0 < asked <= min(MAX_PROBE_BYTES, 2.5e-5 * quarter_of_an_hour_bytes)
    await trio.sleep(PROBE_EVERY_S - 4 * ANSWER_EVERY_S)
    assert await way.carry() == 0
    await trio.sleep(4 * ANSWER_EVERY_S)
    assert await way.measure() == pytest.approx(asked, rel=0.01)


async def test_a_probe_that_shows_something_else_is_one_of_three(clock: MockClock) -> None:
    del clock
    way = MeasuredPath(940)
    while not way.anna.settled_mbit_s:
        await way.measure()
    await trio.sleep(STEADY_S)
    one = await way.measure()
    way.mbit_s = 94
    await trio.sleep(PROBE_EVERY_S)
    assert await way.measure() == pytest.approx(3 * one, rel=0.01)


async def test_while_the_data_of_one_path_change_the_others_are_probed_but_seldom(
    clock: MockClock,
) -> None:
    """A ring that avoids the path would else be planned by what the others brought long ago."""
    del clock
    ways = {BERT: MeasuredPath(94), CARA: MeasuredPath(940)}
    probing = Probing(lambda member: [ways[member].path()])
    probing.note(BERT, UNKNOWN, 94)

    async def pass_time(seconds: float, *, bert_brings: float) -> int:
        """Return how many probes were asked for over the other path."""
        asked, until = 0, trio.current_time() + seconds
        while trio.current_time() < until:
            probing.note(BERT, UNKNOWN, bert_brings)
            probing.ask(ways, ())
            asked += await ways[CARA].bring() > 0
            await trio.sleep(0.2)
        return asked

    await pass_time(CHECK_EVERY_S + 30.0, bert_brings=94)
    assert await pass_time(CHECK_EVERY_S, bert_brings=94) == 0
    for bert_brings in (20, 94, 20, 94):
        assert await pass_time(CHECK_EVERY_S, bert_brings=bert_brings) == 1


async def test_of_all_known_paths_one_is_probed_at_a_time_and_seldom(clock: MockClock) -> None:
    del clock
    ways = {BERT: MeasuredPath(940), CARA: MeasuredPath(940)}
    probing = Probing(lambda member: [ways[member].path()])
    asked = list[float]()
    while trio.current_time() < 3 * PROBE_EVERY_S:
        probing.ask(ways, ())
        for way in ways.values():
            asked += [trio.current_time()] * (await way.bring() > 0)
        await trio.sleep(1.0)
    later = [at for at in asked if at > CHECK_EVERY_S]
    assert len(later) == pytest.approx(2 * 2, abs=1)
    assert all(after - before >= CHECK_EVERY_S for before, after in pairwise(later))


@pytest.mark.parametrize("mbit_s", [40, 940])
async def test_a_round_trip_longer_than_a_probe_is_not_taken_for_a_slow_path(
    mbit_s: int, clock: MockClock
) -> None:
    del clock
    way = MeasuredPath(mbit_s, round_trip_s=0.015)
    for _ in range(8):
        await way.measure()
    assert way.settled == [way.anna.settled_mbit_s]
    assert mbit_s / 2 <= way.anna.settled_mbit_s <= mbit_s


async def test_where_no_probe_is_long_enough_nothing_is_claimed_and_the_next_comes_much_later(
    clock: MockClock,
) -> None:
    del clock
    way = MeasuredPath(940, round_trip_s=0.1)
    for _ in range(8):
        await way.measure()
    assert way.settled == []
    assert await way.carry() == 0
    await trio.sleep(PROBE_EVERY_S)
    assert await way.carry() == MAX_PROBE_BYTES


async def test_while_data_flow_nothing_is_probed(clock: MockClock) -> None:
    del clock
    way = MeasuredPath(94)
    for _ in range(5):
        way.anna.note(94, "data")
        await trio.sleep(STEADY_S - 1)
        assert await way.carry() == 0


async def test_a_probe_that_never_comes_is_asked_for_again_and_only_one_at_a_time(
    clock: MockClock,
) -> None:
    del clock
    ways = {BERT: [MeasuredPath(94)], CARA: [MeasuredPath(94)]}
    probing = Probing(lambda member: [way.path() for way in ways[member]])
    for _ in range(3):
        probing.ask([BERT, CARA], ())
    assert [len(way.asked) for member in ways for way in ways[member]] == [1, 1]
    await trio.sleep(10)
    probing.ask([BERT], ())
    assert len(ways[BERT][0].asked) == 2


async def test_who_asks_too_often_is_not_answered_and_what_nobody_asked_for_says_nothing(
    clock: MockClock,
) -> None:
    del clock
    way = MeasuredPath(94)
    way.bert.answer(AskProbe(10_000))
    way.bert.answer(AskProbe(10_000))
    assert [len(part.padding) for part in way.answered] == [8192, 1808]
    way.anna.receive(Probe(bytes(8192)))
    assert way.anna.settled_mbit_s == 0


async def test_a_path_that_carries_no_tensors_is_probed_when_it_comes_seldom_then_and_on_a_change(
    clock: MockClock,
) -> None:
    del clock
    used, other = MeasuredPath(940), MeasuredPath(94)
    probing = Probing(lambda _: [used.path(), other.path(in_use=False)])

    async def pass_time(seconds: float) -> int:
        """Return for how many bytes was asked over the other path."""
        asked, until = 0, trio.current_time() + seconds
        while trio.current_time() < until:
            probing.ask([BERT], {BERT})
            asked += await other.bring()
            await trio.sleep(0.2)
        return asked

    assert await pass_time(60) <= other.mbit_s * 60e6 / 8 / 1000
    assert other.anna.settled_mbit_s == pytest.approx(94, rel=0.01)
    assert used.asked == [], "the tensors that go to Bert would be in the way"
    assert await pass_time(PROBE_EVERY_S) > 0, "the first time something may have disturbed it"
    assert await pass_time(OTHERS_EVERY_S - PROBE_EVERY_S) == 0
    assert await pass_time(2 * PROBE_EVERY_S) > 0
    other.anna.expect_change()
    assert await pass_time(10) > 0


async def test_what_is_known_of_a_peer_is_that_of_the_path_that_tensors_take(
    clock: MockClock,
) -> None:
    del clock
    ways = [MeasuredPath(94), MeasuredPath(940)]
    probing = Probing(lambda _: [way.path(in_use=way is ways[0]) for way in ways])
    probing.note(BERT, UNKNOWN, 94)
    ways.reverse()
    assert probing.settled_mbit_s(BERT) == 0, "it was never asked while the first was used"
    ways.reverse()
    assert probing.settled_mbit_s(BERT) == 94
    ways.reverse()
    assert probing.settled_mbit_s(BERT) == 94, "until the other is measured"
    probing.note(BERT, UNKNOWN, 940)
    assert probing.settled_mbit_s(BERT) == 940
    ways.clear()
    probing.note(BERT, UNKNOWN, 1)  # its last path has just gone
    assert probing.settled_mbit_s(BERT) == 940
    probing.forget(BERT)
    assert probing.settled_mbit_s(BERT) == 0


async def test_data_over_several_paths_measure_each_and_the_edge_carries_their_sum(
    clock: MockClock,
) -> None:
    del clock
    wire, wifi = ("10.0.0.1", "10.0.0.2"), ("10.0.1.1", "10.0.1.2")
    fast, slow = MeasuredPath(940), MeasuredPath(94)
    probing = Probing(lambda _: [fast.path(wire), slow.path(wifi)])
    probing.note(BERT, wifi, 94)
    assert (fast.anna.settled_mbit_s, slow.anna.settled_mbit_s) == (0, 94)
    probing.note(BERT, wire, 940)
    assert (fast.anna.settled_mbit_s, slow.anna.settled_mbit_s) == (940, 94)
    assert probing.settled_mbit_s(BERT) == 940 + 94
    await trio.sleep(2 * PROBE_EVERY_S)
    probing.ask([BERT], {BERT})
    assert not fast.asked
    assert not slow.asked, "tensors fill it too"


@pytest.mark.slow
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
        await trio.sleep(60.0)
        assert known() == set()
        trainers = await here.job(*here.machines[:3])
        edges = {frozenset((a, b)) for a, b in pairs if 3 not in {a, b}}
        await until(lambda: known() == edges)
        await reduce_all(trainers)
        await until(lambda: all(any(a.reported_mbit_s(m) for m in members) for a in agents[:3]))


@pytest.mark.slow
async def test_a_job_takes_at_most_a_fiftieth_of_a_percent_of_a_gigabit_line_for_control(
    clock: MockClock,
) -> None:
    line_bytes_per_s, minute_s = 125e6, 60.0
    async with village(clock, 3) as here:
        await here.job(*here.machines)
        await trio.sleep(minute_s / 2)  # in which each edge is probed for the first time
        before = [machine.agent.peers.control_bytes for machine in here.machines]
        await trio.sleep(minute_s)
        after = [machine.agent.peers.control_bytes for machine in here.machines]
    most = max(b[way] - a[way] for a, b in zip(before, after, strict=True) for way in (0, 1))
    assert 0 < most <= 0.0002 * line_bytes_per_s * minute_s


async def test_the_data_of_an_op_measure_the_edge_that_they_come_over(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        await reduce_all(await here.job(*here.machines))
        one, other = (machine.agent for machine in here.machines)
        (lane,) = [lane for lane in here.machines[0].lanes() if not lane.sending]
        member = other.membership.state.me
        path = path_to(*here.machines)
        for nbytes, settled in ((MEASURED_BYTES - 1, 0), (2 * MEASURED_BYTES, 17)):
            path.bandwidth = PathBandwidth(path.path.send, path.ask)
            lane.paces = {lane.hosts: Throughput(nbytes, 1.0)}
            one.jobs.poll()
            assert one.membership.probing.settled_mbit_s(member) == settled
        path.bandwidth = PathBandwidth(path.path.send, path.ask)
        one.membership.probing.forget(member)
        one.jobs.poll()  # nothing has come since
        assert one.membership.probing.settled_mbit_s(member) == 0
