import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from pmesh.core.wire.records import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    OVERHEAD_BYTES,
    RecordHeader,
    Sealer,
)
from pmesh.errors import LaneBroken
from pmesh.net.lanes.lane import WAKE_UP_BYTES, CallsDiffer, Lane, LaneWait, PathLost
from tests.worlds.examples import examples
from tests.worlds.faults import Faults
from tests.worlds.lanes import header, lane_pair, offer_between, raw_receiving_lane


async def received(lane: Lane, expected: RecordHeader) -> bytes:
    into = bytearray(expected.body_bytes)
    await lane.receive(expected, memoryview(into))
    return bytes(into)


def record(head: RecordHeader, body: bytes, *, sealer: Sealer | None = None) -> bytes:
    buffer = memoryview(bytearray(len(body) + OVERHEAD_BYTES))
    (sealer or Sealer(offer_between(0, 1).key)).seal(head, body, buffer)
    return bytes(buffer)


async def test_a_body_arrives_and_both_ends_count_its_bytes() -> None:
    with lane_pair() as (sending, receiving):
        await sending.send(header(5, op=4), b"hello")
        assert await received(receiving, header(5, op=4)) == b"hello"
        assert sending.bytes_sent == receiving.bytes_received == 5 + OVERHEAD_BYTES
        assert receiving.peer_completed == 3
        assert "from mac-0" in repr(receiving)
        assert "to mac-1" in repr(sending)


async def test_a_record_larger_than_the_sockets_buffers_arrives() -> None:
    body = bytes(range(256)) * (MAX_BODY_BYTES // 256)
    with lane_pair(buffer_bytes=4096) as (sending, receiving):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sending.send, header(len(body)), memoryview(body))
            assert await received(receiving, header(len(body))) == body


async def test_a_body_is_opened_straight_into_its_place_and_nowhere_else() -> None:
    arena = bytearray(b"." * 12)
    with lane_pair() as (sending, receiving):
        await sending.send(header(4), b"data")
        await receiving.receive(header(4), memoryview(arena)[4:8])
    assert arena == b"....data...."


async def test_a_cancelled_receive_is_finished_by_the_next_call() -> None:
    whole = record(header(100), b"x" * 100)
    with raw_receiving_lane() as (peer, lane):
        for part in (whole[:10], whole[10:60], whole[60:120]):
            peer.sendall(part)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(received, lane, header(100))
                    await wait_all_tasks_blocked()
                    scope.cancel()
        peer.sendall(whole[120:])
        assert await received(lane, header(100)) == b"x" * 100


async def test_a_cancelled_send_is_finished_by_the_next_call() -> None:
    bodies = [b"a" * MAX_BODY_BYTES, b"b" * 10]
    with lane_pair(buffer_bytes=4096) as (sending, receiving):
        with trio.move_on_after(0) as scope:
            await sending.send(header(MAX_BODY_BYTES), bodies[0])
        assert scope.cancelled_caught
        assert 0 < sending.bytes_sent < MAX_BODY_BYTES
        assert not sending.idle
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sending.send, header(10, segment=1), bodies[1])
            assert await received(receiving, header(MAX_BODY_BYTES)) == bodies[0]
            assert await received(receiving, header(10, segment=1)) == bodies[1]


async def test_a_record_of_a_lower_roster_is_dropped_and_counted() -> None:
    sealer = Sealer(offer_between(0, 1).key)
    with raw_receiving_lane() as (peer, lane):
        peer.sendall(record(header(3, roster=4), b"old", sealer=sealer))
        peer.sendall(record(header(900, roster=4, op=8), b"o" * 900, sealer=sealer))
        peer.sendall(record(header(8, roster=5), b"the new!", sealer=sealer))
        assert await received(lane, header(8, roster=5)) == b"the new!"
        assert lane.records_dropped == 2
        assert lane.peer_completed == -1  # not what the older ones said


async def test_a_record_of_a_higher_roster_waits_until_that_is_installed() -> None:
    with lane_pair() as (sending, receiving):
        await sending.send(header(5, roster=2), b"early")
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(received, receiving, header(900))
                await wait_all_tasks_blocked()
                scope.cancel()
        assert scope.cancelled_caught
        assert await received(receiving, header(5, roster=2)) == b"early"


@pytest.mark.parametrize(
    ("sent", "differing"),
    [
        (header(3, op=6, fingerprint=8), 6),
        (header(3, op=5), 5),  # a broadcast's root has passed op 5 without reading
        (header(3, op=9), 6),  # the peer sends nothing in its op 6
        (header(0, op=6, fingerprint=8), 6),
    ],
)
async def test_another_call_is_reported_with_the_first_op_that_differs(
    sent: RecordHeader, differing: int
) -> None:
    with lane_pair() as (sending, receiving):
        await sending.send(sent, b"..."[: sent.body_bytes])
        with pytest.raises(CallsDiffer, match="mac-0") as caught:
            await received(receiving, header(700, op=6))
        assert caught.value.op == differing


async def test_nobody_is_accused_on_the_word_of_a_forged_header() -> None:
    with raw_receiving_lane() as (peer, lane):
        forged = bytearray(record(header(3), b"..."))
        forged[31] ^= 1  # the fingerprint
        peer.sendall(forged)
        with pytest.raises(LaneBroken, match="from mac-0 broke: a record fails authentication"):
            await received(lane, header(3))


@pytest.mark.parametrize("sent", [header(3, segment=1), header(2)])
async def test_a_record_out_of_its_place_breaks_the_lane_before_its_body_is_read(
    sent: RecordHeader,
) -> None:
    with raw_receiving_lane() as (peer, lane):
        peer.sendall(record(sent, b"..."[: sent.body_bytes])[:HEADER_BYTES])
        with pytest.raises(LaneBroken, match="out of its place"):
            await received(lane, header(3))


async def test_a_claim_of_4_gib_breaks_the_lane_before_its_body_is_read() -> None:
    with raw_receiving_lane() as (peer, lane):
        peer.sendall(b"\xff" * HEADER_BYTES)
        with pytest.raises(LaneBroken, match="claims 4294967295 bytes, 1048576 are allowed"):
            await received(lane, header(3))


async def test_the_sending_end_expects_nothing_but_a_greeting() -> None:
    offer = offer_between(0, 1)
    ours, theirs = socket.socketpair()
    lane = Lane(ours, offer, sending=True, peer="mac-1")
    theirs.sendall(record(header(100), bytes(100), sealer=Sealer(offer.return_key)))
    with pytest.raises(LaneBroken, match="to mac-1 broke: a record claims 100 bytes, 25 are"):
        await lane.receive_greeting()
    lane.close()
    theirs.close()


@examples(50)
@given(st.binary(max_size=120))
async def test_whatever_arrives_is_a_broken_lane(data: bytes) -> None:
    with raw_receiving_lane() as (peer, lane):
        peer.sendall(b"\0\0\0\x10" + bytes(7) + b"\1" + data)
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(LaneBroken, match="mac-0"), trio.fail_after(5):
            await received(lane, header(16))


async def test_the_end_of_the_connection_names_the_peer() -> None:
    with lane_pair() as (sending, receiving):
        sending.close()
        with pytest.raises(LaneBroken, match="the data connection from mac-0 ended"):
            await received(receiving, header(3))
        with pytest.raises(LaneBroken, match="to mac-1"):
            await sending.send(header(3), b"...")


@contextmanager
def reset_lane(*, sending: bool) -> Iterator[Lane]:
    """A lane over TCP whose other end has been reset."""
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    listener.close()
    lane = Lane(ours, offer_between(0, 1), sending=sending, peer="mac-7")
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()  # with linger 0: a reset
    try:
        yield lane
    finally:
        lane.close()


async def test_a_reset_connection_names_the_peer_on_either_side() -> None:
    with (
        reset_lane(sending=True) as lane,
        pytest.raises(LaneBroken, match="to mac-7 broke: "),
        trio.fail_after(5),
    ):
        await lane.send(header(3), b"...")
    with (
        reset_lane(sending=False) as lane,
        pytest.raises(LaneBroken, match="from mac-7 broke: "),
        trio.fail_after(5),
    ):
        await received(lane, header(3))


@pytest.mark.parametrize("waiting_for", ["a record", "a roster", "room"])
async def test_closing_a_lane_wakes_whoever_waits_on_it(waiting_for: str) -> None:
    with lane_pair(buffer_bytes=4096) as (sending, receiving):
        if waiting_for == "a roster":
            await sending.send(header(0, roster=2), b"")

        async def wait() -> None:
            if waiting_for == "room":
                await sending.send(header(MAX_BODY_BYTES), bytes(MAX_BODY_BYTES))
            await received(receiving, header(0))

        async def expect_the_end() -> None:
            with pytest.raises(LaneBroken, match="was closed"):
                await wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_the_end)
            await wait_all_tasks_blocked()
            for _ in range(2):  # closing twice is closing once
                (sending if waiting_for == "room" else receiving).close()


async def test_after_a_lane_was_closed_its_calls_say_so() -> None:
    with lane_pair(buffer_bytes=4096) as (sending, receiving):
        sending.post(header(MAX_BODY_BYTES), bytes(MAX_BODY_BYTES))
        sending.close()
        receiving.close()
        with pytest.raises(LaneBroken, match="to mac-1 was closed"):
            await sending.flush()
        with pytest.raises(LaneBroken, match="from mac-0 broke: Bad file descriptor"):
            await received(receiving, header(0))


async def test_a_lane_whose_path_has_failed_says_so_before_and_after_a_wait() -> None:
    with lane_pair(buffer_bytes=4096) as (sending, receiving):
        async with trio.open_nursery() as nursery:

            async def expect_the_loss() -> None:
                with pytest.raises(PathLost, match="from mac-0 has lost its path"):
                    await received(receiving, header(0))

            nursery.start_soon(expect_the_loss)
            await wait_all_tasks_blocked()
            receiving.lose_path()
        sending.lose_path()
        with pytest.raises(PathLost, match="to mac-1 has lost its path"):
            await sending.send(header(0), b"")


async def test_a_fast_lane_lets_other_tasks_run() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    with lane_pair() as (sending, receiving):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count_turns)
            for segment in range(50):
                await sending.send(header(1, segment=segment), b"!")
            assert turns >= 40  # trio shuffles whose turn it is
            for segment in range(50):
                await received(receiving, header(1, segment=segment))
            assert turns >= 80
            nursery.cancel_scope.cancel()


async def test_a_lane_wakes_up_for_a_header_for_much_of_a_body_and_for_its_rest() -> None:
    ours, theirs = socket.socketpair()
    lane = Lane(ours, offer_between(0, 1), sending=False, peer="mac-0", wake_up_bytes=1000)
    head = header(2500)
    data = record(head, bytes(range(250)) * 10)
    into = bytearray(2500)
    steps = lane.receives(head, memoryview(into))

    def asked_for() -> int:
        assert next(steps) is LaneWait.READABLE
        return ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

    with theirs:
        assert asked_for() == HEADER_BYTES
        theirs.sendall(data[:HEADER_BYTES])
        assert asked_for() == 1000
        theirs.sendall(data[HEADER_BYTES:-300])
        assert asked_for() == 300
        theirs.sendall(data[-300:])
        assert list(steps) == []
    assert into == bytes(range(250)) * 10
    assert lane.paces == {}  # too little to tell how fast it came
    lane.close()


async def test_what_comes_while_a_record_is_waited_for_shows_the_bandwidth(faults: Faults) -> None:
    now = 50.0
    faults.instead(time, "monotonic", lambda: now)
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * WAKE_UP_BYTES)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * WAKE_UP_BYTES)
    lane = Lane(ours, offer_between(0, 1), sending=False, peer="mac-0")
    head = header(WAKE_UP_BYTES + 5000)
    data, sealer = bytes(head.body_bytes), Sealer(offer_between(0, 1).key)
    with theirs:
        for pause_s in (2.0, 0.0):  # the second record is there already
            sent = record(head, data, sealer=sealer)
            steps = lane.receives(head, memoryview(bytearray(len(data))))
            early = len(sent) - WAKE_UP_BYTES if pause_s else len(sent)
            theirs.sendall(sent[:early])
            if pause_s:
                assert next(steps) is LaneWait.READABLE
                now += pause_s
                theirs.sendall(sent[early:])
            list(steps)
            assert lane.paces == {lane.hosts: (WAKE_UP_BYTES, 2.0)}
    lane.close()


async def test_a_body_arrives_by_and_by_over_a_network_that_wakes_up_rarely() -> None:
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    theirs = await trio.open_tcp_stream(*listener.socket.getsockname())
    accepted = await listener.accept()
    ours = socket.socket(fileno=accepted.socket.detach())
    lane = Lane(ours, offer_between(0, 1), sending=False, peer="mac-0", wake_up_bytes=30_000)
    head, body = header(100_000), bytes(range(250)) * 400

    async def trickle() -> None:
        data = record(head, body)
        for begin in range(0, len(data), 7_000):
            await theirs.send_all(data[begin : begin + 7_000])
            await wait_all_tasks_blocked()

    async with listener, theirs, trio.open_nursery() as nursery:
        nursery.start_soon(trickle)
        assert await received(lane, head) == body
    lane.close()
