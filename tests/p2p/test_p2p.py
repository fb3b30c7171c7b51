"""O4: messages between two ranks, over real agents."""

import gc
import mmap
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from pmesh.agent.grants import SAY_EVERY_S
from pmesh.core.wire.calls import Envelope
from pmesh.core.wire.session import SESSION_VERSION, DropArena, Refused
from pmesh.core.wire.trainer import Leave
from pmesh.ids import JobName, TrainerId
from pmesh.net.sessions.arena_pools import MAX_ARENAS, SessionArenas
from pmesh.net.sessions.arenas import Arena
from pmesh.p2p import rules
from pmesh.p2p.agent import router
from pmesh.p2p.agent.router import P2PRouter
from pmesh.p2p.rules import MAX_KEPT, Inbox
from pmesh.p2p.wire import (
    MAX_TAG,
    AnnounceMessage,
    Attach,
    MessageAddress,
    MessageDelivered,
    RequestMessage,
    SendMessage,
)
from simulation.wire import AnyRequest
from tests.p2p.p2p import MessageError, P2PConnection, attach, lose_first, told
from tests.worlds.faults import Faults, Real
from tests.worlds.lanes import share_of_one
from tests.worlds.trainer import TrainerClient, together, until
from tests.worlds.village import Village, training, village
from tests.worlds.village_ops import (
    hold_all_reduces,
    machine_of,
    ones,
    ranks_of,
    reduce_all,
    snapshot_of,
    swallow,
    turned_away,
)

X = np.arange(6.0).reshape(2, 3)


@dataclass
class RankPair:
    """Two ranks on two machines, with their connections for messages."""

    here: Village
    trainers: list[TrainerClient]
    one: P2PConnection
    other: P2PConnection

    def name_of(self, rank: int) -> str:
        return f"rank {rank} ({self.trainers[0].names[rank]})"


@asynccontextmanager
async def a_pair(clock: MockClock) -> AsyncGenerator[RankPair]:
    async with training(clock, 2) as (here, trainers):
        one, other = [await attach(here, machine_of(here, t), t) for t in trainers]
        yield RankPair(here, trainers, one, other)


async def test_a_message_brings_its_values_shape_and_dtype(clock: MockClock) -> None:
    async with a_pair(clock) as pair:
        sent = await pair.one.begin_send(pair.other.id, X, tag=5)
        got = await pair.other.receive(pair.one.id, tag=5)

        assert await pair.one.end(sent) is None
        np.testing.assert_array_equal(got.values, X)
        assert (got.source, got.envelope.dtype, got.envelope.shape) == (0, "float64", (2, 3))


async def test_a_message_of_many_records_comes_whole_and_one_without_values_too(
    clock: MockClock,
) -> None:
    async with a_pair(clock) as pair:
        large = np.random.default_rng(1).random(400_001, np.float32)
        calls = [await pair.one.begin_send(pair.other.id, x) for x in (large, large[:0], large[:1])]

        got = [await pair.other.receive(pair.one.id) for _ in calls]

        assert [g.values.tobytes() for g in got] == [
            x.tobytes() for x in (large, large[:0], large[:1])
        ]
        assert [g.envelope.shape for g in got] == [(400_001,), (0,), (1,)]
        for call in calls:
            await pair.one.end(call)


async def test_a_small_message_comes_with_its_announcement(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_pair(clock) as pair:
        said = told(monkeypatch)
        sent = await pair.one.begin_send(pair.other.id, X)
        await trio.sleep(0.2)  # it is announced again, without its values
        got = await pair.other.receive(pair.one.id)
        await pair.one.end(sent)

        assert got.values.tobytes() == X.tobytes()
        assert {type(message) for message in said} == {AnnounceMessage, MessageDelivered}
        announced = [message for message in said if isinstance(message, AnnounceMessage)]
        assert [len(message.values) for message in announced[:2]] == [X.nbytes, 0]


async def test_a_small_message_is_requested_if_its_values_were_lost_or_there_was_a_fence(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_pair(clock) as pair:
        lose_first(monkeypatch, AnnounceMessage, 1)
        said = told(monkeypatch)
        await together(
            lambda: pair.one.send(pair.other.id, X), lambda: pair.other.receive(pair.one.id)
        )
        rank = ranks_of(pair.here)[0]
        rank.fence("own stall")
        sent = await pair.one.begin_send(pair.other.id, X)
        call = await pair.other.begin_receive(pair.one.id)
        await trio.sleep(1)
        assert call not in pair.other.answers  # V3: nothing is sent behind a fence
        rank.lift("own stall")
        got = await pair.other.end(call)
        await pair.one.end(sent)

        assert got is not None
        assert got.values.tobytes() == X.tobytes()
        assert {m.address.sequence for m in said if isinstance(m, RequestMessage)} == {0, 1}


async def test_a_send_ends_when_its_message_is_received_and_not_before(clock: MockClock) -> None:
    async with a_pair(clock) as pair:
        sent = await pair.one.begin_send(pair.other.id, X)
        await trio.sleep(25)
        assert sent not in pair.one.answers
        assert [wait.on for wait in pair.one.waits] == [(pair.name_of(1),)] * 2

        await pair.other.receive(pair.one.id)
        await pair.one.end(sent)


async def test_a_service_that_waits_for_whatever_comes_is_no_news(clock: MockClock) -> None:
    async with a_pair(clock) as pair:
        await pair.one.begin_receive(pair.other.id, tag=MAX_TAG)
        await pair.other.begin_receive(pair.one.id, tag=MAX_TAG + 1)
        await trio.sleep(15)
        assert [wait.on for wait in pair.one.waits] == [(pair.name_of(1),)]
        assert not pair.other.waits


async def test_messages_of_one_tag_come_in_order_and_tags_do_not_wait_for_each_other(
    clock: MockClock,
) -> None:
    async with a_pair(clock) as pair:
        for number, tag in enumerate((1, 2, 1, 2, 1)):
            await pair.one.begin_send(pair.other.id, np.array([number]), tag=tag)

        async def next_of(tag: int) -> int:
            return int((await pair.other.receive(pair.one.id, tag=tag)).values[0])

        assert [await next_of(tag) for tag in (2, 1, 1, 2, 1)] == [1, 0, 2, 3, 4]


async def test_a_message_that_nobody_receives_makes_no_other_dearer(
    clock: MockClock, faults: Faults
) -> None:
    """Nothing grows with the number of messages, though each has a tag of its own."""
    inboxes = list[Inbox]()

    def deliver(real: Real, *given: object) -> Inbox:
        inboxes.append(real(*given))
        return inboxes[-1]

    faults.around(rules, "deliver", deliver)
    async with a_pair(clock) as pair:
        await pair.one.begin_send(pair.other.id, np.empty(0), tag=0)
        for tag in range(1, 2 * MAX_KEPT):
            sent = await pair.one.begin_send(pair.other.id, np.empty(0), tag=tag)
            await pair.other.receive(pair.one.id, tag=tag)
            await pair.one.end(sent)
        (source,) = inboxes[-1].sources.values()
        assert (len(source.noted), len(source.delivered) <= MAX_KEPT + 1) == (1, True)


async def test_messages_go_both_ways_beside_each_other_and_beside_ops(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_pair(clock) as pair:
        held = hold_all_reduces(monkeypatch, size=2, ranks=[0, 1], complete=False)
        for trainer in pair.trainers:
            pair.here.nursery.start_soon(swallow, trainer.reduce(ones(3)))
        await until(lambda: len(held) == 2)

        async def exchange(envelopes: P2PConnection, peer: TrainerId) -> float:
            sent = await envelopes.begin_send(peer, np.array([envelopes.id]))
            got = await envelopes.receive(peer)
            await envelopes.end(sent)
            return float(got.values[0])

        async def forth() -> float:
            return await exchange(pair.one, pair.other.id)

        async def back() -> float:
            return await exchange(pair.other, pair.one.id)

        assert await together(forth, back) == [1.0, 0.0]


async def test_any_takes_whoever_comes_first_and_is_told_who_it_was(clock: MockClock) -> None:
    async with training(clock, 3) as (here, trainers):
        a, b, c = [await attach(here, machine_of(here, t), t) for t in trainers]
        call = await a.begin_receive(b.id, c.id)
        await c.send(a.id, X)
        first = await a.end(call)
        sent = await b.begin_send(a.id, X)
        second = await a.receive(b.id, c.id)
        await b.end(sent)

        assert first is not None
        assert [first.source, second.source] == [c.id, b.id]


async def test_two_trainers_of_one_machine_reach_each_other_too(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (machine,) = here.machines
        one, other = [await attach(here, machine, t) for t in await here.job(machine, machine)]
        sent = await one.begin_send(other.id, X)
        got = await other.receive(one.id)
        await one.end(sent)

        np.testing.assert_array_equal(got.values, X)


async def test_what_nobody_receives_in_time_is_withdrawn_and_the_next_takes_its_place(
    clock: MockClock,
) -> None:
    async with a_pair(clock) as pair:
        first = await pair.one.begin_send(pair.other.id, X, tag=3, timeout_s=2)
        second = await pair.one.begin_send(pair.other.id, -X, tag=3)

        verdict = await pair.one.verdict_of(first)
        assert verdict.error == "OpTimedOut"
        assert (
            verdict.message == f"{pair.name_of(1)} did not receive a message with tag 3 within 2 s"
        )
        got = await pair.other.receive(pair.one.id, tag=3)
        np.testing.assert_array_equal(got.values, -X)
        await pair.one.end(second)


async def test_a_receive_that_gives_up_leaves_the_message_to_the_next(clock: MockClock) -> None:
    async with a_pair(clock) as pair:
        call = await pair.other.begin_receive(pair.one.id, tag=3, timeout_s=2)
        verdict = await pair.other.verdict_of(call)
        assert (verdict.error, verdict.message) == (
            "OpTimedOut",
            f"no message with tag 3 came from {pair.name_of(0)} within 2 s",
        )
        sent = await pair.one.begin_send(pair.other.id, X, tag=3)
        np.testing.assert_array_equal((await pair.other.receive(pair.one.id, tag=3)).values, X)
        await pair.one.end(sent)


async def test_arenas_are_used_again(clock: MockClock) -> None:
    async with a_pair(clock) as pair:
        for _ in range(100):
            sent = await pair.one.begin_send(pair.other.id, X)
            await pair.other.receive(pair.one.id)
            await pair.one.end(sent)
            await pair.one.drop_input()

        assert len(pair.one.trainer.maps) <= 2
        assert len(pair.other.trainer.maps) <= 2


async def test_the_end_of_a_connection_frees_its_memory_whatever_is_under_way(
    clock: MockClock, faults: Faults
) -> None:
    maps = list[weakref.ref[mmap.mmap]]()

    def watch_and_close(close: Real, arena: Arena) -> None:
        maps.append(weakref.ref(arena._map))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        close(arena)

    faults.around(Arena, "close", watch_and_close)
    async with a_pair(clock) as pair:
        await pair.one.begin_receive(pair.other.id)
        for tag in range(3):
            await pair.one.begin_send(pair.other.id, X, tag=tag)
        await trio.testing.wait_all_tasks_blocked()
        gc.disable()  # as good as in an idle agent
        try:
            await pair.one.trainer.die()
            await until(lambda: len(maps) == 3)
            await trio.testing.wait_all_tasks_blocked()
            assert [left for each in maps if (left := each()) and not left.closed] == []
        finally:
            gc.enable()


async def test_the_bytes_of_messages_are_counted(clock: MockClock) -> None:
    async with a_pair(clock) as pair:
        sent = await pair.one.begin_send(pair.other.id, np.zeros(10_000))
        await pair.other.receive(pair.one.id)
        await pair.one.end(sent)

        machines = [machine_of(pair.here, t) for t in pair.trainers]
        one, other = (machine.agent for machine in machines)
        p2p, others = (machine.part(P2PRouter) for machine in machines)
        assert p2p.traffic[0] >= 80_000
        assert others.traffic[1] >= 80_000
        await reduce_all(pair.trainers)
        assert snapshot_of(machines[0]).traffic.data_sent_bytes > p2p.traffic[0]
        for trainer in pair.trainers:
            await trainer.leave()
        await until(lambda: not one.jobs.ranks and not other.jobs.ranks)
        assert p2p.traffic[0] >= 80_000


# --- what can't be


async def test_only_the_trainer_itself_attaches_and_only_while_it_is_in_the_job(
    clock: MockClock,
) -> None:
    async with village(clock, 1) as here:
        (machine,) = here.machines
        (trainer,) = await here.job(machine)

        async def refusal(request: Attach) -> str:
            connection = await here.trainer(machine)
            reply = await connection.ask(request)
            assert isinstance(reply, Refused)
            return reply.verdict.error

        job = JobName("digits")
        assert await refusal(Attach(SESSION_VERSION, job, TrainerId(7))) == "HistorySuperseded"
        other_job = Attach(SESSION_VERSION, JobName("words"), trainer.id)
        assert await refusal(other_job) == "HistorySuperseded"
        assert await refusal(Attach(99, job, trainer.id)) == "ProtocolVersionMismatch"
        ranks_of(here)[0].pid += 1  # as if another process asked
        assert await refusal(Attach(SESSION_VERSION, job, trainer.id)) == "HistorySuperseded"


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(Leave(), id="a request of the other connection"),
        pytest.param(
            SendMessage(1, TrainerId(1), Envelope(0, "bool", (), 1), 55, 1.0), id="no such arena"
        ),
        pytest.param(
            SendMessage(1, TrainerId(1), Envelope(0, "bool", (), 1), -1, 1.0), id="no arena"
        ),
        pytest.param(
            SendMessage(1, TrainerId(1), Envelope(0, "bool", (0,), 0), 0, 1.0),
            id="an arena too many",
        ),
        pytest.param(DropArena(55), id="an arena that was never granted"),
    ],
)
async def test_garbage_ends_the_connection_and_nothing_else(
    clock: MockClock, request_: AnyRequest
) -> None:
    async with a_pair(clock) as pair:
        await pair.one.trainer.send(request_)
        machine = machine_of(pair.here, pair.trainers[0])
        await until(lambda: turned_away(machine) == 1)
        one = await attach(pair.here, machine, pair.trainers[0])
        sent = await one.begin_send(pair.other.id, X)
        await pair.other.receive(one.id)
        await one.end(sent)


async def test_a_call_number_that_is_in_use_ends_the_connection(clock: MockClock) -> None:
    async with a_pair(clock) as pair:
        pair.one.calls = iter((5, 5))  # type: ignore[assignment] # as the counter
        await pair.one.begin_receive(pair.other.id)
        await pair.one.begin_receive(pair.other.id)
        await until(lambda: turned_away(machine_of(pair.here, pair.trainers[0])) == 1)


async def test_so_many_calls_may_wait_and_no_more(clock: MockClock, faults: Faults) -> None:
    faults.limit(router, "MAX_MESSAGES", 48)
    async with a_pair(clock) as pair:
        calls = [await pair.one.begin_receive(pair.other.id) for _ in range(49)]

        verdict = await pair.one.verdict_of(calls[-1])
        assert verdict.error == "UsageError"
        assert verdict.message == "at most 48 sends and receives at a time: wait for some of them"


async def test_what_has_come_waits_until_there_is_room_for_it(clock: MockClock) -> None:
    """A trainer that has yet to read what came has all arenas that it may have."""
    many = MAX_ARENAS + 6
    async with a_pair(clock) as pair:
        receives = [await pair.other.begin_receive(pair.one.id) for _ in range(many)]
        sends = [await pair.one.begin_send(pair.other.id, np.full(1, i)) for i in range(many)]
        await until(lambda: len(pair.other.answers) == MAX_ARENAS)

        got = [await pair.other.end(call) for call in receives]
        assert [each.values.tolist() for each in got if each] == [[i] for i in range(many)]
        for call in sends:
            await pair.one.end(call)


async def test_of_many_receives_that_wait_for_one_rank_one_line_is_said(clock: MockClock) -> None:
    async with a_pair(clock) as pair:
        for _ in range(20):
            await pair.one.begin_receive(pair.other.id)
        await until(lambda: bool(pair.one.waits))
        await trio.sleep(SAY_EVERY_S)
        assert 1 <= len(pair.one.waits) <= 3


async def test_so_many_messages_may_wait_for_one_receiver(clock: MockClock) -> None:
    async with a_pair(clock) as pair:
        empty = np.zeros(0)
        sends = [await pair.one.begin_send(pair.other.id, empty) for _ in range(MAX_KEPT + 1)]

        verdict = await pair.one.verdict_of(sends[-1])
        assert verdict.error == "UsageError"
        assert verdict.message == f"256 messages wait already for {pair.name_of(1)} to receive them"


async def test_memory_that_is_not_there_fails_the_one_call_and_the_message_is_the_next_one_s(
    clock: MockClock, faults: Faults
) -> None:
    limits = iter((2**30, 2**20, 2**30))
    faults.instead(router, "SessionArenas", lambda _: SessionArenas(share_of_one(next(limits))))
    async with a_pair(clock) as pair:
        sent = await pair.one.begin_send(pair.other.id, np.zeros(2**18))
        verdict = await pair.other.verdict_of(await pair.other.begin_receive(pair.one.id))
        assert verdict.error == "UsageError"
        assert verdict.message.startswith("no shared memory for 2 MiB more")

        with pytest.raises(AssertionError, match="no shared memory for 2 MiB more"):
            await pair.other.begin_send(pair.one.id, np.zeros(2**18))
        larger = await attach(pair.here, machine_of(pair.here, pair.trainers[1]), pair.trainers[1])
        assert (await larger.receive(pair.one.id)).values.nbytes == 2**21
        await pair.one.end(sent)


async def test_what_others_say_of_ranks_that_are_not_theirs_is_not_heard(clock: MockClock) -> None:
    async with a_pair(clock) as pair:
        machine = machine_of(pair.here, pair.trainers[0])
        (rank,), p2p = machine.agent.jobs.ranks, machine.part(P2PRouter)
        roster = rank.roster
        envelope = Envelope(0, "bool", (1,), 1)
        call = await pair.one.begin_receive(pair.other.id, timeout_s=2)

        def announce(sender: TrainerId, born: object = roster.born) -> AnnounceMessage:
            address = MessageAddress(roster.job, born, sender, rank.id, 0)  # type: ignore[arg-type] # an epoch
            return AnnounceMessage(address, envelope, 0, -1)

        me = rank.trainer.member
        p2p.receive(me, announce(pair.other.id))  # we are not its agent
        p2p.receive(me, announce(TrainerId(77)))  # there is no such rank
        other = roster.trainers[1].member
        earlier = roster.born._replace(counter=1)
        p2p.receive(other, announce(pair.other.id, earlier))  # of another run
        with pytest.raises(MessageError, match="OpTimedOut"):
            await pair.one.end(call)
