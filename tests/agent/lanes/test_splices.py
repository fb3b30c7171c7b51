"""A member forwards a connection between two others that can't reach each other."""

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.lanes.rendezvous import ATTEMPT_S, MAX_SPLICES, LaneRendezvous
from pmesh.core.wire.link import Splice
from pmesh.errors import LaneBroken, NetworkError, PeerUnreachable
from pmesh.ids import Member
from tests.agent.lanes.test_rendezvous import A, B, C
from tests.worlds.trainer import until
from tests.worlds.village import NoReach

TICKET = b"t" * 16


def connection() -> tuple[trio.SocketStream, trio.SocketStream]:
    ours, theirs = socket.socketpair()
    near, far = (trio.SocketStream(trio.socket.from_stdlib_socket(end)) for end in (ours, theirs))
    return near, far


class Between(NoReach):
    """The one that forwards, and what Cara gets."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.rendezvous = LaneRendezvous(B, self, nursery, bytes)
        self.caras: list[trio.SocketStream] = []
        self.complaints: list[NetworkError] = []
        self.is_cara_up = True

    async def dial_direct(self, member: Member) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        assert member == C
        if not self.is_cara_up:
            raise PeerUnreachable("it refuses connections")
        near, far = connection()
        self.caras.append(far)
        return near

    def complain(self, member: Member, error: NetworkError) -> None:
        assert member == C
        self.complaints.append(error)

    async def connect(self, ticket: bytes = TICKET) -> trio.SocketStream:
        """Ada's end of a connection whose preamble names this ticket."""
        near, far = connection()
        with suppress(LaneBroken):
            await self.rendezvous.welcome(far, ticket, lambda: None)
            return near
        await far.aclose()
        return near


@asynccontextmanager
async def between() -> AsyncGenerator[Between]:
    async with trio.open_nursery() as nursery:
        there = Between(nursery)
        yield there
        nursery.cancel_scope.cancel()
    for stream in there.caras:
        await stream.aclose()


async def receive(stream: trio.SocketStream, size: int) -> bytes:
    received = b""
    while len(received) < size and (data := await stream.receive_some()):
        received += data
    return received


async def test_bytes_go_both_ways_and_an_end_ends_both(autojump_clock: MockClock) -> None:
    assert autojump_clock
    async with between() as here:
        here.rendezvous.expect_splice(A, Splice(TICKET, C))
        ada = await here.connect()
        await ada.send_all(b"sealed for Cara")
        await until(lambda: bool(here.caras))
        (cara,) = here.caras
        assert await receive(cara, 15) == b"sealed for Cara"
        sent = bytes(range(256)) * 4096
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cara.send_all, sent)
            assert await receive(ada, len(sent)) == sent
        await ada.aclose()
        assert await receive(cara, 1) == b""


async def test_a_ticket_serves_once_and_not_for_long(autojump_clock: MockClock) -> None:
    assert autojump_clock
    async with between() as here:
        here.rendezvous.expect_splice(A, Splice(TICKET, C))
        first, second = await here.connect(), await here.connect()
        assert await receive(second, 1) == b""
        here.rendezvous.expect_splice(A, Splice(b"u" * 16, C))
        await trio.sleep(ATTEMPT_S + 1)
        late = await here.connect(b"u" * 16)
        assert await receive(late, 1) == b""
        for stream in (first, second, late):
            await stream.aclose()


@pytest.mark.parametrize("room_again_after", ["they have ended", "nobody came"])
async def test_what_one_member_makes_another_forward_is_limited(
    autojump_clock: MockClock, room_again_after: str
) -> None:
    assert autojump_clock
    async with between() as here:
        tickets = [bytes([number]) * 16 for number in range(MAX_SPLICES)]
        for ticket in tickets:
            here.rendezvous.expect_splice(A, Splice(ticket, C))
        here.rendezvous.expect_splice(A, Splice(TICKET, C))
        refused = await here.connect()
        assert await receive(refused, 1) == b""
        await refused.aclose()

        if room_again_after == "they have ended":
            for ticket in tickets:
                await (await here.connect(ticket)).aclose()
        await trio.sleep(ATTEMPT_S + 1)
        here.rendezvous.expect_splice(A, Splice(TICKET, C))
        ada = await here.connect()
        await ada.send_all(b"x")
        await trio.sleep(0.1)
        assert await receive(here.caras[-1], 1) == b"x"
        await ada.aclose()


async def test_a_connection_that_can_not_go_on_is_closed(autojump_clock: MockClock) -> None:
    assert autojump_clock
    async with between() as here:
        here.is_cara_up = False
        here.rendezvous.expect_splice(A, Splice(TICKET, C))
        ada = await here.connect()
        assert await receive(ada, 1) == b""
        await until(lambda: bool(here.complaints))
        assert [str(error) for error in here.complaints] == ["it refuses connections"]
        await ada.aclose()


async def test_nothing_is_forwarded_to_oneself(autojump_clock: MockClock) -> None:
    assert autojump_clock
    async with between() as here:
        here.rendezvous.expect_splice(A, Splice(TICKET, B))
        ada = await here.connect()
        assert await receive(ada, 1) == b""
        await ada.aclose()
