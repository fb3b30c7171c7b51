import errno
import math
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from pmesh.core.wire.framing import GUEST_MAGIC
from pmesh.core.wire.preamble import Preamble, encode_preamble
from pmesh.errors import MeshKeyMismatch, PeerUnreachable, PmeshError
from pmesh.net.links.acceptor import (
    HANDSHAKE_BURST,
    HANDSHAKE_INTERVAL_S,
    MAX_PENDING,
    MAX_PENDING_PER_ADDRESS,
    Acceptor,
    Authenticated,
    DoorCounters,
)
from pmesh.net.links.path import Path, shake_hands
from tests.net.links.street import MemoryStream, Stream, Street, is_closed
from tests.worlds.nodes import ADAS, ADAS_HELLO, BOBS, BOBS_HELLO, STRANGERS

CLIENT_HELLO = bytes.fromhex("16030100dc010000d80303")
PREAMBLE = encode_preamble(Preamble(bytes(range(16))))


@dataclass
class StreamHandlers:
    """Note who was let in, and treat them as they are told."""

    treat: Callable[[Stream, Authenticated], object] = lambda _, authenticated: authenticated()
    links: list[bytes] = field(default_factory=list)
    lanes: list[bytes] = field(default_factory=list)
    guests: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    let_in: list[Stream] = field(default_factory=list)
    stay_s: float = 0
    stayed: int = 0

    async def on_link(self, stream: Stream, first: bytes, authenticated: Authenticated) -> None:
        self.links.append(first)
        await self._receive(stream, authenticated)

    async def on_lane(self, stream: Stream, lane: bytes, authenticated: Authenticated) -> None:
        self.lanes.append(lane)
        await self._receive(stream, authenticated)

    async def on_guest(self, stream: Stream, first: bytes, authenticated: Authenticated) -> None:
        self.guests.append(first)
        await self._receive(stream, authenticated)

    async def _receive(self, stream: Stream, authenticated: Authenticated) -> None:
        self.times.append(trio.current_time())
        self.treat(stream, authenticated)
        self.let_in.append(stream)
        await trio.sleep(self.stay_s)
        self.stayed += 1


def do_nothing(_stream: Stream, _authenticated: Authenticated) -> None:
    pass


def fail_with(error: Exception) -> Callable[[Stream, Authenticated], object]:
    def treat(_stream: Stream, _authenticated: Authenticated) -> None:
        raise error

    return treat


@asynccontextmanager
async def opened(handlers: StreamHandlers) -> AsyncIterator[tuple[Street, Acceptor[Stream]]]:
    street, door = Street(), Acceptor(on_link=handlers.on_link, on_lane=handlers.on_lane)
    async with trio.open_nursery() as nursery:
        await nursery.start(door.serve, [street])
        yield street, door
        nursery.cancel_scope.cancel()


settled = trio.testing.wait_all_tasks_blocked


async def test_a_client_hello_opens_a_link_and_the_rest_of_it_stays_in_the_stream() -> None:
    handlers = StreamHandlers()
    async with opened(handlers) as (street, door):
        caller = street.call()
        await caller.send_all(CLIENT_HELLO + bytes(200))
        await settled()
        assert handlers.links == [CLIENT_HELLO + bytes(14)]
        assert len(await handlers.let_in[0].receive_some(1000)) == 186
        assert door.counters == DoorCounters(accepted=1, authenticated=1)


async def test_a_preamble_opens_a_lane_and_what_follows_belongs_to_the_lane() -> None:
    handlers = StreamHandlers()
    async with opened(handlers) as (street, door):
        await street.call().send_all(PREAMBLE + b"sealed")
        await settled()
        assert handlers.lanes == [PREAMBLE]
        assert await handlers.let_in[0].receive_some(1000) == b"sealed"
        assert door.counters == DoorCounters(accepted=1, authenticated=1)


async def test_a_machine_that_wants_the_mesh_key_has_a_handler_of_its_own() -> None:
    handlers, street = StreamHandlers(), Street()
    door = Acceptor(on_link=handlers.on_link, on_lane=handlers.on_lane, on_guest=handlers.on_guest)
    async with trio.open_nursery() as nursery:
        await nursery.start(door.serve, [street])
        await street.call().send_all(GUEST_MAGIC + b"it says")
        await settled()
        assert handlers.guests == [GUEST_MAGIC + b"it says"]
        assert handlers.links == handlers.lanes == []
        assert door.counters == DoorCounters(accepted=1, authenticated=1)
        nursery.cancel_scope.cancel()


async def test_without_that_handler_it_is_garbage() -> None:
    async with opened(StreamHandlers()) as (street, door):
        caller = street.call()
        await caller.send_all(GUEST_MAGIC)
        assert await is_closed(caller)
        assert door.counters == DoorCounters(accepted=1, garbage=1)


async def test_first_bytes_may_come_one_by_one() -> None:
    handlers = StreamHandlers()
    async with opened(handlers) as (street, _):
        caller = street.call()
        for at in range(len(PREAMBLE)):
            assert handlers.lanes == []
            await caller.send_all(PREAMBLE[at : at + 1])
            await settled()
        assert handlers.lanes == [PREAMBLE]


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1", b"\xff\xff\xff\xff", b"\x16\x03\x01\x40\x00\x01\xff\xff\xff", bytes(21)],
)
async def test_garbage_is_closed_and_counted(garbage: bytes) -> None:
    handlers = StreamHandlers()
    async with opened(handlers) as (street, door):
        caller = street.call()
        await caller.send_all(garbage)
        await settled()
        assert await is_closed(caller)
        assert door.counters == DoorCounters(accepted=1, garbage=1)
        assert handlers.let_in == []


async def test_who_leaves_before_saying_anything_is_counted() -> None:
    async with opened(StreamHandlers()) as (street, door):
        await street.call().send_eof()
        quitter = street.call()
        await quitter.send_all(PREAMBLE[:20])
        await quitter.send_eof()
        await trio.aclose_forcefully(street.call())
        await settled()
        assert door.counters == DoorCounters(accepted=3, closed_early=3)


async def test_a_reset_connection_is_counted_as_closed_early() -> None:
    async with opened(StreamHandlers()) as (street, door):
        street.call_and_reset()
        await settled()
        assert door.counters == DoorCounters(accepted=1, closed_early=1)


async def test_silence_is_over_after_5_s(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(StreamHandlers()) as (street, door):
        caller = street.call()
        assert await caller.receive_some(1) == b""
        assert autojump_clock.current_time() == pytest.approx(5)
        assert door.counters == DoorCounters(accepted=1, timed_out=1)


@pytest.mark.parametrize("first", [CLIENT_HELLO, PREAMBLE])
async def test_the_5_s_are_for_all_until_authenticated(
    autojump_clock: trio.testing.MockClock, first: bytes
) -> None:
    async with opened(StreamHandlers(treat=do_nothing, stay_s=math.inf)) as (street, door):
        caller = street.call()
        await trio.sleep(3)
        await caller.send_all(first)
        assert await caller.receive_some(1) == b""
        assert autojump_clock.current_time() == pytest.approx(5)
        assert door.counters == DoorCounters(accepted=1, timed_out=1)


async def test_who_is_authenticated_stays_and_no_longer_counts(
    autojump_clock: trio.testing.MockClock,
) -> None:
    handlers = StreamHandlers(stay_s=50)
    async with opened(handlers) as (street, door):
        callers = [street.call()]
        for caller in callers:
            await caller.send_all(PREAMBLE)
            await settled()
            if len(callers) <= MAX_PENDING_PER_ADDRESS:
                callers.append(street.call())
        await trio.sleep(100)
        assert not any([await is_closed(caller) for caller in callers])
        assert door.counters == DoorCounters(accepted=9, authenticated=9)
        assert handlers.stayed == 9  # nobody was cancelled after 5 s
    assert autojump_clock.current_time() == pytest.approx(100)


async def test_a_stream_belongs_to_its_handler_once_authenticated(
    autojump_clock: trio.testing.MockClock,
) -> None:
    handlers = StreamHandlers()
    async with opened(handlers) as (street, _):
        caller = street.call()
        await caller.send_all(PREAMBLE)
        await trio.sleep(100)  # the handler has returned long ago
        assert autojump_clock.current_time() == 100
        await handlers.let_in[0].send_all(b"still here")
        assert await caller.receive_some(100) == b"still here"


async def test_the_oldest_from_one_address_makes_room_for_the_next_from_there() -> None:
    async with opened(StreamHandlers()) as (street, door):
        other = street.call("10.0.0.2")
        callers = [street.call("10.0.0.1") for _ in range(MAX_PENDING_PER_ADDRESS + 2)]
        await settled()
        assert [await is_closed(caller) for caller in callers] == [True] * 2 + [False] * 8
        assert not await is_closed(other)
        assert door.counters == DoorCounters(accepted=11, dropped=2, pending=9)


async def test_lanes_that_members_have_offered_take_nobody_s_place_and_keep_theirs() -> None:
    handlers = StreamHandlers(treat=do_nothing, stay_s=50)
    offered = [encode_preamble(Preamble(bytes([i]) * 16)) for i in range(MAX_PENDING + 2)]
    street = Street()
    door = Acceptor(
        on_link=handlers.on_link, on_lane=handlers.on_lane, is_offered=offered.__contains__
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(door.serve, [street])
        stranger, lanes = street.call(), list[MemoryStream]()
        for preamble in offered:
            lanes.append(street.call())
            await lanes[-1].send_all(preamble)
            await settled()  # until it has said so, each is a stranger
        again = [street.call() for _ in range(MAX_PENDING_PER_ADDRESS + 1)]
        for caller in again:
            await caller.send_all(offered[0])
        await settled()
        assert not any([await is_closed(lane) for lane in lanes])
        closed = [await is_closed(caller) for caller in (stranger, *again)]
        assert closed == [True] * 2 + [False] * MAX_PENDING_PER_ADDRESS
        nursery.cancel_scope.cancel()


async def test_the_oldest_of_all_makes_room_when_the_door_is_full() -> None:
    async with opened(StreamHandlers()) as (street, door):
        callers = [street.call(f"10.0.0.{i}") for i in range(MAX_PENDING + 3)]
        await settled()
        closed = [await is_closed(caller) for caller in callers]
        assert closed == [True] * 3 + [False] * MAX_PENDING
        assert door.counters.pending == MAX_PENDING


async def test_a_thousand_that_never_speak_do_not_keep_a_peer_out() -> None:
    handlers = StreamHandlers()
    async with opened(handlers) as (street, door):
        for i in range(1000):
            street.call(f"10.0.{i % 200}.1")
        peer = street.call("10.1.0.1")
        await peer.send_all(PREAMBLE)
        await settled()
        assert handlers.lanes == [PREAMBLE]
        counters = door.counters
        assert counters.pending == MAX_PENDING - 1
        assert counters.accepted == counters.pending + counters.dropped + 1 == 1001


@pytest.mark.parametrize("treat", [do_nothing, fail_with(MeshKeyMismatch("another key"))])
async def test_whom_the_handler_does_not_want_is_closed_and_counted(
    treat: Callable[[Stream, Authenticated], object],
) -> None:
    async with opened(StreamHandlers(treat=treat)) as (street, door):
        caller = street.call()
        await caller.send_all(CLIENT_HELLO)
        await settled()
        assert await is_closed(caller)
        assert door.counters == DoorCounters(accepted=1, refused=1)


@pytest.mark.parametrize(
    ("treat", "error"),
    [
        (fail_with(KeyError("a bug of ours")), KeyError),
        (lambda _, authenticated: (authenticated(), fail_with(PmeshError())(_, _)), PmeshError),
    ],
)
async def test_what_a_handler_may_not_raise_ends_the_door_and_closes_its_listener(
    treat: Callable[[Stream, Authenticated], object], error: type[Exception]
) -> None:
    handlers, street = StreamHandlers(treat=treat), Street()
    await street.call().send_all(CLIENT_HELLO)
    with pytest.raises(ExceptionGroup) as raised:
        await Acceptor(on_link=handlers.on_link, on_lane=handlers.on_lane).serve([street])
    assert raised.group_contains(error)
    assert street.closed


async def test_what_is_contained_ends_one_connection_and_the_next_is_let_in() -> None:
    contained: list[str] = []

    @contextmanager
    def contain(what: str) -> Generator[None]:
        try:
            yield
        except OSError as e:
            contained.append(f"{what}: {e.strerror}")

    handlers = StreamHandlers(treat=fail_with(OSError(errno.EMFILE, "no descriptor")))
    street = Street()
    door = Acceptor[Stream](on_link=handlers.on_link, on_lane=handlers.on_lane, contain=contain)
    async with trio.open_nursery() as nursery:
        await nursery.start(door.serve, [street])
        for count in (1, 2):
            caller = street.call()
            await caller.send_all(PREAMBLE)
            assert await is_closed(caller)
            assert contained == ["a connection to this agent's port: no descriptor"] * count
            assert door.counters == DoorCounters(accepted=count, refused=count)
        nursery.cancel_scope.cancel()


async def test_authentication_that_comes_too_late_is_void(
    autojump_clock: trio.testing.MockClock,
) -> None:
    raised: list[PeerUnreachable] = []

    async def stubborn(_stream: Stream, _lane: bytes, authenticated: Authenticated) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(6)
        try:
            authenticated()
        except PeerUnreachable as e:
            raised.append(e)
            raise

    street, door = Street(), Acceptor[Stream](on_link=stubborn, on_lane=stubborn)
    async with trio.open_nursery() as nursery:
        await nursery.start(door.serve, [street])
        caller = street.call()
        await caller.send_all(PREAMBLE)
        assert await caller.receive_some(1) == b""
        nursery.cancel_scope.cancel()
    assert autojump_clock.current_time() == pytest.approx(6)
    assert len(raised) == 1
    assert door.counters == DoorCounters(accepted=1, timed_out=1)


async def test_handshakes_come_in_a_burst_and_then_at_a_steady_pace(
    autojump_clock: trio.testing.MockClock,
) -> None:
    handlers = StreamHandlers()
    async with opened(handlers) as (street, _):
        for i in range(HANDSHAKE_BURST + 10):
            await street.call(f"10.0.0.{i}").send_all(CLIENT_HELLO)
        await trio.sleep(1)
    began = handlers.times[0]
    assert began < 0.001
    for i, time in enumerate(handlers.times):
        paced = max(0, i - HANDSHAKE_BURST) * HANDSHAKE_INTERVAL_S
        assert time - began == pytest.approx(paced, abs=HANDSHAKE_INTERVAL_S + 1e-9)
    assert len(handlers.times) == HANDSHAKE_BURST + 10
    assert autojump_clock.current_time() >= 1


async def test_those_who_give_up_take_no_turn_from_those_who_wait(
    autojump_clock: trio.testing.MockClock,
) -> None:
    handlers = StreamHandlers()
    async with opened(handlers) as (street, door):
        for i in range(1000):
            await street.call(f"10.0.{i % 250}.1").send_all(CLIENT_HELLO)
        await street.call("10.9.9.9").send_all(CLIENT_HELLO)
        await trio.sleep(2)
        assert door.counters.pending == 0  # 64 turns took 1.3 s; 1,000 would have taken 20
        assert handlers.times[-1] <= MAX_PENDING * HANDSHAKE_INTERVAL_S + 1e-9
    assert autojump_clock.current_time() == pytest.approx(2)


async def test_lanes_need_no_turn(autojump_clock: trio.testing.MockClock) -> None:
    handlers = StreamHandlers()
    async with opened(handlers) as (street, _):
        for i in range(50):
            await street.call(f"10.0.0.{i}").send_all(PREAMBLE)
        await settled()
        assert len(handlers.lanes) == 50
        assert autojump_clock.current_time() == 0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EIO])
async def test_a_system_out_of_descriptors_costs_the_oldest_stranger_and_a_moment(
    autojump_clock: trio.testing.MockClock, number: int
) -> None:
    handlers = StreamHandlers()
    async with opened(handlers) as (street, door):
        street.fail(OSError(number, "too many"))
        stranger = street.call()
        await trio.sleep(0.2)
        street.fail(OSError(number, "too many"))
        peer = street.call()
        await peer.send_all(PREAMBLE)
        await trio.sleep(0.2)
        assert handlers.times == [pytest.approx(0.3)]
        assert await is_closed(stranger)
        assert door.counters == DoorCounters(accepted=2, authenticated=1, dropped=1, out_of_files=2)
    assert autojump_clock.current_time() == pytest.approx(0.4)


async def test_a_connection_over_an_interface_that_is_not_used_is_refused() -> None:
    handlers, street = StreamHandlers(), Street()
    door = Acceptor[Stream](
        on_link=handlers.on_link, on_lane=handlers.on_lane, uses=lambda _: False
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(door.serve, [street])
        caller = street.call()
        await settled()
        assert await is_closed(caller)
        assert door.counters == DoorCounters(accepted=1, refused=1)
        nursery.cancel_scope.cancel()


async def test_a_listener_may_come_later_and_be_closed_earlier() -> None:
    handlers = StreamHandlers()
    async with opened(handlers) as (street, door):
        second = Street()
        door.add(second)
        await second.call().send_all(PREAMBLE)
        await settled()
        assert len(handlers.lanes) == 1
        second.close()
        await settled()
        await street.call().send_all(PREAMBLE)
        await settled()
        assert door.counters.authenticated == 2


async def test_a_broken_listener_ends_the_door() -> None:
    handlers, street = StreamHandlers(), Street()
    street.fail(OSError(errno.EBADF, "bad file descriptor"))
    with pytest.raises(ExceptionGroup) as raised:
        await Acceptor(on_link=handlers.on_link, on_lane=handlers.on_lane).serve([street])
    assert raised.group_contains(OSError)


async def test_real_agents_meet_at_a_real_door_and_strangers_are_told_why() -> None:
    met: list[Path] = []
    refused: list[PmeshError] = []

    async def on_link(
        stream: trio.SocketStream, first: bytes, authenticated: Authenticated
    ) -> None:
        try:
            link = await shake_hands(
                stream,
                contexts=ADAS,
                server_side=True,
                hello=lambda _: ADAS_HELLO,
                first_bytes=first,
            )
        except PmeshError as e:
            refused.append(e)
            raise
        authenticated()
        met.append(link)

    async def on_lane(_: trio.SocketStream, __: bytes, ___: Authenticated) -> None:
        raise AssertionError("nobody opens a lane here")

    door = Acceptor(on_link=on_link, on_lane=on_lane)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        await nursery.start(door.serve, listeners)
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        link = await shake_hands(
            stream, contexts=BOBS, server_side=False, hello=lambda _: BOBS_HELLO
        )
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        with pytest.raises(MeshKeyMismatch):
            await shake_hands(
                stream, contexts=STRANGERS, server_side=False, hello=lambda _: BOBS_HELLO
            )
        nursery.start_soon(link.aclose)
        with pytest.raises(trio.EndOfChannel):
            await met[0].receive()
        await met[0].aclose()
        while not door.counters.refused:  # the door still waits for the stranger's goodbye
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert [type(e) for e in refused] == [MeshKeyMismatch]
    assert door.counters == DoorCounters(accepted=2, authenticated=1, refused=1)
