"""S1 to S4: the store of a job, over real agents."""

from collections.abc import Collection

import pytest
import trio
from trio.testing import MockClock

from pmesh.core.values import Terms
from pmesh.core.wire.channels import Channels, Message
from pmesh.core.wire.session import SESSION_VERSION
from pmesh.core.wire.stream import AGAIN_S
from pmesh.ids import JobName, Member
from pmesh.p2p.wire import Attach, Attached
from pmesh.store.agent.serving import MAX_CALLS
from pmesh.store.agent.stores import Stores
from pmesh.store.wire import (
    MAX_KEYS,
    MAX_STORE_DATA_BYTES,
    MAX_VALUE_BYTES,
    Add,
    Check,
    CompareSet,
    Get,
    Keys,
    Set,
    StoreCall,
    StorePart,
    Wait,
    encode,
)
from tests.worlds.control import change_received
from tests.worlds.faults import Faults
from tests.worlds.kept import kept
from tests.worlds.store_connection import RanksWithStores, StoreConnection, sharing
from tests.worlds.trainer import together, until
from tests.worlds.village_ops import cut, enter, machine_of, ranks_of

LARGE = bytes(range(256)) * (MAX_VALUE_BYTES // 256)


async def test_what_one_rank_sets_the_others_get(clock: MockClock) -> None:
    async with sharing(clock) as there:
        one, two, three = there.stores
        waiting = await two.begin(Get("large")), await three.begin(Wait(("large", "n")))
        await one.ask(Set("large", LARGE))
        assert await two.end(waiting[0]) == LARGE
        assert await three.ask(Check(("large", "n"))) is False
        assert await two.ask(Add("n", 5)) == 5
        assert await three.end(waiting[1]) is None
        assert await three.ask(CompareSet("n", b"5", b"6")) is True
        assert await one.ask(Keys("")) == ("large", "n")
        await until(lambda: there.tables(range(3)) == [{"large": LARGE, "n": b"6"}] * 3)


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.002, 0.004])
async def test_the_agent_that_coordinates_is_killed_and_every_answered_add_counts_once(
    clock: MockClock, delay: float
) -> None:
    async with sharing(clock) as there:
        coordinator = there.machine_of(0)
        sums = list[object]()

        async def add(store: StoreConnection) -> None:
            for _ in range(20):
                sums.append(await store.ask(Add("n", 1)))

        async with trio.open_nursery() as nursery:
            for store in there.stores[1:]:
                nursery.start_soon(add, store)
            await until(lambda: len(sums) > 5)
            await trio.sleep(delay)
            await coordinator.kill()
        assert sorted(map(str, sums)) == sorted(map(str, range(1, 41)))
        assert await there.stores[2].ask(Get("n")) == b"40"
        assert there.tables([1, 2]) == [{"n": b"40"}] * 2


def deafen(monkeypatch: pytest.MonkeyPatch, there: RanksWithStores, ranks: Collection[int]) -> None:
    """The agents of these ranks get no more store messages from that of rank 0."""
    speaker = there.machine_of(0).agent.membership.state.me
    deaf = [there.machine_of(rank).agent.channels for rank in ranks]

    def lose(channels: Channels, member: Member, message: Message) -> Message | None:
        is_lost = channels in deaf and member == speaker and isinstance(message, StorePart)
        return None if is_lost else message

    change_received(monkeypatch, lose)


async def test_what_not_all_machines_have_is_not_answered(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1."""
    async with sharing(clock) as there:
        deafen(monkeypatch, there, [2])
        calls = await there.stores[0].begin(Add("n", 1)), await there.stores[0].begin(Keys(""))
        await until(lambda: there.tables(range(3)) == [{"n": b"1"}, {"n": b"1"}, {}])
        await trio.sleep(1)
        assert not set(calls) & there.stores[0].answers.keys()


async def test_a_write_whose_answer_is_lost_with_the_coordinator_is_carried_out_once(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2, S3: only the machine of rank 2 has it, and that of rank 1 coordinates next."""
    async with sharing(clock) as there:
        deafen(monkeypatch, there, [1])
        call = await there.stores[1].begin(Add("n", 1))
        await until(lambda: there.tables(range(3)) == [{"n": b"1"}, {}, {"n": b"1"}])
        await there.machine_of(0).kill()
        assert await there.stores[1].end(call) == 1
        assert await there.stores[2].ask(Get("n")) == b"1"


async def test_a_newcomer_has_a_copy_that_outlives_all_others(clock: MockClock) -> None:
    async with sharing(clock) as there:
        for number in range(5):
            await there.stores[0].ask(Set(str(number), LARGE))
        await there.trainers[1].die()
        others = [there.trainers[0], there.trainers[2]]
        await together(*[trainer.sync for trainer in others])
        new = await there.here.trainer(there.machine_of(1))
        await new.join("digits", 1)
        await enter(there.here, [new], others)
        store = await StoreConnection.attach(there.here, there.machine_of(1), new)
        assert await store.ask(Keys("")) == ("0", "1", "2", "3", "4")
        for rank in (0, 2):
            await there.machine_of(rank).kill()
        assert await store.ask(Get("4")) == LARGE


async def test_a_call_that_waits_says_so_and_times_out(clock: MockClock) -> None:
    async with sharing(clock, 2) as there:
        store = there.stores[1]
        waits = await store.begin(Wait(("a", "b")), timeout_s=25)
        verdict = await store.verdict_of(waits)
        text = "not all of the keys 'a', 'b' were set in the store"
        assert (verdict.error, verdict.message) == ("OpTimedOut", f"{text} within 25 s")
        assert [(round(said.waited_s, -1), said.on) for said in store.waits] == [
            (10, text),
            (20, text),
        ]
        await there.stores[0].ask(Set("a", b""))
        await there.stores[0].ask(Set("b", b""))
        assert not store.answers


async def test_without_a_majority_calls_wait(clock: MockClock) -> None:
    """V10."""
    async with sharing(clock, terms=Terms(quorum="majority")) as there:
        await there.stores[0].ask(Set("k", b"1"))
        machines = [there.machine_of(rank) for rank in range(3)]
        async with cut(machines[2], *machines[:2]):
            call = await there.stores[2].begin(Set("k", b"3"), timeout_s=5)
            await there.stores[0].ask(Set("k", b"2"))
            verdict = await there.stores[2].verdict_of(call)
            assert verdict.error == "OpTimedOut"
            assert "did not acknowledge a set in its store" in verdict.message
            assert await there.stores[1].ask(Get("k")) == b"2"


async def test_the_side_that_is_superseded_learns_it_and_finds_the_other_s_values(
    clock: MockClock,
) -> None:
    """S4: it comes back without its copy, which may have the number of the others' roster."""
    async with sharing(clock) as there:
        machines = [there.machine_of(rank) for rank in range(3)]
        await there.stores[0].ask(Set("k", b"1"))
        async with cut(machines[2], *machines[:2]):
            await there.stores[2].ask(Set("k", b"alone"))
            await there.stores[0].ask(Set("k", b"2"))
            waits = await there.stores[2].begin(Get("never"))
        verdict = await there.stores[2].verdict_of(waits)
        assert verdict.error == "HistorySuperseded"
        assert "mesh.sync() brings it back" in verdict.message
        late = await there.stores[2].begin(Get("k"))
        assert (await there.stores[2].verdict_of(late)).error == "HistorySuperseded"

        there.trainers[2].superseded = True
        await enter(there.here, there.trainers[2:], there.trainers[:2])
        again = await StoreConnection.attach(there.here, machines[2], there.trainers[2])
        assert await again.ask(Get("k")) == b"2"


async def test_the_next_job_of_a_name_begins_with_an_empty_store(clock: MockClock) -> None:
    async with sharing(clock, 2) as there:
        await there.stores[0].ask(Set("k", b"1"))
        for trainer in there.trainers:
            await trainer.leave()
        machine = there.machine_of(0)
        await until(lambda: not machine.agent.jobs.ranks)
        assert not kept(machine.part(Stores))["stores"]
        trainers = await there.here.job(*there.here.machines)
        store = await StoreConnection.attach(
            there.here, machine_of(there.here, trainers[0]), trainers[0]
        )
        assert await store.ask(Keys("")) == ()


async def test_parts_that_precede_their_view_wait_for_it(clock: MockClock, faults: Faults) -> None:
    async with sharing(clock) as there:
        stores = there.machine_of(0).part(Stores)
        real = stores.follow

        async def follow_late() -> None:
            await trio.sleep(AGAIN_S / 2)
            real()

        faults.instead(stores, "follow", lambda: there.here.nursery.start_soon(follow_late))
        await there.trainers[2].die()
        await until(lambda: ranks_of(there.here)[1].size == 2)
        began = clock.current_time()
        assert await there.stores[1].ask(Add("n", 1)) == 1
        assert clock.current_time() - began < AGAIN_S * 0.9  # nothing was sent again


async def test_a_trainer_that_asks_for_too_much_at_a_time_is_told_so(clock: MockClock) -> None:
    async with sharing(clock, 1) as there:
        (store,) = there.stores
        for _ in range(MAX_CALLS):
            await store.begin(Get("k"))
        refused = await store.verdict_of(await store.begin(Get("k")))
        assert refused.error == "UsageError"
        assert f"at most {MAX_CALLS} store calls at a time" in refused.message


async def test_a_machine_s_ranks_ask_for_no_more_than_any_coordinator_keeps(
    clock: MockClock,
) -> None:
    async with sharing(clock, 2) as there:
        wait = Wait(tuple(map(str, range(MAX_KEYS))))
        calls = [await there.stores[1].begin(wait) for _ in range(80)]
        refused = await there.stores[1].verdict_of(calls[-1])
        assert (refused.error, "bytes of store calls" in refused.message) == ("UsageError", True)
        assert await there.stores[1].ask(Add("n", 1)) == 1


def part_of_a_call(call: int, data: bytes, *, more: bool = False) -> StoreCall:
    return StoreCall(call, data, more, 10.0)


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([part_of_a_call(0, b"garbage")], id="no command"),
        pytest.param([part_of_a_call(0, encode(Get("k")))] * 2, id="a number used twice"),
        pytest.param(
            [part_of_a_call(0, bytes(MAX_STORE_DATA_BYTES), more=True)] * 70, id="too long"
        ),
        pytest.param(
            [part_of_a_call(0, b"x", more=True), part_of_a_call(1, b"x")], id="two at a time"
        ),
    ],
)
async def test_who_sends_what_is_no_command_is_let_go(
    clock: MockClock, requests: list[StoreCall]
) -> None:
    async with sharing(clock, 1) as there:
        connection = await there.here.trainer(there.machine_of(0))
        attach = Attach(SESSION_VERSION, JobName("digits"), there.trainers[0].id)
        assert await connection.ask(attach) == Attached()
        with pytest.raises((trio.EndOfChannel, OSError, trio.BrokenResourceError)):  # noqa: PT012 - either may be cut off
            for request in requests:
                await connection.send(request)
            await connection.receive()
        assert await there.stores[0].ask(Keys("")) == ()
