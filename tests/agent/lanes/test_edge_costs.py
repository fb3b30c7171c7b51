"""Ranks find out what their edges cost: together, seldom, and only for a call that asks for it."""

import itertools

import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.lanes import edge_costs
from pmesh.core.links.health import WIFI, WIRED
from pmesh.core.ops.cost import EdgeCost
from pmesh.core.wire.calls import Call
from pmesh.core.wire.records import RecordHeader
from pmesh.net.lanes.ring import RingPosition
from tests.worlds.trainer import Trainer, together
from tests.worlds.village import Village, training, village
from tests.worlds.village_ops import ones, ranks_of, reduce_all


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each rank of each agreement, whether it has sent a probe."""
    real, seen = edge_costs._probe, list[bool]()  # noqa: SLF001 - nothing else tells them apart

    async def probe(ring: RingPosition, header: RecordHeader, *, sends: bool) -> int:
        seen.append(sends)
        return await real(ring, header, sends=sends)

    monkeypatch.setattr(edge_costs, "_probe", probe)
    return seen


def check_alike(here: Village, count: int) -> None:
    tables = [rank.costs.edges for rank in ranks_of(here) if rank.rank is not None]
    assert len(tables) == count
    assert tables[0] is not None
    assert all(table == tables[0] for table in tables)
    assert all(cost.beta_ps > 0 for row in tables[0].costs for cost in row)


async def test_the_first_sum_measures_each_edge_once_and_all_ranks_have_one_table(
    clock: MockClock, probes: list[bool]
) -> None:
    async with training(clock, 4) as (here, trainers):
        await reduce_all(trainers)
        assert probes == [True] * 4
        check_alike(here, 4)
        await reduce_all(trainers)
        assert len(probes) == 4


async def test_edges_within_one_machine_are_alike_and_are_not_measured(
    clock: MockClock, probes: list[bool]
) -> None:
    async with village(clock, 3) as here:
        first, second, third = here.machines
        trainers = await here.job(first, first, second, second, third)
        await reduce_all(trainers)
        assert sorted(probes) == [False, False, True, True, True]
        check_alike(here, 5)
        for rank in ranks_of(here):
            members = [trainer.member for trainer in rank.roster.trainers]
            edges = rank.costs.edges
            assert edges is not None
            for one, other in itertools.permutations(range(5), 2):
                if members[one] == members[other]:
                    assert edges.costs[one][other] == EdgeCost(0, edge_costs.LOCAL_PS)


async def test_a_large_sum_does_without_the_one_slow_edge(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probe(ring: RingPosition, header: RecordHeader, *, sends: bool) -> int:
        del header, sends
        return 800_000 if ring.rank == 2 else 8_000  # 10 Mbit/s from rank 1, else 1 Gbit/s

    monkeypatch.setattr(edge_costs, "_probe", probe)
    count = 1_000_000
    async with training(clock, 4) as (here, trainers):
        await reduce_all(trainers, ones(count))
        for rank in ranks_of(here):
            names = [trainer.name for trainer in rank.roster.trainers]
            slow = {1: 2, 2: 1}.get(rank.rank or 0)
            for lane in rank.lanes.all_open():
                moved = lane.bytes_sent + lane.bytes_received
                there = names.index(lane.peer)
                assert (moved > 4 * count) == (there != slow), (rank, lane)


async def test_nothing_large_goes_over_an_edge_that_another_machine_forwards(
    clock: MockClock, probes: list[bool]
) -> None:
    """V5: it would seem as fast as the others, since nothing else is on its way during a probe."""
    count = 1_000_000
    async with training(clock, 3) as (here, trainers):
        first, _, last = (machine.agent.membership for machine in here.machines)
        for one, other in ((first, last), (last, first)):
            one.path_changed(other.state.me.node, WIRED, 0.0, relayed=True)
        await reduce_all(trainers, ones(count))
        assert sorted(probes) == [False, True, True]
        check_alike(here, 3)
        for machine in here.machines:
            for lane in machine.lanes():
                moved = lane.bytes_sent + lane.bytes_received
                ends = {lane.peer, machine.settings.name}
                assert (moved > 4 * count) == ("mac-1" in ends), ends


@pytest.mark.slow
async def test_what_is_known_is_not_measured_again_when_a_rank_has_gone(
    clock: MockClock, probes: list[bool]
) -> None:
    async with training(clock, 4) as (here, trainers):
        await reduce_all(trainers)
        probes.clear()
        await trio.sleep(60.0)  # heartbeats report what the edges bring
        await trainers[3].leave()
        await reduce_all(trainers[:3])
        assert probes == [False] * 3
        check_alike(here, 3)


async def test_two_ranks_and_a_strategy_that_is_named_ask_for_nothing(
    clock: MockClock, probes: list[bool]
) -> None:
    async with training(clock, 3) as (here, trainers):
        call = Call("all_reduce", "float32", (1000,), "sum", strategy="ring")

        async def run(trainer: Trainer) -> None:
            await trainer.run(call, ones(1000))

        await together(*[lambda t=t: run(t) for t in trainers])
    async with village(clock, 2) as here:
        await reduce_all(await here.job(*here.machines))
    assert probes == []


@pytest.mark.slow
async def test_the_table_is_made_again_ever_more_seldom_from_what_is_known_by_then(
    clock: MockClock, probes: list[bool]
) -> None:
    async with training(clock, 3) as (here, trainers):
        agreements: list[int] = []
        for op in range(1, 100):
            probes.clear()
            await reduce_all(trainers)
            agreements += [op] * bool(probes)
            if op == 1:
                assert probes == [True] * 3
                await trio.sleep(60.0)
            assert True not in probes or op == 1
        assert agreements == [1, 9, 81]
        check_alike(here, 3)


async def test_the_round_trip_that_counts_is_the_least_one_of_the_path_in_use(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        first, second = (machine.agent.membership for machine in here.machines)
        other = second.state.me
        assert first.round_trips_s([other])[other] < 0.004
        first.path_changed(other.node, WIFI, 0.004, relayed=False)
        assert first.round_trips_s([other]) == {other: 0.004}
        first.path_changed(other.node, WIRED, 0.0, relayed=False)  # it was not measured
        assert first.round_trips_s([other]) == {other: 0.004}
