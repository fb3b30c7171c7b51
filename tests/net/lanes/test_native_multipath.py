"""The native library runs plans over lanes of several connections, as Python does."""

from collections.abc import Callable, Collection

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from pmesh import native
from pmesh.core.ops.moving import plan_all_to_all, plan_broadcast
from pmesh.core.ops.reducing import plan_ring
from pmesh.core.wire.subflows import NUMBER_BYTES, WINDOW_RECORDS
from pmesh.errors import LaneBroken
from pmesh.net.lanes.executor import begin_plan
from pmesh.net.lanes.lane import CallsDiffer, PathLost
from pmesh.net.lanes.multipath import MultipathLane
from pmesh.net.lanes.native import LibraryThreads, Patience
from pmesh.net.lanes.subflows import ConnectionFacts
from tests.net.lanes.multipath import (
    CabledWeb,
    cabled_web,
    connections,
    drop,
    names_of,
    sockets,
)
from tests.worlds.examples import examples
from tests.worlds.faults import Faults
from tests.worlds.lanes import (
    OpOfAllRanks,
    bytes_on_the_wire,
    header,
    inputs_of,
    is_closed,
    offer_between,
)
from tests.worlds.trainer import until

COUNTS = {"by the caller": 1000, "in one thread": 200_000, "in two threads": 3_000_001}
each_count = pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
EXECUTORS = {"library": (), "Python": (0, 1), "both": (1,)}
each_executor = pytest.mark.parametrize("in_python", EXECUTORS.values(), ids=EXECUTORS)


def ring(
    count: int, *, size: int = 2, op: int = 0, in_python: Collection[int] = ()
) -> OpOfAllRanks:
    return OpOfAllRanks(
        plans=[plan_ring(rank=r, size=size, count=count, itemsize=4) for r in range(size)],
        sources=[row.view(np.uint8) for row in inputs_of(size, count, "int32", seed=op)],
        results=[4 * count] * size,
        dtype="int32",
        reduction="sum",
        op=op,
        in_python=in_python,
    )


async def reduce(asked: OpOfAllRanks, lanes: CabledWeb) -> None:
    """All ranks get the sum, with the same bits."""
    results = await asked.everywhere(lanes)
    assert len({result.tobytes() for result in results}) == 1
    sums = np.sum([source.view(np.int32) for source in asked.sources], axis=0)
    np.testing.assert_array_equal(results[0].view(np.int32), sums)


def is_at_work(lanes: CabledWeb) -> bool:
    return any(lane.bytes_sent for lane in lanes.sending.values())


@each_executor
@each_count
async def test_an_op_goes_over_all_paths_by_the_bytes_of_its_records(
    count: int, in_python: Collection[int]
) -> None:
    with trio.fail_after(60):
        async with cabled_web(buffer_bytes=65536) as lanes:
            for op in range(3):
                asked = ring(count, op=op, in_python=in_python)
                before = [lanes.bytes_sent(rank) for rank in range(2)]
                await reduce(asked, lanes)
                for rank, plan in enumerate(asked.plans):
                    records = sum(map(len, plan.sends.values()))
                    whole = bytes_on_the_wire(plan) + NUMBER_BYTES * records
                    # What was sent once more as it was late, and what an earlier op has left.
                    assert lanes.bytes_sent(rank) - before[rank] >= whole - 64
            for lane in lanes.sending.values():
                assert isinstance(lane, MultipathLane)
                assert lane.runs_in_library
                assert names_of(lane) == {"path-0", "path-1"}


@each_executor
@each_count
async def test_paths_that_come_and_go_in_the_middle_of_ops_lose_nothing(
    count: int, in_python: Collection[int], *, is_quick: bool
) -> None:
    with trio.fail_after(120):
        async with cabled_web(buffer_bytes=65536) as lanes, trio.open_nursery() as nursery:
            ended = trio.Event()
            nursery.start_soon(change_paths, lanes, ended)
            for op in range(3 if is_quick else 12):
                await reduce(ring(count, op=op, in_python=in_python), lanes)
            ended.set()


async def change_paths(lanes: CabledWeb, ended: trio.Event) -> None:
    """At one end or at both, as often as there is time."""
    dice = np.random.default_rng(1)
    while not ended.is_set():
        for paths in lanes.paths:
            kept = paths.add()
            ends = [paths.sending, paths.receiving]
            for lane in [ends, ends[:1], ends[1:]][dice.integers(3)]:
                for name in names_of(lane) - {kept}:
                    drop(lane, name)
        await trio.sleep(dice.choice([0, 0.001, 0.01]))


@each_count
async def test_an_op_that_is_stopped_leaves_the_lanes_whole_for_the_next_roster(
    count: int, *, is_quick: bool
) -> None:
    dice = np.random.default_rng(2)
    with trio.fail_after(120):
        async with cabled_web(buffer_bytes=65536) as lanes:
            for roster in range(1, 6 if is_quick else 20):
                lanes.roster = roster
                with trio.move_on_after(dice.choice([0, 0.0005, 0.005, 0.03])):
                    await ring(count, size=3, op=roster).everywhere(lanes)
            lanes.roster += 1
            await reduce(ring(count, size=3, op=lanes.roster), lanes)


@each_executor
async def test_a_sender_whose_window_is_full_goes_on_once_something_was_read(
    in_python: Collection[int],
) -> None:
    """The system has taken all that the window holds; so only an acknowledgement lets it go on."""
    nbytes = 100 * (WINDOW_RECORDS + 50)
    asked = OpOfAllRanks(
        plans=[
            plan_broadcast(rank=r, size=2, root=0, nbytes=nbytes, segment_bytes=100)
            for r in range(2)
        ],
        sources=[np.arange(nbytes).astype(np.uint8), np.empty(0, np.uint8)],
        results=[0, nbytes],
        in_python=in_python,
    )
    with trio.fail_after(20):
        async with cabled_web() as lanes, trio.open_nursery() as nursery:
            nursery.start_soon(asked.at, 0, lanes)
            await wait_all_tasks_blocked(0.01)
            assert (await asked.at(1, lanes)).tobytes() == asked.sources[0].tobytes()


@examples(20)
@given(st.integers(1, 4), st.sampled_from([1, 5000, 300_001]), st.sets(st.integers(0, 3)))
async def test_any_ranks_in_python_and_the_others_in_the_library_get_the_same(
    size: int, count: int, in_python: set[int]
) -> None:
    with trio.fail_after(60):
        async with cabled_web() as lanes:
            await reduce(ring(count, size=size, in_python=in_python), lanes)


async def fails(
    count: int, error: type[Exception], text: str, harm: Callable[[CabledWeb], None]
) -> None:
    """An op that waits for what never comes ends with this error after `harm`."""
    asked = ring(count)
    with trio.fail_after(10):
        async with cabled_web() as lanes, trio.open_nursery() as nursery:

            async def run() -> None:
                with pytest.raises(error, match=text):
                    await asked.at(0, lanes)

            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            await until(lambda: is_at_work(lanes))
            harm(lanes)


@each_count
async def test_a_lane_that_is_closed_ends_the_op_that_uses_it(count: int) -> None:
    await fails(count, LaneBroken, "from mac-0 was closed", lambda web: web.receiving[1, 0].close())


@each_count
async def test_a_peer_that_closes_its_end_ends_the_op(count: int) -> None:
    await fails(count, LaneBroken, "from mac-0 ended", lambda web: web.sending[1, 0].close())


@each_count
async def test_an_op_without_any_path_ends_after_a_while(count: int) -> None:
    def lose_all(web: CabledWeb) -> None:
        lane = web.receiving[1, 0]
        assert isinstance(lane, MultipathLane)
        for name in names_of(lane):
            drop(lane, name)

    await fails(count, PathLost, "from mac-0 has lost its path", lose_all)


async def test_another_call_of_the_peer_is_noticed() -> None:
    asked = ring(200_000)
    asked.fingerprints = [9, 10]
    with trio.fail_after(10):
        async with cabled_web() as lanes:
            with pytest.RaisesGroup(CallsDiffer, allow_unwrapped=True, flatten_subgroups=True):
                await asked.everywhere(lanes)


async def test_a_small_op_ends_in_one_turn_of_the_event_loop() -> None:
    """Each has sent when the other one looks; no task could read meanwhile."""
    sizes = (0, 1000), (1000, 0)
    plans = [plan_all_to_all(rank=r, size=2, to=sizes[r], from_=sizes[r]) for r in range(2)]
    sources, results = [bytes([r + 1]) * 1000 for r in range(2)], [bytearray(1000) for _ in "ab"]
    async with cabled_web() as lanes:
        lanes.open(plans)
        begun: list[LibraryThreads | None] = []
        for rank, plan in enumerate(plans):
            ends = [lanes.receiving[1 - rank, rank], lanes.sending[rank, 1 - rank]]
            for lane in ends:
                lane.leads_away = True
            source, result = memoryview(sources[rank]), memoryview(results[rank])
            made = begin_plan(
                *(plan, ends, header()), source=source, result=result, dtype="", reduction=""
            )
            begun.append(made)
        for each in begun:
            assert each is not None
            assert each.ends_at_once(Patience())
    assert list(map(bytes, results)) == sources[::-1]


async def test_how_fast_data_come_is_measured_for_each_path() -> None:
    with trio.fail_after(60):
        async with cabled_web(buffer_bytes=65536) as lanes:
            await reduce(ring(3_000_001), lanes)
            paces = [lane.paces for lane in lanes.receiving.values()]
    names = {ours for measured in paces for ours, _ in measured}
    assert names
    assert names <= {"path-0", "path-1"}
    assert all(0 < pace.took_s < 60 for measured in paces for pace in measured.values())
    assert sum(pace.nbytes for measured in paces for pace in measured.values()) <= 40_000_000


async def test_a_system_without_a_pipe_breaks_the_lane(faults: Faults) -> None:
    offer = offer_between(0, 1, several=True)
    first, other = connections(offer, 0, sockets())
    with (
        faults.instead(native.library(), "pmesh_subflows_new", lambda *_: None),
        pytest.raises(LaneBroken, match="has no room: the system has no pipe"),
    ):
        MultipathLane(first, ConnectionFacts(), offer)
    assert is_closed(first)
    other.close()
