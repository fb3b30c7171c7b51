"""O4: messages while views change, ranks are lost, and agents doubt."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.core.ops.reductions import Values
from pmesh.core.wire.records import RecordHeader
from pmesh.net.lanes.executor import run_plan
from pmesh.net.lanes.lane import Lane, LaneWait, Steps
from pmesh.p2p.agent import endpoint
from pmesh.p2p.agent.endpoint import LanesIn
from pmesh.p2p.agent.router import P2PRouter
from pmesh.p2p.wire import (
    AnnounceMessage,
    MessageDelivered,
    MessageWithdrawn,
    P2PMessage,
    RequestMessage,
)
from tests.p2p.p2p import X, attach, lose_first, some, told
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import until
from tests.worlds.village_ops import machine_of, ranks_of, reduce_all

FEW = X[:4096]
"""In one record, which takes no plan."""


def stands_still(lane: Lane) -> Steps:
    """Nothing moves on the lane until it is closed."""
    while not lane.is_closed:
        yield LaneWait.CLOSED


def closes(lane: Lane) -> Steps:
    lane.close()
    yield LaneWait.TURN


def disturb_once(
    faults: Faults, name: str, segment: int, how: Callable[[Lane], Steps]
) -> list[int]:
    """At this record of a message, do something to the lane first; returns what was done."""
    done = list[int]()

    def disturbed(real: Real, lane: Lane, header: RecordHeader, body: memoryview) -> Steps:
        if header.segment == segment and header.body_bytes and not done:
            done.append(segment)
            yield from how(lane)
        yield from real(lane, header, body)

    faults.around(Lane, name, disturbed)
    return done


async def test_messages_go_on_when_another_rank_is_lost(clock: MockClock) -> None:
    async with some(clock, 3) as ranks:
        one, other, _ = ranks.envelopes
        before = await one.begin_send(other.id, X)
        waits = await one.begin_receive(other.id)
        await ranks.trainers[2].die()
        await until(lambda: all(rank.size == 2 for rank in ranks_of(ranks.here)[:2]))

        assert (await other.receive(one.id)).values.tobytes() == X.tobytes()
        await one.end(before)
        sent = await other.begin_send(one.id, -X)
        got = await one.end(waits)
        assert got is not None
        assert got.values.tobytes() == (-X).tobytes()
        await other.end(sent)
        assert [r[0] for r in await reduce_all(ranks.trainers[:2])] == [2.0, 2.0]


@pytest.mark.parametrize("name", ["sends", "receives"])
async def test_a_view_that_comes_while_a_message_travels_has_it_sent_again_once(
    clock: MockClock, faults: Faults, name: str
) -> None:
    async with some(clock, 3) as ranks:
        one, other, _ = ranks.envelopes
        held = disturb_once(faults, name, 2, stands_still)
        faults.limit(endpoint, "ASK_AGAIN_S", 3.0)
        sent = await one.begin_send(other.id, X)
        call = await other.begin_receive(one.id)
        await until(lambda: bool(held))
        await ranks.trainers[2].die()
        got = await other.end(call)
        assert got is not None
        assert got.values.tobytes() == X.tobytes()
        await one.end(sent)
        await ranks.check_that_nothing_is_left()


async def test_an_acknowledgement_that_a_view_change_has_swallowed_is_given_again(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with some(clock, 3) as ranks:
        one, other, _ = ranks.envelopes
        lost = lose_first(monkeypatch, MessageDelivered, 3)
        sent = await one.begin_send(other.id, X)
        await other.receive(one.id)
        await ranks.trainers[2].die()
        await one.end(sent)
        assert len(lost) == 3
        await ranks.check_that_nothing_is_left()


async def test_who_waits_for_a_rank_that_is_lost_is_told_so_and_any_goes_on_to_the_others(
    clock: MockClock,
) -> None:
    async with some(clock, 3) as ranks:
        a, b, c = ranks.envelopes
        sending = await a.begin_send(c.id, X)
        receiving = await a.begin_receive(c.id)
        both = await a.begin_receive(b.id, c.id)
        await ranks.trainers[2].die()
        name = f"rank 2 ({ranks.trainers[0].names[2]}) is lost: its trainer died"
        for call in (sending, receiving):
            verdict = await a.verdict_of(call)
            assert (verdict.error, verdict.message) == ("RankLost", name)
        for call in (await a.begin_send(c.id, X), await a.begin_receive(c.id)):
            assert (await a.verdict_of(call)).error == "RankLost"
        sent = await b.begin_send(a.id, X)
        got = await a.end(both)
        assert got is not None
        assert got.source == b.id
        await b.end(sent)

        last = await a.begin_receive(b.id, c.id)
        await ranks.trainers[1].die()
        verdict = await a.verdict_of(last)
        assert verdict.error == "RankLost"
        assert "its trainer died" in verdict.message


async def test_a_message_from_a_rank_that_dies_while_it_travels_gives_way_to_another_s(
    clock: MockClock, faults: Faults
) -> None:
    async with some(clock, 3) as ranks:
        a, b, c = ranks.envelopes
        held = disturb_once(faults, "sends", 2, stands_still)
        await c.begin_send(a.id, X)
        call = await a.begin_receive(b.id, c.id)
        await until(lambda: bool(held))
        await ranks.trainers[2].die()
        await c.trainer.die()
        sent = await b.begin_send(a.id, -X)
        got = await a.end(call)
        assert got is not None
        assert got.source == b.id
        await b.end(sent)


async def test_a_connection_that_ends_takes_its_messages_with_it(clock: MockClock) -> None:
    async with some(clock) as ranks:
        one, other = ranks.envelopes
        await one.begin_send(other.id, X)
        waits = await other.begin_receive(one.id, timeout_s=20)
        again = await attach(
            ranks.here, machine_of(ranks.here, ranks.trainers[0]), ranks.trainers[0]
        )
        await one.begin_send(other.id, X, tag=1)
        await other.end(waits)
        await one.trainer.die()
        waits = await other.begin_receive(one.id, tag=1, timeout_s=2)
        assert (await other.verdict_of(waits)).error == "OpTimedOut"
        sent = await again.begin_send(other.id, -X, tag=1)
        assert (await other.receive(one.id, tag=1)).values.tobytes() == (-X).tobytes()
        await again.end(sent)


# --- fences


async def test_behind_a_fence_nothing_is_delivered_at_either_end(clock: MockClock) -> None:
    """V3, V8."""
    async with some(clock) as ranks:
        one, other = ranks.envelopes
        sender, receiver = ranks_of(ranks.here)
        receiver.fence("own stall")
        sent = await one.begin_send(other.id, X)
        call = await other.begin_receive(one.id)
        await trio.sleep(5)
        assert call not in other.answers
        assert sent not in one.answers
        sender.fence("own stall")
        receiver.lift("own stall")
        await other.end(call)
        await trio.sleep(5)
        assert sent not in one.answers  # V3: its trainer learns nothing
        sender.lift("own stall")
        await one.end(sent)


async def test_a_fenced_sender_sends_nothing(clock: MockClock, faults: Faults) -> None:
    async with some(clock) as ranks:
        one, other = ranks.envelopes
        sender, _ = ranks_of(ranks.here)
        sent_records = list[RecordHeader]()

        async def send(real: Real, lane: Lane, header: RecordHeader, body: memoryview) -> None:
            sent_records.append(header)
            await real(lane, header, body)

        faults.watch(Lane, "send", send)
        sender.fence("view change")
        sent = await one.begin_send(other.id, X)
        call = await other.begin_receive(one.id)
        await trio.sleep(12)  # longer than a lane may bring nothing
        assert not sent_records
        sender.lift("view change")
        await other.end(call)
        await one.end(sent)


async def test_a_superseded_trainer_gets_the_verdict(clock: MockClock) -> None:
    async with some(clock) as ranks:
        one, other = ranks.envelopes
        sending = await one.begin_send(other.id, X)
        receiving = await one.begin_receive(other.id)
        machine = machine_of(ranks.here, ranks.trainers[0])
        jobs = machine.agent.jobs
        state = machine.agent.membership.state
        view = msgspec.structs.replace(state.view, rosters=())
        jobs.follow(state, view, 0.0)
        machine.part(P2PRouter).follow()
        for call in (sending, receiving):
            assert (await one.verdict_of(call)).error == "HistorySuperseded"
        later = await one.begin_receive(other.id)
        assert (await one.verdict_of(later)).error == "HistorySuperseded"


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


@pytest.mark.parametrize("name", ["sends", "receives"])
@pytest.mark.parametrize("segment", [0, 3])
async def test_a_lane_that_breaks_is_replaced_and_the_message_comes_whole(
    clock: MockClock, faults: Faults, name: str, segment: int
) -> None:
    async with some(clock) as ranks:
        await ranks.deliver(np.array([1.0]))
        done = disturb_once(faults, name, segment, closes)
        await ranks.deliver(X)
        assert done == [segment]
        await ranks.check_that_nothing_is_left()


@pytest.mark.parametrize("segment", [0, 3])
async def test_a_lane_that_brings_nothing_is_replaced(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults, segment: int
) -> None:
    async with some(clock) as ranks:
        disturb_once(faults, "sends", segment, stands_still)
        asks = told(monkeypatch)
        began = trio.current_time()
        await ranks.deliver(X if segment else FEW)
        assert 5 <= trio.current_time() - began < 10
        assert {ask.lane for ask in asks if isinstance(ask, RequestMessage)} == {0, 1}
        await ranks.check_that_nothing_is_left()


async def test_a_lane_that_does_not_come_is_asked_for_again(
    clock: MockClock, faults: Faults
) -> None:
    async with some(clock) as ranks:
        rendezvous = machine_of(ranks.here, ranks.trainers[0]).agent.jobs.rendezvous
        offers = list[object]()

        def offer(real: Real, edge: object, to: object) -> None:
            offers.append(edge)
            if len(offers) > 1:
                real(edge, to)

        faults.around(rendezvous, "offer", offer)
        await ranks.deliver(X)
        assert len(offers) == 2


async def test_a_request_that_is_lost_while_the_lane_is_open_is_repeated(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with some(clock) as ranks:
        await ranks.deliver(X)
        lose_first(monkeypatch, RequestMessage, 1)
        asks = told(monkeypatch)
        await ranks.deliver(X)
        assert {ask.lane for ask in asks if isinstance(ask, RequestMessage)} == {0}


@pytest.mark.parametrize("values", [FEW, X])
async def test_a_slow_lane_is_given_the_time_that_it_needs(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults, values: Values
) -> None:

    async def trickle(lane: Lane) -> None:
        lane.state.bytes_received += 1_000_000  # as a slow network brings it
        await trio.sleep(4)

    async def receive_slowly(
        receive: Real, lane: Lane, header: RecordHeader, into: memoryview
    ) -> None:
        if header.body_bytes == FEW.nbytes and lane.bytes_received < 10_000_000:
            await trickle(lane)
        await receive(lane, header, into)

    async def run_slowly(*plan: Any, **regions: Any) -> None:  # noqa: ANN401
        for lane in plan[2].values():
            while lane.bytes_received < 10_000_000:
                await trickle(lane)
        await run_plan(*plan, **regions)

    faults.limit(endpoint, "ASK_AGAIN_S", 1.0)
    async with some(clock) as ranks:
        asks = told(monkeypatch)
        faults.watch(Lane, "receive", receive_slowly)
        faults.pretend(endpoint, "run_plan", run_slowly)
        began = trio.current_time()
        await ranks.deliver(values)
        assert trio.current_time() - began >= 10
        assert {ask.lane for ask in asks if isinstance(ask, RequestMessage)} == {0}


async def test_a_sender_that_gives_up_half_way_leaves_the_receiver_to_the_next_message(
    clock: MockClock, faults: Faults
) -> None:
    disturb_once(faults, "sends", 2, stands_still)
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
    clock: MockClock, faults: Faults
) -> None:
    hung = list[int]()

    async def hang_once(real: Real, lanes: LanesIn, *rest: object) -> None:
        if not hung:
            hung.append(1)
            await trio.sleep_forever()
        await real(lanes, *rest)

    faults.around(LanesIn, "bring", hang_once)
    async with some(clock) as ranks:
        one, other = ranks.envelopes
        sent = await one.begin_send(other.id, X)
        call = await other.begin_receive(one.id, timeout_s=2)
        assert (await other.verdict_of(call)).error == "OpTimedOut"
        assert (await other.receive(one.id)).values.tobytes() == X.tobytes()
        await one.end(sent)
