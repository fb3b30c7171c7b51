import math

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pmesh.core.ops.schedule import SEGMENT_BYTES
from pmesh.errors import LaneBroken
from pmesh.net.lanes import pipeline
from pmesh.net.lanes.collectives import CallsDiffer, RingPosition
from tests.worlds.lanes import header, inputs_of, reduce_all, ring_of


@pytest.fixture(autouse=True, params=["threads", "tasks"])
def tasks_for_large_ops_too(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pipeline, "THREADS_FROM_BYTES", 0 if request.param == "threads" else math.inf
    )


@pytest.mark.parametrize("count", [10, 2_000_000])
async def test_a_rank_that_called_something_else_is_noticed_next_to_it(count: int) -> None:
    inputs = inputs_of(3, count, "float32")
    with ring_of(3) as ring:
        with pytest.raises(ExceptionGroup) as caught:
            await reduce_all(ring, inputs, op=5, fingerprints=[9, 9, 8])
        # Both neighbours of the edges to and from mac-2 may notice before the test's nursery ends.
        errors = caught.value.exceptions
        assert all(isinstance(error, CallsDiffer) and error.op == 5 for error in errors)
        assert {str(error) for error in errors} <= {
            "mac-2 called something else as op 5",
            "mac-1 called something else as op 5",
        }


@pytest.mark.parametrize("count", [10, 2_000_000])
async def test_a_lost_neighbour_breaks_the_op_with_its_name(count: int) -> None:
    inputs = inputs_of(3, count, "float32")
    with ring_of(3) as ring:
        broken: list[str] = []

        async def notice(position: RingPosition) -> None:
            try:
                await reduce_all([position], inputs)
            except* LaneBroken as group:
                broken.extend(str(error) for error in group.exceptions)

        async with trio.open_nursery() as nursery:
            for position in ring[:2]:
                nursery.start_soon(notice, position)
            await wait_all_tasks_blocked()
            for lane in (ring[2].to_next, ring[2].from_previous):
                assert lane
                lane.close()
            with trio.move_on_after(1):
                while not broken:
                    await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert broken
        assert all("mac-2" in message for message in broken)


@pytest.mark.parametrize("count", [10, 50_000, 2_000_000])
async def test_after_a_cancelled_op_a_new_roster_goes_on_over_the_same_lanes(count: int) -> None:
    """V4, V7: what the old attempt left in lanes and sockets is dropped, at whatever point."""
    inputs = inputs_of(3, count, "int32")
    with ring_of(3, buffer_bytes=16_384) as ring:
        for roster in range(2, 6):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(reduce_all, ring[: roster % 3 + 1], inputs)
                    for _ in range(roster * 7):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            for position in ring:
                position.roster = roster
            with trio.fail_after(20):
                results = await reduce_all(ring, inputs)
            for result in results:
                np.testing.assert_array_equal(result, np.sum(inputs, axis=0, dtype=np.int32))


async def test_a_small_op_first_gets_rid_of_what_a_large_one_left_half_sent() -> None:
    inputs = inputs_of(2, 10, "int32")
    with ring_of(2, buffer_bytes=16_384) as ring:
        for position in ring:
            assert position.to_next
            position.to_next.post(header(SEGMENT_BYTES), bytes(SEGMENT_BYTES))
            assert not position.to_next.idle
            position.roster = 2
        with trio.fail_after(5):
            for result in await reduce_all(ring, inputs):
                np.testing.assert_array_equal(result, inputs[0] + inputs[1])
        assert [p.from_previous.records_dropped for p in ring if p.from_previous] == [1, 1]
