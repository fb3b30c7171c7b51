import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from pmesh.core.wire.lanes import OfferLane
from pmesh.core.wire.preamble import PREAMBLE_BYTES, Preamble, decode_preamble_untrusted
from pmesh.core.wire.records import OVERHEAD_BYTES, Sealer
from pmesh.errors import LaneBroken
from pmesh.net.lanes.lane import WAKE_UP_BYTES, Lane
from pmesh.net.lanes.multipath import MultipathLane
from pmesh.net.lanes.opening import dial_lane, offer_of_connection, welcome_lane
from pmesh.net.lanes.subflows import ConnectionFacts
from tests.worlds.faults import Faults, Real
from tests.worlds.lanes import header, offer_between, socket_of


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[trio.SocketStream, trio.SocketStream]]:
    """A dialled stream and the accepted one, over TCP."""
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    dialled = await trio.open_tcp_stream("127.0.0.1", port)
    accepted = await listener.accept()
    await listener.aclose()
    async with dialled, accepted:
        yield dialled, accepted


async def read_preamble(stream: trio.SocketStream) -> Preamble:
    """As the door does: not a byte more."""
    data = b""
    while len(data) < PREAMBLE_BYTES:
        data += await stream.receive_some(PREAMBLE_BYTES - len(data))
    return decode_preamble_untrusted(data)


@asynccontextmanager
async def opened(
    dialled: OfferLane, welcomed: OfferLane, *, index: int = 0
) -> AsyncIterator[list[Lane]]:
    """The lanes that came up: none, some, or the dialled one and then the welcomed one."""
    lanes: dict[int, Lane] = {}
    async with connection() as (ours, theirs):

        async def dial() -> None:
            with contextlib.suppress(LaneBroken):
                lanes[0] = await dial_lane(ours, dialled, peer="mac-door", index=index)

        async def welcome() -> None:
            assert await read_preamble(theirs) == (dialled.lane, index)
            with contextlib.suppress(LaneBroken):
                lanes[1] = await welcome_lane(theirs, welcomed, peer="mac-dialler", index=index)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial)
            nursery.start_soon(welcome)
    try:
        yield [lane for _, lane in sorted(lanes.items())]
    finally:
        for lane in lanes.values():
            lane.close()


@pytest.mark.parametrize("receiver_dials", [False, True])
async def test_a_lane_comes_up_whoever_dials(*, receiver_dials: bool) -> None:
    offer = offer_between(0, 1, number=7, dial=receiver_dials)
    async with opened(offer, offer) as lanes:
        receiving, sending = sorted(lanes, key=lambda lane: lane.sending)
        assert lanes[0].sending != receiver_dials
        await sending.send(header(4, roster=7), b"data")
        into = bytearray(4)
        await receiving.receive(header(4, roster=7), memoryview(into))
        assert into == b"data"


async def test_connections_of_one_lane_greet_with_keys_of_their_own_and_carry_it() -> None:
    offer = offer_between(0, 1, several=True)
    first, second = (offer_of_connection(offer, index) for index in (0, 1))
    assert len({offer.key, offer.return_key, first.key, first.return_key, second.key}) == 5
    async with opened(offer, offer) as one, opened(offer, offer, index=1) as two:
        ends = [MultipathLane(lane, ConnectionFacts(), offer) for lane in one]
        for lane, more in zip(ends, two, strict=True):
            lane.join(more, 1, ConnectionFacts())
        sending, receiving = sorted(ends, key=lambda lane: not lane.sending)
        async with trio.open_nursery() as nursery:
            for lane in ends:
                nursery.start_soon(lane.tend)
            await sending.send(header(4), b"data")
            into = bytearray(4)
            await receiving.receive(header(4), memoryview(into))
            assert into == b"data"
            for lane in ends:
                lane.close()


async def test_a_greeting_of_another_connection_of_the_lane_is_refused() -> None:
    offer = offer_between(0, 1, several=True)
    first, second = (offer_of_connection(offer, index) for index in (0, 1))
    plain = [msgspec.structs.replace(each, several=False) for each in (first, second)]
    async with opened(*plain) as lanes:
        assert lanes == []


def send_buffers_of(lanes: list[Lane]) -> set[int]:
    """What the system says, which is not always what it was asked for."""
    return {socket_of(lane).getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for lane in lanes}


async def test_between_agents_of_one_machine_little_is_queued() -> None:
    offer = offer_between(0, 1)
    with socket.socket() as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 512 * 1024)
        expected = asked.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    async with opened(offer, offer) as lanes:
        assert len(lanes) == 2
        assert send_buffers_of(lanes) == {expected}


async def test_between_machines_the_system_says_how_much_is_queued(faults: Faults) -> None:
    set_options: list[tuple[int, int]] = []

    def spy(real: Real, self: socket.socket, level: int, option: int, value: int) -> None:
        set_options.append((level, option))
        real(self, level, option, value)

    faults.instead(socket.socket, "getpeername", lambda _: ("192.0.2.1", 24160))
    faults.around(socket.socket, "setsockopt", spy)
    offer = offer_between(0, 1)
    async with opened(offer, offer) as lanes:
        assert len(lanes) == 2
    assert (socket.SOL_SOCKET, socket.SO_SNDBUF) not in set_options
    assert (socket.IPPROTO_TCP, socket.TCP_NODELAY) in set_options
    assert (socket.SOL_SOCKET, socket.SO_RCVLOWAT) in set_options


async def test_a_lane_reads_before_its_first_window_is_full() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        socket.create_connection(door.getsockname()) as dialled,
    ):
        window = dialled.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2
    assert window >= 2 * WAKE_UP_BYTES  # else it fills, and the sender waits for a round trip


Opening = Callable[..., Awaitable[Lane]]


@pytest.mark.parametrize("opening", [dial_lane, welcome_lane])
@pytest.mark.parametrize("dial", [True, False])
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (bytes(OVERHEAD_BYTES), "fails authentication"),
        (b"\xff" * OVERHEAD_BYTES, "claims 4294967295 bytes"),
        (bytes(11) + b"\1" + bytes(OVERHEAD_BYTES - 12), "fails authentication|out of its place"),
    ],
)
async def test_who_does_not_know_the_offer_gets_no_lane(
    opening: Opening, *, dial: bool, said: bytes, expected: str
) -> None:
    async with connection() as (ours, theirs):
        await theirs.send_all(said)
        with pytest.raises(LaneBroken, match=expected):
            await opening(ours, offer_between(0, 1, dial=dial), peer="mac-9")


@pytest.mark.parametrize("opening", [dial_lane, welcome_lane])
async def test_who_hangs_up_gets_no_lane(opening: Opening) -> None:
    async with connection() as (ours, theirs):
        await theirs.aclose()
        with pytest.raises(LaneBroken, match=r"mac-9 (ended|broke)"):
            await opening(ours, offer_between(0, 1), peer="mac-9")


@pytest.mark.parametrize("opening", [dial_lane, welcome_lane])
async def test_who_says_nothing_for_5_s_gets_no_lane(
    opening: Opening, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock
    async with connection() as (ours, _theirs):
        begun = trio.current_time()
        with pytest.raises(LaneBroken, match="mac-9 was never greeted"):
            await opening(ours, offer_between(0, 1), peer="mac-9")
        assert trio.current_time() - begun == pytest.approx(5)


@pytest.mark.parametrize("dial", [True, False])
@pytest.mark.parametrize("key", ["key", "return_key"])
async def test_with_a_key_of_another_offer_there_is_no_lane(*, dial: bool, key: str) -> None:
    offer = offer_between(0, 1, dial=dial)
    other = msgspec.structs.replace(offer, **{key: bytes(32)})
    async with opened(offer, other) as lanes:
        written_by_who_dials = "return_key" if dial else "key"
        # The door judges first; if it is content and the dialler isn't, its lane ends at once.
        assert len(lanes) == (0 if key == written_by_who_dials else 1)
        for lane in lanes:
            with pytest.raises(LaneBroken):
                await lane.receive(header(0, op=1), memoryview(b""))


async def test_what_is_no_greeting_breaks_the_lane() -> None:
    offer = offer_between(0, 1)
    async with connection() as (ours, theirs):
        buffer = memoryview(bytearray(OVERHEAD_BYTES))
        Sealer(offer.key).seal(header(0, op=3), b"", buffer)
        await theirs.send_all(buffer)
        with pytest.raises(LaneBroken, match="mac-9 was never greeted"):
            await welcome_lane(ours, offer, peer="mac-9")
