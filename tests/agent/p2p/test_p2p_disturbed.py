"""O4: messages while messages are lost and lanes break: each comes whole, and once."""

from collections.abc import Callable

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.p2p import lanes
from pmesh.agent.p2p.lanes import LanesIn
from pmesh.core.wire.link import (
    AnnounceMessage,
    MessageDelivered,
    MessageWithdrawn,
    P2PMessage,
    RequestMessage,
)
from pmesh.core.wire.records import RecordHeader
from pmesh.net.lanes.lane import Lane
from tests.worlds.p2p import X, lose_first, some, told
from tests.worlds.village_ops import machine_of


@pytest.mark.parametrize("kind", [AnnounceMessage, RequestMessage, MessageDelivered])
@pytest.mark.parametrize("count", [1, 4])
async def test_a_message_that_is_lost_is_said_again(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, kind: type[P2PMessage], count: int
) -> None:
    async with some(clock) as ranks:
        lost = lose_first(monkeypatch, kind, count)
        await ranks.deliver(X)
        assert len(lost) == count
        await ranks.check_that_nothing_is_left()


async def test_a_withdrawal_that_is_lost_is_told_to_who_asks(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with some(clock) as ranks:
        one, other = ranks.envelopes
        lost = lose_first(monkeypatch, MessageWithdrawn, 1)
        await one.verdict_of(await one.begin_send(other.id, X, timeout_s=1))
        assert len(lost) == 1
        await ranks.check_that_nothing_is_left()


def break_once(
    monkeypatch: pytest.MonkeyPatch, name: str, segment: int, how: Callable[[Lane], object]
) -> list[int]:
    """At this record of a message, do something to the lane first; returns what was done."""
    real, done = getattr(Lane, name), list[int]()

    async def disturbed(lane: Lane, header: RecordHeader, *rest: object) -> None:
        if header.segment == segment and header.body_bytes and not done:
            done.append(segment)
            how(lane)
        await real(lane, header, *rest)

    monkeypatch.setattr(Lane, name, disturbed)
    return done


@pytest.mark.parametrize("name", ["send", "receive"])
@pytest.mark.parametrize("segment", [0, 3])
async def test_a_lane_that_breaks_is_replaced_and_the_message_comes_whole(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, name: str, segment: int
) -> None:
    async with some(clock) as ranks:
        await ranks.deliver(np.array([1.0]))
        done = break_once(monkeypatch, name, segment, Lane.close)
        await ranks.deliver(X)
        assert done == [segment]
        await ranks.check_that_nothing_is_left()


async def test_a_lane_that_brings_nothing_is_replaced(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, hung = Lane.send, list[int]()

    async def hang_once(lane: Lane, header: RecordHeader, body: memoryview) -> None:
        if header.segment == 3 and not hung:
            hung.append(3)
            await lane._closed.wait()  # noqa: SLF001 - as one on which nothing moves
        await real(lane, header, body)

    async with some(clock) as ranks:
        monkeypatch.setattr(Lane, "send", hang_once)
        asks = told(monkeypatch)
        began = trio.current_time()
        await ranks.deliver(X)
        assert 5 <= trio.current_time() - began < 10
        assert {ask.lane for ask in asks if isinstance(ask, RequestMessage)} == {0, 1}
        await ranks.check_that_nothing_is_left()


async def test_a_lane_that_does_not_come_is_asked_for_again(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with some(clock) as ranks:
        rendezvous = machine_of(ranks.here, ranks.trainers[0]).agent.jobs.rendezvous
        real, offers = rendezvous.offer, list[object]()

        def offer(edge: object, to: object) -> None:
            offers.append(edge)
            if len(offers) > 1:
                real(edge, to)  # type: ignore[arg-type] # as it came

        monkeypatch.setattr(rendezvous, "offer", offer)
        await ranks.deliver(X)
        assert len(offers) == 2


async def test_a_slow_lane_is_given_the_time_that_it_needs(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Lane.receive

    async def trickle(lane: Lane, header: RecordHeader, into: memoryview) -> None:
        if header.body_bytes == 1024 and lane.bytes_received < 10_000_000:
            lane.bytes_received += 1_000_000  # as a slow network brings it
            await trio.sleep(4)
        await real(lane, header, into)

    monkeypatch.setattr(lanes, "ASK_AGAIN_S", 1.0)
    async with some(clock) as ranks:
        asks = told(monkeypatch)
        monkeypatch.setattr(Lane, "receive", trickle)
        began = trio.current_time()
        await ranks.deliver(np.zeros(128))
        assert trio.current_time() - began >= 10
        assert {ask.lane for ask in asks if isinstance(ask, RequestMessage)} == {0}


async def test_a_sender_that_gives_up_half_way_leaves_the_receiver_to_the_next_message(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, hung = Lane.send, list[int]()

    async def hang_once(lane: Lane, header: RecordHeader, body: memoryview) -> None:
        if header.segment == 2 and not hung:
            hung.append(2)
            await trio.sleep_forever()
        await real(lane, header, body)

    monkeypatch.setattr(Lane, "send", hang_once)
    async with some(clock) as ranks:
        one, other = ranks.envelopes
        call = await other.begin_receive(one.id)
        verdict = await one.verdict_of(await one.begin_send(other.id, X, timeout_s=2))
        assert verdict.error == "OpTimedOut"
        sent = await one.begin_send(other.id, -X)
        got = await other.end(call)
        assert got is not None
        assert got.values.tobytes() == (-X).tobytes()
        await one.end(sent)


async def test_a_receiver_that_gives_up_half_way_leaves_the_message_whole(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, hung = LanesIn.bring, list[int]()

    async def hang_once(lanes: LanesIn, *rest: object) -> None:
        if not hung:
            hung.append(1)
            await trio.sleep_forever()
        await real(lanes, *rest)  # type: ignore[arg-type] # as it came

    monkeypatch.setattr(LanesIn, "bring", hang_once)
    async with some(clock) as ranks:
        one, other = ranks.envelopes
        sent = await one.begin_send(other.id, X)
        call = await other.begin_receive(one.id, timeout_s=2)
        assert (await other.verdict_of(call)).error == "OpTimedOut"
        assert (await other.receive(one.id)).values.tobytes() == X.tobytes()
        await one.end(sent)
