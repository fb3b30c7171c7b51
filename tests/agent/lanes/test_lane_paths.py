"""Lanes over several paths between two agents: which get several connections, and when."""

import errno
import selectors
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias

import pytest
import trio
import trio.lowlevel
from msgspec.structs import replace
from trio.testing import MockClock

from pmesh.agent.lanes.lane_paths import WIDEN_EVERY_S
from pmesh.agent.lanes.rendezvous import LaneKey
from pmesh.core.wire.lanes import OfferLane
from pmesh.core.wire.preamble import PREAMBLE_BYTES, Preamble, encode_preamble
from pmesh.errors import LaneBroken, NetworkError, PeerUnreachable
from pmesh.ids import Member
from pmesh.net.lanes import lane as lane_module
from pmesh.net.lanes.lane import Lane, PathLost
from pmesh.net.lanes.multipath import LanePath, MultipathLane
from pmesh.net.lanes.subflows import ConnectionFacts
from tests.agent.lanes.sides import (
    JOB,
    A,
    B,
    Side,
    dial_as_offered,
    edge,
    made_offer,
    opened,
    take,
)
from tests.worlds.faults import Faults, Real
from tests.worlds.lanes import descriptors, header
from tests.worlds.trainer import until

Hosts = tuple[frozenset[str], frozenset[str]]


class Cabled(Side):
    """One of two agents with some cables between them."""

    def __init__(self, me: Member, nursery: trio.Nursery, ends: dict[int, tuple[str, str]]) -> None:
        super().__init__(me, nursery, dials=me == A)
        self.ends = ends
        """The addresses at the two ends of each socket: of this side and of the other."""
        self.cables = ["cable"]
        self.broken: set[str] = set()
        self.strays: set[str] = set()
        """Connections over these cables go another way."""
        self.preambles: list[bytes] = []

    def hosts(self, cable: str) -> Hosts:
        return frozenset({f"{self.me.incarnation}-{cable}"}), frozenset({f"{self.peer}-{cable}"})

    @property
    def peer(self) -> int:
        return self.other.me.incarnation

    def paths_to(self, _: Member) -> tuple[LanePath, ...]:
        return tuple(
            LanePath(self.hosts(cable), ConnectionFacts(1e6), partial(self.dial_over, cable))
            for cable in self.cables
        )

    async def dial_member(self, member: Member) -> trio.SocketStream:
        assert member == self.other.me
        return await self.dial_over(self.cables[0])

    async def dial_over(self, cable: str) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        if cable in self.broken:
            raise PeerUnreachable("the cable is broken")
        over = "elsewhere" if cable in self.strays else cable
        ends = socket.socketpair()
        ours, theirs = f"{self.me.incarnation}-{over}", f"{self.peer}-{over}"
        self.ends[ends[0].fileno()] = ours, theirs
        self.ends[ends[1].fileno()] = theirs, ours
        near, far = (trio.SocketStream(trio.socket.from_stdlib_socket(end)) for end in ends)
        self._nursery.start_soon(self.other.answer_acceptor, far)
        return near

    async def answer_acceptor(self, stream: trio.SocketStream) -> None:
        first = bytes(await stream.receive_some(PREAMBLE_BYTES))
        self.preambles.append(first)
        await self.answer(stream, first)

    async def answer(self, stream: trio.SocketStream, first: bytes) -> None:
        try:
            await self.rendezvous.welcome(stream, first, lambda: None)
        except NetworkError as e:
            self.complaints.append(e)
        finally:
            await trio.aclose_forcefully(stream)

    def lose(self, cable: str, *, outranked: bool = False) -> None:
        """A path has failed, and the lanes are told."""
        if not outranked:
            self.cables.remove(cable)
        self.rendezvous.paths.lose(*self.hosts(cable), outranked=outranked)


@asynccontextmanager
async def two_machines(
    monkeypatch: pytest.MonkeyPatch, *cables: str
) -> AsyncGenerator[tuple[Cabled, Cabled]]:
    ends: dict[int, tuple[str, str]] = {}
    monkeypatch.setattr(lane_module, "_hosts_of", lambda sock: ends[sock.fileno()])
    async with trio.open_nursery() as nursery:
        ada, bob = Cabled(A, nursery, ends), Cabled(B, nursery, ends)
        ada.other, bob.other = bob, ada
        ada.cables, bob.cables = list(cables), list(cables)
        try:
            yield ada, bob
        finally:
            nursery.cancel_scope.cancel()
            ada.rendezvous.close()
            bob.rendezvous.close()


def used(side: Cabled, lane: Lane) -> set[str]:
    """Return the cables on which the lane has a connection."""
    return {cable for cable in ("cable", "wifi", "new") if lane.runs_between(*side.hosts(cable))}


async def both_ends(ada: Cabled, bob: Cabled, of: LaneKey | None = None) -> tuple[Lane, Lane]:
    ada.rendezvous.offer(of or edge(), B)
    return await take(ada, sending=True, of=of), await take(bob, sending=False, of=of)


async def say(lanes: tuple[Lane, Lane], word: bytes, segment: int = 0) -> None:
    sending, receiving = lanes
    into = bytearray(len(word))
    with trio.fail_after(10):
        await sending.send(header(len(word), roster=5, segment=segment), word)
        await receiving.receive(header(len(word), roster=5, segment=segment), memoryview(into))
    assert into == word


def close(*lanes: Lane) -> None:
    for lane in lanes:
        lane.close()


Joined: TypeAlias = tuple[Cabled, Cabled, tuple[Lane, Lane]]


@pytest.fixture
async def joined(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Joined]:
    """Two machines with two cables, and the ends of a lane that has a connection on each."""
    async with two_machines(monkeypatch, "cable", "wifi") as (ada, bob):
        lanes = await both_ends(ada, bob)
        await trio.sleep(1)
        yield ada, bob, lanes
        close(*lanes)
    assert autojump_clock.current_time() < 10


async def test_one_path_gets_the_plain_lane(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_machines(monkeypatch, "cable") as (ada, bob):
        lanes = await both_ends(ada, bob)
        await trio.sleep(1)
        assert [type(lane) for lane in lanes] == [Lane, Lane]
        assert not ada.offers[0].several
        close(*lanes)
    assert autojump_clock.current_time() < 5


@pytest.mark.parametrize("ada_dials", [True, False])
async def test_with_two_paths_a_lane_has_a_connection_on_each(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, *, ada_dials: bool
) -> None:
    async with two_machines(monkeypatch, "cable", "wifi") as (ada, bob):
        ada.dials, bob.dials = ada_dials, not ada_dials
        lanes = await both_ends(ada, bob)
        await trio.sleep(1)
        assert used(ada, lanes[0]) == used(bob, lanes[1]) == {"cable", "wifi"}
        await say(lanes, b"over both")
        for side in (ada, bob):
            carries = side.rendezvous.paths.carries
            assert [carries(*side.hosts(cable)) for cable in ("wifi", "new")] == [True, False]
        answering = bob if ada_dials else ada
        assert [first[-4:] for first in answering.preambles] == [bytes(4), b"\0\0\0\1"]
        close(*lanes)
    assert autojump_clock.current_time() < 5


@pytest.mark.parametrize("op", [3, -2])
async def test_results_and_messages_go_over_one_path(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, op: int
) -> None:
    async with two_machines(monkeypatch, "cable", "wifi") as (ada, bob):
        lanes = await both_ends(ada, bob, of=edge(op=op))
        await trio.sleep(1)
        await say(lanes, b"over one")
        assert [type(lane) for lane in lanes] == [Lane, Lane]
        close(*lanes)
    assert autojump_clock.current_time() < 5


async def test_a_new_path_is_joined_and_a_lost_one_left_while_the_lane_goes_on(
    autojump_clock: MockClock, joined: Joined
) -> None:
    ada, bob, lanes = joined
    for side in (ada, bob):
        side.lose("cable")
    assert used(ada, lanes[0]) == used(bob, lanes[1]) == {"wifi"}
    await say(lanes, b"over one")
    for side in (ada, bob):
        side.cables.append("new")
    began = autojump_clock.current_time()
    await until(lambda: used(bob, lanes[1]) == {"wifi", "new"})
    assert autojump_clock.current_time() - began < 5
    await say(lanes, b"over both", segment=1)


async def test_the_last_path_of_a_lane_is_replaced_by_one_that_would_not_be_worth_it_else(
    autojump_clock: MockClock,  # noqa: ARG001 - it is the clock
    joined: Joined,
) -> None:
    ada, bob, lanes = joined
    for side in (ada, bob):
        side.cables.append("new")
        side.lose("cable")
        side.lose("wifi")
    await say(lanes, b"over the last")
    assert used(ada, lanes[0]) == {"new"}


async def test_a_lane_whose_paths_are_all_lost_has_lost_its_path(
    autojump_clock: MockClock,  # noqa: ARG001 - it is the clock
    joined: Joined,
) -> None:
    ada, bob, lanes = joined
    for side in (ada, bob):
        side.lose("cable")
        side.lose("wifi")
    for lane in lanes:
        with pytest.raises(PathLost), trio.fail_after(5):
            await lane.wait_for(lane_module.LaneWait.CLOSED)


async def test_a_lane_of_one_connection_is_broken_once_for_a_second_path(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_machines(monkeypatch, "cable") as (ada, bob):
        plain = await both_ends(ada, bob)
        for side in (ada, bob):
            side.cables.append("new")
        with pytest.raises(PathLost), trio.fail_after(5):
            await plain[0].wait_for(lane_module.LaneWait.CLOSED)
        plain[1].close()
        lanes = await both_ends(ada, bob)  # by the view that follows
        await trio.sleep(1)
        assert used(ada, lanes[0]) == {"cable", "new"}
        close(*lanes)

        ada.cables.remove("new")
        plain = await both_ends(ada, bob, of=edge(op=-1, number=6))
        ada.cables.append("new")
        began = autojump_clock.current_time()
        await until(lambda: plain[0].is_closed)
        assert autojump_clock.current_time() - began > WIDEN_EVERY_S / 2
        plain[1].close()


async def test_a_better_path_breaks_a_plain_lane_but_no_lane_that_has_several(
    autojump_clock: MockClock,  # noqa: ARG001 - it is the clock
    joined: Joined,
) -> None:
    ada, bob, several = joined
    plain = await both_ends(ada, bob, of=edge(op=-2))
    await trio.sleep(1)
    ada.lose("cable", outranked=True)
    assert [lane.is_closed for lane in (several[0], plain[0])] == [False, True]
    assert used(ada, several[0]) == {"cable", "wifi"}
    plain[1].close()


@pytest.mark.parametrize("how", ["broken", "strays"])
async def test_a_path_that_takes_no_connection_is_tried_again_and_the_lane_runs_over_the_other(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with two_machines(monkeypatch, "cable", "wifi") as (ada, bob):
        getattr(ada, how).add("wifi")
        lanes = await both_ends(ada, bob)
        await trio.sleep(10)
        assert used(ada, lanes[0]) == {"cable"}
        assert len(ada.complaints) <= 6
        await say(lanes, b"over one")
        getattr(ada, how).clear()
        await trio.sleep(5)
        assert used(ada, lanes[0]) == {"cable", "wifi"}
        close(*lanes)
    assert autojump_clock.current_time() < 20


async def test_an_index_that_was_used_is_refused(
    autojump_clock: MockClock,  # noqa: ARG001 - it is the clock
    joined: Joined,
) -> None:
    """Its keys would seal something else: whoever recorded the greeting must not get it."""
    _, bob, lanes = joined
    for first in list(bob.preambles):
        stranger, door = (
            trio.SocketStream(trio.socket.from_stdlib_socket(end)) for end in socket.socketpair()
        )
        await bob.answer(door, first)
        assert await stranger.receive_some(1) == b""
        await stranger.aclose()
    assert len(bob.complaints) == 2
    assert all("a lane that" in str(error) for error in bob.complaints)
    assert used(bob, lanes[1]) == {"cable", "wifi"}


async def test_a_connection_of_a_lane_that_has_one_is_refused(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_machines(monkeypatch, "cable") as (ada, bob):
        lanes = await both_ends(ada, bob)
        _, door = (
            trio.SocketStream(trio.socket.from_stdlib_socket(end)) for end in socket.socketpair()
        )
        await bob.answer(door, encode_preamble(Preamble(ada.offers[0].lane, 1)))
        assert "does not await it" in str(bob.complaints[0])
        close(*lanes)
        await _.aclose()
    assert autojump_clock.current_time() < 5


async def test_a_connection_that_is_let_in_too_late_is_not_joined(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    async with two_machines(monkeypatch, "cable", "wifi") as (ada, bob):

        async def too_late(
            welcome: Real, stream: trio.SocketStream, preamble: Preamble, _: object
        ) -> None:
            def authenticated() -> None:
                raise PeerUnreachable("its time at the door was over")

            await welcome(stream, preamble, authenticated)

        faults.around(bob.rendezvous.paths, "welcome", too_late)
        lanes = await both_ends(ada, bob)
        await trio.sleep(1)
        assert used(bob, lanes[1]) == {"cable"}
        await say(lanes, b"over one")
        close(*lanes)
    assert autojump_clock.current_time() < 5


async def test_nothing_is_kept_of_a_lane_that_is_closed(
    autojump_clock: MockClock,  # noqa: ARG001 - it is the clock
    joined: Joined,
) -> None:
    ada, bob, lanes = joined
    assert isinstance(lanes[0], MultipathLane)
    [offer] = ada.offers
    assert isinstance(offer, OfferLane)
    assert offer.lane in ada.rendezvous.paths
    close(*lanes)
    await trio.sleep(5)
    assert offer.lane not in ada.rendezvous.paths
    assert offer.lane not in bob.rendezvous.paths
    await opened(*await reopened(ada, bob))
    await trio.sleep(1)  # what carries the lane ends


async def reopened(ada: Cabled, bob: Cabled) -> tuple[Cabled, Cabled]:
    ada.rendezvous.offer(edge(), B)
    await trio.lowlevel.checkpoint()
    return ada, bob


async def test_no_descriptor_for_a_lane_of_several_connections_is_a_broken_lane(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    async with two_machines(monkeypatch, "cable", "wifi") as (ada, bob):
        before = descriptors()
        full = OSError(errno.EMFILE, "Too many open files")
        with faults.fail(selectors, "DefaultSelector", full):
            ada.rendezvous.offer(edge(), B)
            with pytest.raises(LaneBroken, match="can be made"):
                await take(ada, sending=True)
        assert "Too many open files" in str(ada.complaints[0])
        await trio.sleep(1)
        assert descriptors() == before
        lanes = await both_ends(ada, bob, edge(6))
        assert used(ada, lanes[0]) == {"cable"}  # at first, as always
        close(*lanes)
    assert autojump_clock.current_time() < 5


async def test_lanes_to_which_a_peer_gives_one_id_end_without_an_error(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_machines(monkeypatch, "cable", "wifi") as (ada, bob):
        offer = replace(made_offer(ada, edge(), dial=False), several=True)
        for number in (5, 6):
            lied = replace(offer, number=number)
            bob.rendezvous.accept(A, lied)
            (await dial_as_offered(ada, lied)).close()
        bob.rendezvous.forget(JOB, below=7)
        await trio.sleep(5)
        assert all(lane.is_closed for lane in bob.begun)
        assert offer.lane not in bob.rendezvous.paths
    assert autojump_clock.current_time() < 10
