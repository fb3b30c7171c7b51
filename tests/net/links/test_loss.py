"""What was sent again, and the round trip, from what two systems tell; the call is faked."""

import socket
import struct
from dataclasses import dataclass

import pytest
import trio
import trio.testing

from pmesh.net.links.path import loss_of, round_trip_of
from tests.net.links.links import tcp_streams
from tests.worlds.system import be_on


@dataclass
class SocketWithCounters:
    counters: bytes

    def getsockopt(self, level: int, option: int, buffersize: int) -> bytes:
        assert (level, option) in {(socket.IPPROTO_TCP, 11), (socket.IPPROTO_TCP, 0x106)}
        return self.counters[:buffersize]


def stream_with(counters: bytes) -> trio.abc.HalfCloseableStream:
    stream, _ = trio.testing.memory_stream_pair()
    stream.socket = SocketWithCounters(counters)  # type: ignore[attr-defined]
    return stream


def counters(layout: str, *values: int) -> bytes:
    return struct.pack(layout, *values).ljust(512, b"\xff")


@pytest.mark.parametrize(
    ("platform", "told", "loss"),
    [
        ("linux", counters("=100xI52xI", 12, 1200), 0.01),
        ("linux", counters("=100xI52xI", 0, 1200), 0.0),
        ("linux", counters("=100xI52xI", 12, 199), None),
        ("linux", counters("=100xI52xI", 12, 1200)[:104], None),  # before Linux 4.6
        ("darwin", counters("=56xQ40xQ", 1200, 24), 0.02),
        ("win32", counters("=100xI52xI", 12, 1200), None),
    ],
)
def test_the_loss_of_a_connection_is_what_the_system_has_sent_again(
    platform: str, told: bytes, loss: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on(monkeypatch, platform)
    assert loss_of(stream_with(told)) == loss


async def test_a_connection_within_a_machine_loses_nothing_and_one_in_memory_has_no_loss() -> None:
    async with tcp_streams() as (dialled, accepted):
        assert loss_of(dialled) is None
        for _ in range(300):
            await dialled.send_all(b"x")
            assert await accepted.receive_some(1) == b"x"
        loss = loss_of(dialled)
        assert loss is not None
        assert loss < 0.05
    assert loss_of(dialled) is None
    assert loss_of(trio.testing.memory_stream_pair()[0]) is None


@pytest.mark.parametrize(
    ("platform", "told", "round_trip_s"),
    [
        ("linux", counters("=148xI", 250), 0.00025),
        ("linux", counters("=148xI", 2**32 - 1), None),  # before the first answer
        ("linux", counters("=148xI", 250)[:148], None),  # before Linux 4.6
        ("darwin", counters("=44xI", 3), 0.004),
        ("darwin", counters("=44xI", 0), 0.001),
        ("win32", counters("=148xI", 250), None),
    ],
)
def test_the_round_trip_of_a_connection_is_what_the_system_has_measured_at_most(
    platform: str, told: bytes, round_trip_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on(monkeypatch, platform)
    assert round_trip_of(stream_with(told)) == round_trip_s


async def test_a_real_connection_has_a_round_trip_until_it_is_closed() -> None:
    async with tcp_streams() as (dialled, accepted):
        await dialled.send_all(b"x")
        assert await accepted.receive_some(1) == b"x"
        round_trip_s = round_trip_of(dialled)
        assert round_trip_s is not None
        assert round_trip_s > 0
    assert round_trip_of(dialled) is None
    assert round_trip_of(trio.testing.memory_stream_pair()[0]) is None
