"""A lane over several connections, some of which are lost."""

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.core.wire.records import MAX_BODY_BYTES, OVERHEAD_BYTES, Sealer
from pmesh.core.wire.subflows import (
    ACK_BODY_BYTES,
    WINDOW_RECORDS,
    Ack,
    encode_ack,
    frame_bytes,
)
from pmesh.errors import LaneBroken
from pmesh.net.lanes.executor import OpStage, StageRunner
from pmesh.net.lanes.lane import WAKE_UP_BYTES, Lane, LaneWait, PathLost, Steps
from pmesh.net.lanes.multipath import (
    MAX_SUBFLOWS,
    PUSH_S,
    TICK_S,
    MultipathLane,
)
from pmesh.net.lanes.opening import offer_of_connection
from pmesh.net.lanes.subflows import MOST_AT_ONCE, ConnectionFacts
from tests.net.lanes.multipath import Paths, connections, drop, names_of, paths_between, sockets
from tests.net.lanes.parts import either_way, receive_all, send_all
from tests.worlds.lanes import header

pytestmark = pytest.mark.usefixtures("ends")


@contextlib.contextmanager
def eager_threads() -> Iterator[None]:
    """They take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


BODIES = [np.random.default_rng(i).bytes(MAX_BODY_BYTES) for i in range(8)]


async def received(lane: Lane, size: int, *, segment: int = 0, roster: int = 1) -> bytes:
    into = bytearray(size)
    await lane.receive(header(size, segment=segment, roster=roster), memoryview(into))
    return bytes(into)


async def move(paths: Paths, moving_bytes: int, *, bodies: list[bytes] = BODIES) -> None:
    got = list[bytes]()

    def sends() -> Steps:
        yield from send_all(paths.sending, bodies)
        yield from paths.sending.flushes()

    parts = [
        OpStage(sends(), paths.sending),
        OpStage(receive_all(paths.receiving, [len(body) for body in bodies], got), paths.receiving),
    ]
    await StageRunner().run(parts, moving_bytes=moving_bytes)
    assert got == bodies


@either_way
async def test_records_go_over_all_paths_and_arrive_in_order(moving_bytes: int) -> None:
    async with paths_between(3, buffer_bytes=65536) as paths:
        with trio.fail_after(20):
            await move(paths, moving_bytes)
            assert names_of(paths.sending) == {"path-0", "path-1", "path-2"}
            assert "from mac-0" in repr(paths.receiving)
            await paths.sending.send(header(1), b"!")  # both are the event loop's again
            assert await received(paths.receiving, 1) == b"!"


@either_way
@pytest.mark.parametrize("lost_by", ["sender", "receiver", "both"])
async def test_a_path_that_is_lost_in_the_middle_loses_nothing(
    moving_bytes: int, lost_by: str
) -> None:
    async with paths_between(2, buffer_bytes=65536) as paths, trio.open_nursery() as nursery:
        with trio.fail_after(20):
            nursery.start_soon(move, paths, moving_bytes)
            while paths.receiving.bytes_received < 2 * MAX_BODY_BYTES:
                await trio.lowlevel.checkpoint()
            if lost_by != "receiver":
                drop(paths.sending, "path-0")
            if lost_by != "sender":
                drop(paths.receiving, "path-0")


@either_way
async def test_an_op_does_not_wait_for_a_path_that_stalls_once_the_others_have_brought_all(
    moving_bytes: int,
) -> None:
    """It has half of a record, which the receiver, whose op has ended, will not read."""
    async with paths_between(1, buffer_bytes=65536) as paths:
        stalled = paths.add(ConnectionFacts(bytes_per_s=30e6), stalled=True)
        with trio.fail_after(20):
            await move(paths, moving_bytes)
            assert stalled in names_of(paths.sending)
            await paths.sending.send(header(1), b"!")
            assert await received(paths.receiving, 1) == b"!"


async def test_what_was_lost_after_the_op_had_ended_at_the_sender_is_sent_again() -> None:
    async with paths_between(2) as paths:
        with trio.fail_after(20):
            await paths.sending.send(header(1000), bytes(1000))
            await paths.sending.send(header(10, segment=1), bytes(10))
            assert paths.sending.idle
            for name in ("path-0", "path-1"):
                added = paths.add()
                drop(paths.receiving, name)  # with what has arrived, unread
                assert added in names_of(paths.receiving)
            assert await received(paths.receiving, 1000) == bytes(1000)
            assert await received(paths.receiving, 10, segment=1) == bytes(10)


async def test_a_path_that_comes_back_in_time_saves_the_lane(
    autojump_clock: MockClock,
) -> None:
    async with paths_between(1) as paths, trio.open_nursery() as nursery:

        async def receive() -> None:
            assert await received(paths.receiving, 3) == b"abc"

        nursery.start_soon(receive)
        for lane in (paths.sending, paths.receiving):
            drop(lane, "path-0")
        await paths.sending.send(header(3), b"abc")
        await trio.sleep(1)
        assert not paths.sending.idle
        paths.add()
    assert autojump_clock.current_time() < 2


async def test_without_any_path_a_lane_breaks_after_a_while(autojump_clock: MockClock) -> None:
    async with paths_between(2) as paths:
        for name in ("path-0", "path-1"):
            drop(paths.receiving, name)
        with pytest.raises(PathLost, match="from mac-0 has lost its path"):
            await received(paths.receiving, 3)
        assert 1 < autojump_clock.current_time() < 4
        spare, other = connections(paths.offer, 2, sockets())
        with pytest.raises(LaneBroken):
            paths.receiving.join(other, 2, ConnectionFacts())  # too late
        spare.close()


@either_way
async def test_closing_a_lane_ends_the_op_that_uses_it(moving_bytes: int) -> None:
    async with paths_between(2) as paths, trio.open_nursery() as nursery:

        async def run() -> None:
            parts = [
                OpStage(receive_all(paths.receiving, [5], []), paths.receiving),
                OpStage(send_all(paths.sending, []), paths.sending),
            ]
            with pytest.raises(LaneBroken, match="from mac-0 was closed"):
                await StageRunner().run(parts, moving_bytes=moving_bytes)

        with trio.fail_after(10):
            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            for _ in range(2):
                paths.receiving.close()


async def test_a_full_window_makes_the_sender_wait_until_something_has_arrived() -> None:
    async with paths_between(2, buffer_bytes=65536) as paths, trio.open_nursery() as nursery:
        bodies = BODIES * 3
        with trio.fail_after(20):
            nursery.start_soon(move_slowly, paths, bodies)
            for segment, body in enumerate(bodies):
                assert await received(paths.receiving, len(body), segment=segment) == body


async def move_slowly(paths: Paths, bodies: list[bytes]) -> None:
    for segment, body in enumerate(bodies):
        await paths.sending.send(header(len(body), segment=segment), body)
    await paths.sending.flush()


async def test_a_record_of_a_lower_roster_is_dropped() -> None:
    async with paths_between(2) as paths:
        with trio.fail_after(10):
            await paths.sending.send(header(3, roster=1), b"old")
            await paths.sending.send(header(5, roster=2), b"early")
            assert await received(paths.receiving, 5, roster=2) == b"early"
            assert paths.receiving.records_dropped == 1


async def test_a_connection_that_brings_garbage_is_lost_and_the_lane_is_not() -> None:
    async with paths_between(2) as paths:
        with trio.fail_after(10):
            paths.sockets[0][0].send(b"\xff" * 48)
            await paths.sending.send(header(3), b"abc")
            assert await received(paths.receiving, 3) == b"abc"
            assert names_of(paths.receiving) == {"path-1"}
            paths.sending.pump()
            assert names_of(paths.sending) == {"path-1"}


async def test_a_peer_that_repeats_a_record_without_end_holds_nobody_up() -> None:
    """Who waits comes back, and can be stopped, before all of it is read."""
    async with paths_between(1) as paths:
        [(raw, _)] = paths.sockets
        with trio.fail_after(10):
            await paths.sending.send(header(3), b"abc")
            assert await received(paths.receiving, 3) == b"abc"
            before, again = paths.receiving.bytes_received, bytes(frame_bytes(0))  # number 0
            raw.send(again * 3 * MOST_AT_ONCE)
            steps = receive_all(paths.receiving, [3, 5], [b"abc"])
            for times in (1, 2):
                assert next(steps) is LaneWait.READABLE
                read = paths.receiving.bytes_received - before
                assert read == times * MOST_AT_ONCE * len(again)


async def test_a_peer_that_acknowledges_without_end_holds_nobody_up() -> None:
    async with paths_between(1) as paths:
        [(ours, theirs)] = paths.sockets
        sealer = Sealer(offer_of_connection(paths.offer, 0).return_key)
        record = memoryview(bytearray(OVERHEAD_BYTES + ACK_BODY_BYTES))
        said, body = bytearray(), encode_ack(Ack(0, 0, waiting=True))
        for _ in range(3 * MOST_AT_ONCE):
            sealer.seal(header(ACK_BODY_BYTES), body, record)
            said += record
        theirs.send(said)
        paths.sending.pump()
        assert len(ours.recv(10**6, socket.MSG_PEEK)) == len(said) - MOST_AT_ONCE * len(record)
        for _ in range(2):
            paths.sending.pump()
        with pytest.raises(BlockingIOError):
            ours.recv(1, socket.MSG_PEEK)
        assert names_of(paths.sending) == {"path-0"}


# --- the lane ends


async def test_what_was_sent_before_the_lane_is_closed_arrives(
    autojump_clock: MockClock,
) -> None:
    """A closed socket that gets an acknowledgement resets, and loses what has not arrived."""
    async with paths_between(1, tcp=True) as paths:
        [(_, receiving)] = paths.sockets
        receiving.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # the rest is on its way
        with trio.fail_after(20):
            await move_slowly(paths, BODIES[:3])
            paths.sending.close()
            await trio.sleep(1)
            for segment, body in enumerate(BODIES[:3]):
                assert await received(paths.receiving, len(body), segment=segment) == body
            with pytest.raises(LaneBroken, match="from mac-0 ended"):
                await received(paths.receiving, 1, segment=3)
    assert autojump_clock.current_time() < 2


async def test_a_lane_whose_peer_is_gone_lingers_no_longer_than_it_must(
    autojump_clock: MockClock,
) -> None:
    async with paths_between(2) as paths, trio.open_nursery() as nursery:
        nursery.start_soon(paths.sending.tend)
        await paths.sending.send(header(3), b"abc")  # and nobody receives it
        paths.sending.close()
    assert autojump_clock.current_time() < 5


async def test_while_a_thread_has_the_lane_it_is_tended_less_often(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread writes the rest by itself, and each time would wake it."""
    async with paths_between(1, buffer_bytes=65536) as paths:
        lane, pumped, counts = paths.sending, list[bool](), list[int]()
        await lane.send(header(len(BODIES[0])), BODIES[0])  # more than the socket takes
        monkeypatch.setattr(lane, "pump", lambda *, outside: pumped.append(outside))
        for lends in (False, True):
            if lends:
                lane.lend(lambda: None)
            await trio.sleep(TICK_S)  # for which it may have begun to wait
            pumped.clear()
            await trio.sleep(10 * TICK_S)
            counts.append(len(pumped))
        lane.take_back()
    assert counts[0] > 5 * TICK_S / PUSH_S
    assert counts[1] <= 11
    assert autojump_clock.current_time() < 5


@either_way
@pytest.mark.parametrize("who", ["sending", "receiving"])
async def test_a_lane_that_the_peer_closes_ends_at_once(moving_bytes: int, who: str) -> None:
    with trio.fail_after(1):  # less than a path that fails is waited for
        await end_while_it_waits(moving_bytes, who)


async def end_while_it_waits(moving_bytes: int, who: str) -> None:
    async with paths_between(2, buffer_bytes=65536) as paths, trio.open_nursery() as nursery:
        ours: MultipathLane = getattr(paths, who)
        theirs = paths.sending if ours is paths.receiving else paths.receiving

        async def run() -> None:
            steps = send_all(ours, 3 * BODIES) if ours.sending else receive_all(ours, [5], [])
            idle = OpStage(receive_all(ours, [], []), None)
            with pytest.raises(LaneBroken, match=r"mac-. ended"):
                await StageRunner().run([OpStage(steps, ours), idle], moving_bytes=moving_bytes)

        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        theirs.close()


async def test_a_connection_joins_once_and_not_too_many_do() -> None:
    async with paths_between(2) as paths:
        for _ in range(MAX_SUBFLOWS - 2):
            paths.add()
        for index in (0, 1, MAX_SUBFLOWS):
            spare, other = connections(paths.offer, index, sockets())
            with pytest.raises(LaneBroken, match=f"takes no connection with index {index}"):
                paths.sending.join(spare, index, ConnectionFacts())
            assert spare.is_closed
            other.close()


# --- no wake-up is lost


async def receive_copy(paths: Paths, moving_bytes: int, nursery: trio.Nursery) -> str:
    """Receive a record of which a stalled path has the half.

    Returns the path that has brought it, where the sender has yet to read that it has arrived.
    """
    paths.add(ConnectionFacts(bytes_per_s=30e6), stalled=True)
    for lane in (paths.sending, paths.receiving):
        drop(lane, "path-0")

    def sends() -> Steps:
        yield from send_all(paths.sending, BODIES[:1])
        yield from paths.sending.flushes()

    stages = [OpStage(sends(), paths.sending)]
    nursery.start_soon(partial(StageRunner().run, stages, moving_bytes=moving_bytes))
    while not paths.sending.bytes_sent:
        await trio.lowlevel.checkpoint()
    good, got = paths.add(), list[bytes]()
    for _ in receive_all(paths.receiving, [MAX_BODY_BYTES], got):
        await trio.lowlevel.checkpoint()
    assert got == BODIES[:1]
    return good


@either_way
async def test_who_waits_is_woken_though_the_only_path_that_is_left_is_full(
    moving_bytes: int,
) -> None:
    with trio.fail_after(20):
        async with paths_between(1, buffer_bytes=65536) as paths, trio.open_nursery() as nursery:
            drop(paths.receiving, await receive_copy(paths, moving_bytes, nursery))
            paths.sending.pump(outside=True)  # it learns that all has arrived, and loses the path


@either_way
async def test_that_all_has_arrived_is_said_again_where_the_path_was_lost_that_said_it(
    moving_bytes: int,
) -> None:
    with trio.fail_after(20):
        async with paths_between(1, buffer_bytes=65536) as paths, trio.open_nursery() as nursery:
            good = await receive_copy(paths, moving_bytes, nursery)
            for lane in (paths.sending, paths.receiving):
                drop(lane, good)
            paths.add()


async def test_a_small_record_behind_the_rest_of_a_large_one_wakes_who_waits_for_much() -> None:
    bodies = [b"small", BODIES[0]]
    with trio.fail_after(20):
        async with paths_between(1, buffer_bytes=65536, tcp=True) as paths:
            paths.receiving.wake_up_bytes = WAKE_UP_BYTES
            paths.add(ConnectionFacts(bytes_per_s=1e9, round_trip_s=1e-3))  # takes the large one
            stalled = paths.add(ConnectionFacts(bytes_per_s=1e6), stalled=True)
            for lane in (paths.sending, paths.receiving):
                drop(lane, "path-0")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(move_slowly, paths, bodies)
                steps = receive_all(paths.receiving, [len(body) for body in bodies], [])
                while (
                    next(steps) is LaneWait.TURN or paths.receiving.bytes_received < WAKE_UP_BYTES
                ):
                    await trio.lowlevel.checkpoint()
                drop(paths.sending, stalled)  # so the small one goes behind the large one
                for wait in steps:
                    await paths.receiving.wait_for(wait)


async def test_acknowledgements_that_are_read_between_the_calls_wake_a_sender_that_waits() -> None:
    """It waits for the socket, which has nothing more to say; and its window is full."""
    with trio.fail_after(5):
        async with paths_between(2) as paths, trio.open_nursery() as nursery:
            nursery.start_soon(move_slowly, paths, [b"!"] * (WINDOW_RECORDS + 10))
            await wait_all_tasks_blocked()
            assert not paths.sending.idle
            for segment in range(WINDOW_RECORDS):  # without a turn for anybody else
                steps = paths.receiving.receives(
                    header(1, segment=segment), memoryview(bytearray(1))
                )
                assert set(steps) <= {LaneWait.TURN}
            paths.receiving.pump(outside=True)
            paths.sending.pump(outside=True)


async def test_who_loses_the_last_connection_while_it_waits_is_told() -> None:
    with trio.fail_after(1):
        async with paths_between(1) as paths, trio.open_nursery() as nursery:

            async def receive() -> None:
                with pytest.raises(LaneBroken, match="from mac-0 ended"):
                    await received(paths.receiving, 3)

            nursery.start_soon(receive)
            await wait_all_tasks_blocked()
            [(sending, _)] = paths.sockets
            sending.shutdown(socket.SHUT_RDWR)


async def test_a_thread_may_work_with_the_lane_while_paths_come_and_go() -> None:
    async with paths_between(2, buffer_bytes=65536) as paths:
        began, ended = threading.Event(), threading.Event()

        def look() -> None:
            began.set()
            while not ended.is_set():
                assert paths.sending.idle

        def change() -> None:
            lost = "path-0"
            for _ in range(30):
                added = paths.add()
                for lane in (paths.sending, paths.receiving):
                    drop(lane, lost)
                lost = added

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, look)
            await trio.to_thread.run_sync(began.wait)
            try:
                with eager_threads():
                    change()
            finally:
                ended.set()


async def test_how_fast_data_come_is_measured() -> None:
    async with paths_between(1, buffer_bytes=65536) as paths:
        with trio.fail_after(20):
            await move(paths, 0)
        [(nbytes, took_s)] = paths.receiving.paces.values()
        assert 0 < nbytes <= sum(map(len, BODIES)) + 2**20
        assert took_s > 0


async def test_how_fast_data_come_is_measured_for_each_path() -> None:
    async with paths_between(2, buffer_bytes=65536) as paths, trio.open_nursery() as nursery:

        async def receive() -> None:
            for segment, body in enumerate(BODIES[:2]):
                assert await received(paths.receiving, len(body), segment=segment) == body

        for segment, body in enumerate(BODIES[:2]):
            await paths.sending.send(header(len(body), segment=segment), body)
        with trio.fail_after(20):
            nursery.start_soon(receive)
            await wait_all_tasks_blocked()  # in the middle of a record on both
            await paths.sending.flush()
    paces = paths.receiving.paces
    assert {ours for ours, _ in paces} == {"path-0", "path-1"}
    assert all(0 < pace.nbytes <= MAX_BODY_BYTES and pace.took_s > 0 for pace in paces.values())
