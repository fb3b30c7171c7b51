"""Parts of an op at work side by side: as tasks, and in threads."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from pmesh.core.wire.records import MAX_BODY_BYTES
from pmesh.errors import LaneBroken
from pmesh.net.lanes.executor import THREADS_FROM_BYTES, OpStage, StageRunner
from pmesh.net.lanes.lane import CallsDiffer, LaneWait, Steps
from tests.net.lanes.parts import either_way, receive_all, send_all
from tests.worlds.faults import Faults, Real
from tests.worlds.lanes import header, is_closed, lane_pair

BODY = bytes(range(256)) * (MAX_BODY_BYTES // 256)


def wait_for_ever(wait: LaneWait) -> Steps:
    while True:
        yield wait


@either_way
async def test_what_one_part_sends_another_receives(moving_bytes: int) -> None:
    bodies, got = [BODY, b"", b"abc", BODY[::-1]], list[bytes]()
    with lane_pair(buffer_bytes=4096) as (sending, receiving), trio.fail_after(10):
        parts = [
            OpStage(send_all(sending, bodies), sending),
            OpStage(receive_all(receiving, [len(body) for body in bodies], got), receiving),
        ]
        with assert_checkpoints():
            await StageRunner().run(parts, moving_bytes=moving_bytes)
        assert got == bodies
        await sending.send(header(1), b"!")  # both lanes are the event loop's again
        await receiving.receive(header(1), memoryview(bytearray(1)))


@either_way
async def test_a_part_waits_for_another_to_get_further(moving_bytes: int) -> None:
    pipe, done = StageRunner(), list[str]()

    def follow(name: str, after: str) -> Steps:
        while after not in done and after:
            yield LaneWait.PROGRESS
        yield LaneWait.TURN
        done.append(name)
        pipe.note_progress()

    parts = [OpStage(follow(name, after)) for name, after in ("cb", "ba", ("a", ""))]
    with trio.fail_after(10):
        await pipe.run(parts, moving_bytes=moving_bytes)
    assert done == ["a", "b", "c"]


async def test_many_bytes_move_in_threads_of_their_own_while_the_event_loop_runs() -> None:
    may_end, threads = threading.Event(), list[threading.Thread]()

    def work() -> Steps:
        threads.append(threading.current_thread())
        assert may_end.wait(10)
        yield LaneWait.TURN

    async with trio.open_nursery() as nursery:
        parts = [OpStage(work()) for _ in range(3)]
        run = partial(StageRunner().run, parts, moving_bytes=THREADS_FROM_BYTES)
        nursery.start_soon(run)
        with trio.fail_after(10):
            while len(threads) < 3:
                await trio.lowlevel.checkpoint()
        may_end.set()
    assert len({*threads, threading.current_thread()}) == 4


@either_way
@pytest.mark.parametrize(
    "wait", [LaneWait.READABLE, LaneWait.WRITABLE, LaneWait.CLOSED, LaneWait.PROGRESS]
)
async def test_a_part_that_waits_can_be_cancelled(moving_bytes: int, wait: LaneWait) -> None:
    sends = wait is LaneWait.WRITABLE
    with lane_pair(buffer_bytes=4096) as lanes, trio.fail_after(10):
        lane = lanes[0] if sends else lanes[1]
        if sends:  # until the socket takes no more
            lane.post(header(len(BODY)), BODY)
        steps, ended = wait_for_ever(wait), list[str]()

        async def run() -> None:
            parts = [OpStage(steps, lane), OpStage(wait_for_ever(LaneWait.PROGRESS))]
            await StageRunner().run(parts, moving_bytes=moving_bytes)
            ended.append("as if the op were complete")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert ended == []
        steps.close()  # ValueError if a thread still worked on it
        assert (lane.idle, sends) in {(True, False), (False, True)}


@either_way
@pytest.mark.parametrize("at_wait", range(0, 24, 3))
async def test_cancelled_at_any_wait_the_next_crew_goes_on_where_it_was(
    moving_bytes: int, at_wait: int
) -> None:
    """V7: what is half sent or half received is finished."""
    bodies, got = [BODY[:90_000], BODY[:70_000], BODY[:1], BODY[:80_000]], list[bytes]()
    sizes, token = [len(body) for body in bodies], trio.lowlevel.current_trio_token()

    def cancelling(steps: Steps, cancel: Callable[[], None]) -> Steps:
        for number, wait in enumerate(steps):
            if number == at_wait:
                token.run_sync_soon(cancel)
            yield wait

    with lane_pair(buffer_bytes=4096) as (sending, receiving), trio.fail_after(10):
        with trio.CancelScope() as scope:
            sends = cancelling(send_all(sending, bodies), scope.cancel)
            parts = [
                OpStage(sends, sending),
                OpStage(receive_all(receiving, sizes, got), receiving),
            ]
            await StageRunner().run(parts, moving_bytes=moving_bytes)
        moved = sending.bytes_sent, receiving.bytes_received
        await wait_all_tasks_blocked()
        assert moved == (sending.bytes_sent, receiving.bytes_received)
        new = list[bytes]()
        parts = [
            OpStage(send_all(sending, bodies, roster=2), sending),
            OpStage(receive_all(receiving, sizes, new, roster=2), receiving),
        ]
        await StageRunner().run(parts, moving_bytes=moving_bytes)
        assert new == bodies
        assert got == bodies[: len(got)]


@either_way
@pytest.mark.parametrize("error", [LaneBroken("it broke"), CallsDiffer(3, "mac-1")], ids=str)
async def test_the_first_part_that_fails_ends_the_others(
    moving_bytes: int, error: LaneBroken | CallsDiffer
) -> None:
    def fail() -> Steps:
        yield LaneWait.TURN
        raise error

    with lane_pair() as (_, receiving), trio.fail_after(10):
        parts = [OpStage(wait_for_ever(LaneWait.READABLE), receiving), OpStage(fail())]
        with pytest.raises(type(error)) as caught:
            await StageRunner().run(parts, moving_bytes=moving_bytes)
        assert caught.value is error


async def test_a_mistake_in_a_thread_is_raised_as_what_it_is() -> None:
    def fail() -> Steps:
        yield LaneWait.TURN
        raise ZeroDivisionError

    parts = [OpStage(wait_for_ever(LaneWait.PROGRESS)), OpStage(fail())]
    with pytest.raises(ZeroDivisionError), trio.fail_after(10):
        await StageRunner().run(parts, moving_bytes=THREADS_FROM_BYTES)


@either_way
async def test_closing_a_lane_ends_the_op_that_uses_it(moving_bytes: int) -> None:
    with lane_pair() as (_, receiving), trio.fail_after(10):
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                parts = [
                    OpStage(receive_all(receiving, [5], []), receiving),
                    OpStage(wait_for_ever(LaneWait.PROGRESS)),
                ]
                with pytest.raises(LaneBroken, match="from mac-0 was closed"):
                    await StageRunner().run(parts, moving_bytes=moving_bytes)

            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            receiving.close()
            receiving.close()
        assert is_closed(receiving)


async def test_a_lane_that_has_been_closed_is_not_lent() -> None:
    with lane_pair() as (sending, receiving), trio.fail_after(10):
        receiving.close()
        parts = [
            OpStage(send_all(sending, [BODY]), sending),
            OpStage(wait_for_ever(LaneWait.READABLE), receiving),
        ]
        with pytest.raises(LaneBroken, match="from mac-0 was closed"):
            await StageRunner().run(parts, moving_bytes=THREADS_FROM_BYTES)
        assert sending.bytes_sent == 0
        sending.close()
        assert is_closed(sending)  # no thread has it


@contextmanager
def sender_and_receiver() -> Iterator[tuple[list[OpStage], list[bytes]]]:
    got = list[bytes]()
    with lane_pair() as (sending, receiving):
        yield (
            [
                OpStage(send_all(sending, [BODY]), sending),
                OpStage(receive_all(receiving, [len(BODY)], got), receiving),
            ],
            got,
        )


async def test_without_a_descriptor_the_event_loop_does_it_all(faults: Faults) -> None:
    with sender_and_receiver() as (parts, got), trio.fail_after(10):
        faults.fail(socket, "socketpair", OSError())
        await StageRunner().run(parts, moving_bytes=THREADS_FROM_BYTES)
        assert got == [BODY]


async def test_without_a_thread_the_lanes_count_as_broken_and_nothing_goes_on(
    faults: Faults,
) -> None:
    started = list[object]()

    def start_one(
        real: Real, work: Callable[[], None], deliver: Callable[[object], object]
    ) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(work)
        real(work, deliver)

    faults.around(trio.lowlevel, "start_thread_soon", start_one)
    with sender_and_receiver() as (parts, got), trio.fail_after(10):
        with pytest.raises(LaneBroken, match="can't start new thread"):
            await StageRunner().run(parts, moving_bytes=THREADS_FROM_BYTES)
        assert got == []
