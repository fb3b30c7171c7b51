"""Ranks find out what their edges cost: together, seldom, and only for a call that asks for it."""

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.jobs import op_task
from pmesh.agent.lanes import edge_costs
from pmesh.agent.lanes.edge_costs import RingCosts
from pmesh.agent.mesh.links import LivePath
from pmesh.agent.mesh.membership import Membership
from pmesh.core.links.health import WIFI, WIRED
from pmesh.core.ops.cost import EdgeCost, Edges
from pmesh.core.topology.ranks import join_ranks
from pmesh.core.values import OpOutcome, Roster, Trainer
from pmesh.core.wire.calls import Call
from pmesh.core.wire.records import RecordHeader
from pmesh.ids import OpNumber, TrainerId
from pmesh.net.lanes.ring import RingPosition
from pmesh.net.links import path
from tests.worlds.faults import Faults, Real
from tests.worlds.ranks import ME, OTHER, THIRD, failed, roster, trainer
from tests.worlds.trainer import TrainerClient, together, until
from tests.worlds.village import Village, training, village
from tests.worlds.village_ops import ones, ranks_of, reduce_all, swallow

Lanes: TypeAlias = tuple[tuple[TrainerId, TrainerId], ...]


@pytest.fixture
def probes(faults: Faults) -> list[bool]:
    """For each rank of each agreement, whether it has sent a probe."""
    seen = list[bool]()

    async def probe(real: Real, ring: RingPosition, header: RecordHeader, *, sends: bool) -> object:
        seen.append(sends)
        return await real(ring, header, sends=sends)

    faults.watch(edge_costs, "_probe", probe)
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


def pairs_that_moved(here: Village, nbytes: int) -> set[tuple[int, int]]:
    """The pairs of ranks between which a lane has moved more than that; the lower one first."""
    pairs = set[tuple[int, int]]()
    for rank in ranks_of(here):
        names = [trainer.name for trainer in rank.roster.trainers]
        for lane in rank.lanes.all_open():
            if rank.rank is not None and lane.bytes_sent + lane.bytes_received > nbytes:
                low, high = sorted((rank.rank, names.index(lane.peer)))
                pairs.add((low, high))
    return pairs


RING_OF_FOUR = {(0, 1), (1, 2), (2, 3), (0, 3)}


async def test_a_first_guess_leaves_no_edge_out(clock: MockClock, faults: Faults) -> None:
    """It is made in a busy time, and an edge without data would stay as slow as it seemed."""

    async def probe(ring: RingPosition, header: RecordHeader, *, sends: bool) -> int:
        del header, sends
        return 800_000 if ring.rank == 2 else 8_000  # 10 Mbit/s from rank 1, else 1 Gbit/s

    faults.instead(edge_costs, "_probe", probe)
    count = 1_000_000
    async with training(clock, 4) as (here, trainers):
        first = ranks_of(here)[0].roster.trainers[0].member
        faults.instead(Membership, "reported_mbit_s", lambda here, _: 10 * (here.state.me == first))
        await reduce_all(trainers, ones(count))
        assert pairs_that_moved(here, 4 * count) == RING_OF_FOUR
        (edges,) = {rank.costs.edges for rank in ranks_of(here)}
        assert edges is not None
        betas = {edges.costs[a][b].beta_ps for a, b in itertools.permutations(range(4), 2)}
        assert betas == {8_000}  # as the fastest guess: a busy machine makes all others too slow


async def test_a_large_sum_does_without_the_one_edge_that_is_known_to_be_slow(
    clock: MockClock, faults: Faults
) -> None:
    count = 1_000_000
    async with training(clock, 4) as (here, trainers):
        members = [trainer.member for trainer in ranks_of(here)[0].roster.trainers]
        slow = members[1:3]
        faults.instead(
            Membership,
            "reported_mbit_s",
            lambda here, to: 10 if here.state.me in slow and to in slow else 1000,
        )
        for _ in range(edge_costs.AGAIN_AFTER):
            await reduce_all(trainers)
        await reduce_all(trainers, ones(count))
        assert pairs_that_moved(here, 4 * count) == RING_OF_FOUR - {(1, 2)}


@pytest.mark.parametrize("known", [[1000, 0, 0, 0], [100, 1000, 0, 0]])
async def test_what_is_not_known_yet_counts_as_slow_as_the_slowest_that_is(
    clock: MockClock, faults: Faults, known: list[int]
) -> None:
    """A guess beside a measurement may be eight times as fast: it says nothing of an edge."""
    async with training(clock, 4) as (here, trainers):
        members = [trainer.member for trainer in ranks_of(here)[0].roster.trainers]
        by_member = dict(zip(members, known, strict=True))
        faults.instead(Membership, "reported_mbit_s", lambda here, _: by_member[here.state.me])
        for _ in range(edge_costs.AGAIN_AFTER + 1):
            await reduce_all(trainers)
        (edges,) = {rank.costs.edges for rank in ranks_of(here)}
        assert edges is not None
        along = [edges.costs[rank][(rank + 1) % 4].beta_ps for rank in range(4)]
        slowest = min(filter(None, known))
        assert along == [8_000_000 // (mbit_s or slowest) for mbit_s in known]


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
async def test_after_a_loss_the_table_serves_some_ops_and_is_made_again_from_what_is_known(
    clock: MockClock, probes: list[bool]
) -> None:
    async with training(clock, 4) as (here, trainers):
        await reduce_all(trainers)
        probes.clear()
        await trio.sleep(60.0)  # heartbeats report what the edges bring
        await trainers[3].leave()
        for _ in range(edge_costs.AGAIN_AFTER):
            await reduce_all(trainers[:3])
            assert probes == []
            check_alike(here, 3)
        await reduce_all(trainers[:3])
        assert probes == [False] * 3
        check_alike(here, 3)


FOUR = [trainer(TrainerId(number)) for number in range(4)]
THREE = FOUR[:3]
NEW = TrainerId(4)
CHAIN = ((ME, OTHER), (OTHER, THIRD))
"""The lanes that the loss of the last of four ranks leaves."""


def edges_of(size: int, beta_ps: int) -> Edges:
    return join_ranks(tuple(tuple(EdgeCost(a, beta_ps) for _ in range(size)) for a in range(size)))


def costs_of(*made_in: int) -> RingCosts:
    """Of four ranks that have made a table in each of these ops, each with another bandwidth."""
    costs = RingCosts()
    for place, op in enumerate(made_in):
        costs.agreed(edges_of(4, 100 + place), op)
    return costs


def after_loss(
    *outcomes: OpOutcome, trainers: Sequence[Trainer] = THREE, lanes: Lanes = CHAIN
) -> Roster:
    return msgspec.structs.replace(roster(3, *outcomes, trainers=trainers), lanes=lanes)


def betas_after(costs: RingCosts, after: Roster, *, ended: int) -> set[int]:
    """The bandwidths in the table that is kept; none if there is no such table."""
    kept = costs.follow(roster(2, trainers=FOUR), after, ended=ended).edges
    return set() if kept is None else {cost.beta_ps for row in kept.costs for cost in row}


def test_a_table_is_kept_after_a_loss_for_the_ranks_that_are_left() -> None:
    costs = costs_of(0).follow(roster(2, trainers=FOUR), after_loss(), ended=0)
    assert costs.edges == edges_of(3, 100)
    assert next(op for op in range(5, 5 + 2 * edge_costs.AGAIN_AFTER) if costs.is_due(op)) == 13


@pytest.mark.parametrize(
    ("outcomes", "ended", "betas"),
    [
        ([], 8, {101}),
        ([], 7, {100}),  # it runs again: only some ranks may have the second table
        ([OpOutcome(OpNumber(8), (ME,), holders=(ME,))], 7, {101}),  # this rank fetches its result
        ([failed(OpNumber(8))], 8, {100}),  # it had returned here, but it has failed
    ],
)
def test_a_table_counts_if_its_op_has_completed_anywhere(
    outcomes: list[OpOutcome], ended: int, betas: set[int]
) -> None:
    assert betas_after(costs_of(0, 8), after_loss(*outcomes), ended=ended) == betas


def test_the_first_table_is_dropped_if_its_op_runs_again() -> None:
    assert betas_after(costs_of(4), after_loss(), ended=3) == set()


@pytest.mark.parametrize(
    "after",
    [
        after_loss(lanes=()),  # a lane broke
        after_loss(lanes=CHAIN[:1]),  # the third may come from an earlier roster
        after_loss(trainers=[*THREE, trainer(NEW)]),
        after_loss(trainers=[*THREE, trainer(NEW)], lanes=(*CHAIN, (NEW, ME))),  # no leader says so
        after_loss(trainers=FOUR[:2]),
    ],
)
def test_no_table_is_kept_if_a_rank_may_lack_it_or_none_is_needed(after: Roster) -> None:
    assert betas_after(costs_of(0), after, ended=0) == set()


async def test_two_ranks_and_a_strategy_that_is_named_ask_for_nothing(
    clock: MockClock, probes: list[bool]
) -> None:
    async with training(clock, 3) as (here, trainers):
        call = Call("all_reduce", "float32", (1000,), "sum", strategy="ring")

        async def run(trainer: TrainerClient) -> None:
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
        assert agreements == [1, 9, 33]
        check_alike(here, 3)


async def test_the_round_trip_that_counts_is_the_least_one_of_the_path_in_use(
    clock: MockClock, faults: Faults
) -> None:
    faults.instead(LivePath, "wired_round_trip_s", lambda _: None)  # as where no system tells
    async with village(clock, 2) as here:
        first, second = (machine.agent.membership for machine in here.machines)
        other = second.state.me
        assert first.round_trips_s([other])[other] < 0.004
        first.path_changed(other.node, WIFI, 0.004, relayed=False)
        assert first.round_trips_s([other]) == {other: 0.004}
        first.path_changed(other.node, WIRED, 0.0, relayed=False)  # it was not measured
        assert first.round_trips_s([other]) == {other: 0.004}


@pytest.mark.parametrize(
    ("kind", "system_s", "counts_s"),
    [
        ("wired", 0.001, 0.001),
        ("wired", 0.009, 0.004),
        ("wired", None, 0.004),
        ("wifi", 0.001, 0.004),
    ],
)
async def test_by_a_cable_the_wait_for_a_core_is_no_part_of_the_round_trip(
    clock: MockClock, faults: Faults, kind: str, system_s: float | None, counts_s: float
) -> None:
    """A busy machine answers late, and a ring that takes its edges for far ones is slower."""
    faults.pretend(path, "round_trip_of", lambda _: system_s)
    async with village(clock, 2) as here:
        first, second = here.machines
        other = second.agent.membership.state.me
        for live in first.agent.peers.links[other.node].paths.values():
            live.kind = kind
        first.agent.membership.path_changed(other.node, WIRED, 0.004, relayed=False)
        assert first.agent.membership.round_trips_s([other]) == {other: counts_s}


async def test_costs_on_which_ranks_agreed_as_a_view_came_are_not_those_of_its_roster(
    clock: MockClock, faults: Faults
) -> None:
    followed = list[RingCosts]()

    async def agree(real: Real, ring: RingPosition, *args: Any, **settings: Any) -> Edges:  # noqa: ANN401 - as the call's
        edges: Edges = await real(ring, *args, **settings)
        if ring.rank == 0 and not followed:
            number = rank.roster.number + 1
            rank.follow(msgspec.structs.replace(rank.roster, number=number))
            followed.append(rank.costs)
        return edges

    faults.around(op_task, "agree_on_costs", agree)
    async with training(clock, 3) as (here, trainers), trio.open_nursery() as nursery:
        rank = ranks_of(here)[0]
        for each in trainers:
            nursery.start_soon(swallow, each.reduce(ones(9)))
        await until(lambda: bool(followed))
        await trio.sleep(0.1)
        assert followed[0].edges is None
        nursery.cancel_scope.cancel()
