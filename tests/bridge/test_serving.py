"""Workers that are silent, lost, late or strangers, in memory on a clock that jumps."""

import socket
import struct
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np
import pytest
import trio
import trio.testing

from pmesh.bridge.cli.serving import MOST_STRANGERS, BridgeOptions, Job, Stream, serve
from pmesh.bridge.rules import BlockLayout, Layout, WholeLayout
from pmesh.bridge.wire import (
    AveragedBlockGradient,
    AveragedNonBlockGradient,
    BlockGradientPayload,
    Floats,
    Heartbeat,
    JoinAccepted,
    JoinRequest,
    Message,
    NonBlockGradientPayload,
    ShardAssignment,
    Shutdown,
    decode_untrusted,
    encode,
)
from pmesh.errors import ConfigError, NotEnoughRanks, RunError

LAYOUT = BlockLayout(((2,),), (1, 1, 1))
OPTIONS = BridgeOptions(workers=2, rows=None, silence_s=10, most_frame=4096, wait_s=100)


class MemoryListener(trio.abc.Listener[Stream]):
    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Stream](99)

    async def accept(self) -> Stream:
        return await self._receive.receive()

    async def aclose(self) -> None:
        await self._receive.aclose()

    def connect(self) -> "FarEnd":
        ours, theirs = trio.testing.memory_stream_pair()
        self._send.send_nowait(theirs)
        return FarEnd(ours)


class FarEnd:
    """The other end of a connection of the bridge."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._data = b""

    async def send(self, *messages: Message) -> None:
        for message in messages:
            await self.stream.send_all(encode(message))

    async def receive(self) -> Message | None:
        while len(self._data) < 4 or len(self._data) < 4 + struct.unpack(">I", self._data[:4])[0]:
            try:
                more = await self.stream.receive_some()
            except trio.BrokenResourceError:
                return None
            if not more:
                await self.stream.aclose()
                return None
            self._data += more
        end = 4 + struct.unpack(">I", self._data[:4])[0]
        frame, self._data = self._data[4:end], self._data[end:]
        return decode_untrusted(frame)

    async def join(self, name: str = "node") -> int:
        await self.send(JoinRequest(name, 1, "cpu"))
        accepted = await self.receive()
        assert isinstance(accepted, JoinAccepted)
        return accepted.worker_id

    async def do_step(self, number: int, step: int, value: float = 1.0) -> list[float]:
        """Send all parts, and return what they were averaged to."""
        two, one = np.full(2, value, np.float32), np.full(1, value, np.float32)
        await self.send(BlockGradientPayload(step, number, 0, 1, (2,), two))
        got = [await self.receive()]
        for component in range(3):
            await self.send(NonBlockGradientPayload(step, number, component, one))
            got.append(await self.receive())
        assert all(isinstance(x, AveragedBlockGradient | AveragedNonBlockGradient) for x in got)
        return [x.gradients[0] for x in got]  # type: ignore[union-attr]


class AloneJob(Job):
    """A job of so many steps, whose other ranks have no weight."""

    def __init__(self, steps: int, layout: Layout = LAYOUT) -> None:
        self._left = steps
        self._layout = layout

    async def begin(self) -> Layout | None:
        await trio.lowlevel.checkpoint()
        self._left -= 1
        return self._layout if self._left >= 0 else None

    async def average(self, values: Floats, weight: float) -> Floats:
        await trio.lowlevel.checkpoint()
        assert weight in {1, 2}
        return values

    async def mean_loss(self, loss: float, rows: int) -> float:
        raise AssertionError(f"no whole gradients here, but {loss} of {rows}")


async def bridged(
    work: Callable[[MemoryListener], Awaitable[None]], job: Job, options: BridgeOptions = OPTIONS
) -> int:
    """Serve while `work` runs; return the number of steps."""

    async def enter() -> Job:
        await trio.lowlevel.checkpoint()
        return job

    async with trio.open_nursery() as nursery:
        listening = MemoryListener()
        nursery.start_soon(work, listening)
        return await serve([listening], enter, options)
    raise AssertionError("it has raised")


async def test_a_silent_worker_is_dropped_and_the_others_go_on(
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001 - it is the clock
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def work(listening: MemoryListener) -> None:
        good, silent = listening.connect(), listening.connect()
        number, other = await good.join("good"), await silent.join("silent")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(silent.do_step, other, 0, value=3.0))
            assert await good.do_step(number, 0) == [2.0] * 4
        await silent.send(Heartbeat("silent", 42))
        assert await silent.receive() == Heartbeat("pmesh", 42)
        began = trio.current_time()
        await trio.sleep(5)
        await silent.send(Heartbeat("silent", 43))  # a sign of life
        assert await silent.receive() == Heartbeat("pmesh", 43)
        assert await good.do_step(number, 1) == [1.0] * 4
        assert trio.current_time() - began == pytest.approx(15)
        assert await silent.receive() is None
        assert await good.receive() == Shutdown()
        assert await good.receive() is None

    assert await bridged(work, AloneJob(2)) == 2
    assert capsys.readouterr().err == (
        "worker 1 (silent) has been silent for 10 s, and block 0 of step 1 is due; "
        "it is dropped, and 1 go on\n"
    )


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (encode(BlockGradientPayload(0, 0, 0, 1, (2,), np.full(2, np.nan, np.float32))), "has NaN"),
        (b"\0\0\x20\0", "announces a frame of 8192 bytes, and at most 4096 are allowed"),
        (b"\0\0\0\1\x63", "sends a message with the unknown tag 99"),
        (b"\0\0", "has closed its connection within a frame, and block 0 of step 0 is due"),
        (b"\0\0\0\5", "has closed its connection within a frame, and block 0 of step 0 is due"),
    ],
)
async def test_the_last_worker_that_is_dropped_ends_the_bridge_with_the_reason(
    frame: bytes, why: str
) -> None:
    async def work(listening: MemoryListener) -> None:
        peer = listening.connect()
        assert await peer.join() == 0
        await peer.stream.send_all(frame)
        await peer.stream.send_eof()
        assert await peer.receive() is None

    options = BridgeOptions(workers=1, rows=None, silence_s=10, most_frame=4096, wait_s=100)
    with pytest.raises(BaseExceptionGroup) as caught:
        await bridged(work, AloneJob(1), options)
    (error,) = _leaves(caught.value)
    assert isinstance(error, RunError)
    assert str(error).startswith(f"no worker is left in step 0: worker 0 (node) {why}")


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


async def test_workers_that_close_between_steps_have_ended_and_between_parts_are_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def work(listening: MemoryListener) -> None:
        good, lost = listening.connect(), listening.connect()
        number, other = await good.join("good"), await lost.join("lost")
        two = np.ones(2, np.float32)
        await lost.send(BlockGradientPayload(0, other, 0, 1, (2,), two))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(good.do_step, number, 0)
            await lost.receive()
            await lost.stream.send_eof()
        await good.stream.send_eof()
        await lost.receive()

    assert await bridged(work, AloneJob(9)) == 1
    said = capsys.readouterr()
    assert "worker 0 (good) has ended after 1 steps" in said.out
    assert "worker 1 (lost) has closed its connection before component 0 (head) of" in said.err


async def test_strangers_and_workers_that_go_before_the_training_leave_their_place(
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001 - it is the clock
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def work(listening: MemoryListener) -> None:
        for data in (b"GET / HTTP/1.1\r\n", encode(Shutdown()), b""):
            stranger = listening.connect()
            await stranger.stream.send_all(data)
            await stranger.stream.send_eof()
            assert await stranger.receive() is None
        gone = listening.connect()
        assert await gone.join("gone") == 0
        await gone.stream.send_eof()
        assert await gone.receive() is None
        silent = [listening.connect() for _ in range(MOST_STRANGERS)]
        await trio.testing.wait_all_tasks_blocked()
        assert await listening.connect().receive() is None
        for stranger in silent:
            assert await stranger.receive() is None
        one, late = listening.connect(), listening.connect()
        assert await one.join() == 0
        await trio.testing.wait_all_tasks_blocked()
        two = listening.connect()
        assert await two.join() == 1
        await late.send(JoinRequest("late", 1, "cpu"))
        assert await late.receive() == Shutdown()
        assert await late.receive() is None
        for peer in (one, two):
            await peer.stream.send_eof()
            await peer.receive()

    assert await bridged(work, AloneJob(1)) == 0
    said = capsys.readouterr().err
    assert "is no worker of entrenar: it announces a frame of 1195725856 bytes" in said
    assert "is no worker of entrenar: it sends a Shutdown before it has joined" in said
    assert "has closed its connection before it has joined" in said
    assert "worker 0 (gone) has gone before the training" in said
    assert said.count("has not joined within 10 s") == MOST_STRANGERS
    assert "is turned away: 16 others have not joined yet" in said
    assert "a worker (late) comes too late" in said


async def test_too_few_workers_are_an_error(
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001 - it is the clock
) -> None:
    async def work(listening: MemoryListener) -> None:
        peer = listening.connect()
        assert await peer.join() == 0
        assert await peer.receive() == Shutdown()
        assert await peer.receive() is None

    with pytest.raises(BaseExceptionGroup) as caught:
        await bridged(work, AloneJob(1))
    (error,) = _leaves(caught.value)
    assert isinstance(error, NotEnoughRanks)
    assert str(error) == "1 of 2 workers have joined within 100 s"


async def test_whole_gradients_need_rows_and_rows_are_dealt_to_workers_with_blocks_too(
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001 - it is the clock
) -> None:
    async def join(listening: MemoryListener) -> None:
        for _ in range(2):
            peer = listening.connect()
            await peer.join()
            nursery.start_soon(peer.receive)

    async with trio.open_nursery() as nursery:
        with pytest.raises(BaseExceptionGroup) as caught:
            await bridged(join, AloneJob(1, WholeLayout(3)))
        (error,) = _leaves(caught.value)
        assert isinstance(error, ConfigError)
        assert "add --rows" in str(error)

    async def work(listening: MemoryListener) -> None:
        peer = listening.connect()
        assert await peer.join() == 0
        assert await peer.receive() == ShardAssignment(0, 0, 7)
        await peer.do_step(0, 0)
        assert await peer.receive() == Shutdown()
        assert await peer.receive() is None

    options = BridgeOptions(workers=1, rows=7, silence_s=10, most_frame=4096, wait_s=100)
    assert await bridged(work, AloneJob(1), options) == 1


async def test_more_workers_join_than_strangers_have_room() -> None:
    count = MOST_STRANGERS + 1
    options = BridgeOptions(workers=count, rows=None, silence_s=10, most_frame=4096, wait_s=100)

    async def work(listening: MemoryListener) -> None:
        peers = list[FarEnd]()
        for number in range(count):
            peers.append(listening.connect())
            assert await peers[-1].join() == number
        for peer in peers:
            await peer.stream.send_eof()
            await peer.receive()

    assert await bridged(work, AloneJob(1), options) == 0


async def over_tcp(
    work: Callable[[FarEnd, trio.SocketStream], Awaitable[None]], job: Job, rows: int | None
) -> int:
    """Serve one worker over a real connection, which `work` closes."""
    options = BridgeOptions(workers=1, rows=rows, silence_s=10, most_frame=4096, wait_s=100)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]

    async def enter() -> Job:
        await trio.lowlevel.checkpoint()
        return job

    async with trio.open_nursery() as nursery:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        nursery.start_soon(work, FarEnd(stream), stream)
        return await serve(listeners, enter, options)
    raise AssertionError("it has raised")


async def test_a_worker_that_ends_and_does_not_read_its_next_rows_has_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its system resets the connection, as nobody has read what came."""

    async def work(worker: FarEnd, stream: trio.SocketStream) -> None:
        number = await worker.join()
        assert await worker.receive() == ShardAssignment(0, 0, 7)
        await worker.do_step(number, 0)
        await trio.lowlevel.wait_readable(stream.socket)
        await stream.aclose()

    assert await over_tcp(work, AloneJob(9), rows=7) == 1
    assert "worker 0 (node) has ended after 1 steps" in capsys.readouterr().out


async def test_a_worker_that_does_not_wait_for_answers_to_its_heartbeats_has_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def work(worker: FarEnd, stream: trio.SocketStream) -> None:
        await worker.do_step(await worker.join(), 0)
        beats = b"".join(encode(Heartbeat("node", number)) for number in range(3))
        assert await stream.socket.send(beats) == len(beats)
        stream.socket.close()

    assert await over_tcp(work, AloneJob(9), rows=None) == 1
    assert "worker 0 (node) has ended after 1 steps" in capsys.readouterr().out


async def test_a_connection_that_is_reset_within_a_frame_is_lost() -> None:
    async def work(worker: FarEnd, stream: trio.SocketStream) -> None:
        await worker.join()
        await stream.send_all(encode(Heartbeat("node", 42)) + b"\0\0")
        assert await worker.receive() == Heartbeat("pmesh", 42)
        await trio.testing.wait_all_tasks_blocked()  # the bridge has read the half of a frame
        # Closing with a linger time of 0 sends a reset.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await stream.aclose()

    with pytest.raises(BaseExceptionGroup) as caught:
        await over_tcp(work, AloneJob(9), rows=None)
    (error,) = _leaves(caught.value)
    assert str(error).startswith("no worker is left in step 0: worker 0 (node) has lost its")
