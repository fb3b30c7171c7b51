"""Ops across whole agents: one verdict for all, whatever goes wrong."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent import ops
from pmesh.core.messages import AskResult, Call, Concern
from pmesh.core.reductions import Values
from pmesh.core.session import StartOp
from pmesh.core.views import Verdict
from pmesh.errors import LaneBroken
from pmesh.ids import OpNumber, Rank
from pmesh.net import collectives
from pmesh.net.arena_pools import OutputPool
from pmesh.net.arenas import Arena
from tests.agent.fakes import Trainer, together, until, village


def ones(count: int) -> Values:
    return np.ones(count, np.float32)


async def verdicts_of_all(*calls: "tuple[Trainer, object]") -> list[Verdict]:
    async def one(trainer: Trainer, call: object) -> Verdict:
        return await trainer.verdict_of(call)  # type: ignore[arg-type] # a coroutine

    return await together(*[lambda t=t, c=c: one(t, c) for t, c in calls])


async def reduce_all(trainers: list[Trainer], values: "Values | None" = None) -> list[Values]:
    x = ones(1000) if values is None else values
    return await together(*[partial(t.reduce, x) for t in trainers])


# --- what works


@pytest.mark.parametrize("count", [0, 1, 1000, 600_000])
async def test_every_machine_gets_the_same_bits(clock: MockClock, count: int) -> None:
    async with village(clock, 3) as here:
        trainers = await here.job(*here.machines)
        dice = np.random.default_rng(1)
        inputs = [dice.random(count, np.float32) for _ in trainers]

        async def reduce(trainer: Trainer) -> list[bytes]:
            x = inputs[trainer.rank]
            if not count:
                await trainer.run(Call("all_reduce", "float32", (0,), "sum"), None)
                return []
            return [(await trainer.reduce(x)).tobytes() for _ in range(3)]

        results = await together(*[lambda t=t: reduce(t) for t in trainers])
        assert results[0] == results[1] == results[2]
        if count:
            found = np.frombuffer(results[0][0], np.float32)
            np.testing.assert_allclose(found, sum(inputs), rtol=1e-6)


async def test_a_single_rank_needs_no_network(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (trainer,) = await here.job(here.machines[0])
        assert (await trainer.reduce(ones(5), "mean")).tolist() == [1.0] * 5
        assert (await trainer.broadcast(ones(5))).tolist() == [1.0] * 5
        await trainer.barrier()


async def test_several_trainers_of_one_machine_and_a_broadcast_from_each(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        trainers = await here.job(one, two, one, two)
        names = trainers[0].joined.names if trainers[0].joined else ()
        assert sorted(names) == ["mac-0", "mac-0", "mac-1", "mac-1"]
        assert names[0] == names[1]  # side by side in the ring
        for root in range(4):
            x = np.full(70_000, root, np.float32)
            got = await together(*[partial(t.broadcast, x, root) for t in trainers])
            assert all(np.array_equal(x, g) for g in got)
        assert [r[0] for r in await reduce_all(trainers)] == [4.0] * 4


async def test_two_jobs_that_begin_at_once_do_not_meet(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        red = [await here.trainer(m) for m in here.machines]
        blue = [await here.trainer(m) for m in here.machines]
        joins = [partial(t.join, "red", 2) for t in red]
        joins += [partial(t.join, "blue", 2) for t in blue]
        await together(*joins)
        calls = [partial(t.reduce, ones(10)) for t in red]
        calls += [partial(t.reduce, 3 * ones(10)) for t in blue]
        results = await together(*calls)
        assert [r[0] for r in results] == [2.0, 2.0, 6.0, 6.0]


async def test_a_root_may_run_ahead_of_the_others_but_not_for_ever(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        root, other = await here.job(*here.machines)
        ahead = 0

        async def send_all() -> None:
            nonlocal ahead
            for i in range(100):
                await root.broadcast(np.full(10, i, np.float32))
                ahead = i + 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all)
            await until(lambda: ahead == ops.MAX_UNSTABLE_OPS)
            await trio.sleep(5)
            assert ahead == ops.MAX_UNSTABLE_OPS
            for i in range(100):
                assert (await other.broadcast(ones(10)))[0] == i


# --- what all ranks get an error for


async def test_different_calls_fail_at_every_rank_and_each_call_is_named(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        trainers = await here.job(*here.machines)
        a, b, c = trainers
        verdicts = await verdicts_of_all(
            (a, a.reduce(ones(10))), (b, b.reduce(ones(11))), (c, c.reduce(ones(10)))
        )
        assert len(set(verdicts)) == 1
        (verdict,) = set(verdicts)
        assert verdict.error == "OpMismatch"
        assert "op 0 of job 'digits' differs" in verdict.message
        for rank, size in ((0, 10), (1, 11), (2, 10)):
            name = a.joined.names[rank] if a.joined else ""
            assert f"rank {rank} ({name}): all_reduce(float32, {size}, sum)" in verdict.message
        assert [r[0] for r in await reduce_all(trainers)] == [3.0] * 3  # and they go on


async def test_calls_that_wait_for_each_other_without_data_differ_too(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines)
        verdicts = await verdicts_of_all((a, a.broadcast(ones(9), 1)), (b, b.broadcast(ones(9), 0)))
        assert {v.error for v in verdicts} == {"OpMismatch"}
        assert "root=0" in verdicts[0].message
        assert "root=1" in verdicts[0].message
        assert verdicts[0] == verdicts[1]


async def test_two_roots_of_one_broadcast_hear_of_it_at_their_next_call(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines)
        await a.broadcast(ones(9), 0)
        await b.broadcast(ones(9), 1)
        await until(lambda: all(m.agent.jobs.ranks[0].owed for m in here.machines))
        verdicts = await verdicts_of_all((a, a.reduce(ones(9))), (b, b.reduce(ones(9))))
        assert verdicts[0] == verdicts[1]
        assert "root=0" in verdicts[0].message
        assert "root=1" in verdicts[0].message
        assert a.next_op == b.next_op == 1  # the call in which they heard of it was not used up
        assert [r[0] for r in await reduce_all([a, b])] == [2.0, 2.0]


async def test_a_root_that_has_returned_hears_of_the_others_call_at_its_next(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines)
        await a.broadcast(ones(9), 0)
        assert (await b.verdict_of(b.reduce(ones(9)))).error == "OpMismatch"
        verdict = await a.verdict_of(a.barrier())
        assert verdict.error == "OpMismatch"
        assert "op 0" in verdict.message


async def test_a_call_that_is_under_way_when_an_earlier_one_fails_is_taken_back(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines)
        await a.broadcast(ones(9), 0)
        (mine,) = [r for m in here.machines for r in m.agent.jobs.ranks if r.rank == 0]

        async def call_something_else() -> None:
            await until(lambda: mine.ledger.started == 1)
            assert (await b.verdict_of(b.reduce(ones(9)))).error == "OpMismatch"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call_something_else)
            began = trio.current_time()
            verdict = await a.verdict_of(a.barrier())
        assert trio.current_time() - began < 5
        assert verdict.error == "OpMismatch"
        assert a.next_op == b.next_op == 1
        assert [r[0] for r in await reduce_all([a, b])] == [2.0, 2.0]


async def test_trainers_on_one_machine_that_differ_are_told(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        a, b = await here.job(here.machines[0], here.machines[0])
        verdicts = await verdicts_of_all((a, a.broadcast(ones(9), 1)), (b, b.broadcast(ones(9), 0)))
        assert {v.error for v in verdicts} == {"OpMismatch"}


async def test_a_timeout_names_who_is_late_and_holds_for_all(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        a, b, c = await here.job(*here.machines)
        x = ones(10)
        verdicts = await verdicts_of_all(
            (a, a.reduce(x, timeout_s=3.0)), (b, b.reduce(x, timeout_s=1000.0))
        )
        assert verdicts[0] == verdicts[1]
        assert verdicts[0].error == "OpTimedOut"
        assert verdicts[0].ranks == (2,)
        name = a.joined.names[2] if a.joined else ""
        assert f"not started by rank 2 ({name})" in verdicts[0].message
        assert "within 3 s" in verdicts[0].message
        assert await c.verdict_of(c.reduce(x)) == verdicts[0]  # the late one hears it at its call
        assert [r[0] for r in await reduce_all([a, b, c])] == [3.0] * 3


async def test_a_timeout_where_all_have_started_blames_the_network(
    clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*_: object, **__: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(ops, "all_reduce", never)
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines)
        verdicts = await verdicts_of_all(
            (a, a.reduce(ones(9), timeout_s=2)), (b, b.reduce(ones(9), timeout_s=2))
        )
        assert {v.error for v in verdicts} == {"OpTimedOut"}
        assert "every rank has started it" in verdicts[0].message


async def test_a_timeout_that_another_view_overtakes_is_told_to_the_leader_again(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = 0
    tell = ops._raise_concern  # noqa: SLF001

    def tell_in_vain_once(*arguments: object, **more: object) -> None:
        nonlocal told
        told += 1
        if told > 1:
            tell(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ops, "_raise_concern", tell_in_vain_once)
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines)
        agent = next(m.agent for m in here.machines if m.agent.jobs.ranks[0].rank == 1)

        async def bring_another_view() -> None:
            await until(lambda: told == 1)
            (rank,) = agent.jobs.ranks
            roster = rank.roster
            rank.concern = Concern(roster.job, roster.born, roster.number, None, 0)
            agent.jobs.poke()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(bring_another_view)
            verdict = await a.verdict_of(a.reduce(ones(5), timeout_s=3.0))
        assert verdict.error == "OpTimedOut"
        assert told == 2
        assert await b.verdict_of(b.reduce(ones(5))) == verdict


async def test_no_room_in_shared_memory_fails_the_op_at_all_ranks(
    clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines)
        pool = here.machines[0].agent.jobs.ranks[0].arenas.outputs

        acquire = OutputPool.acquire

        async def no_memory(self: OutputPool, nbytes: int) -> Arena:
            if self is pool:
                raise OSError(12, "Cannot allocate memory")
            return await acquire(self, nbytes)

        with monkeypatch.context() as patch:
            patch.setattr(OutputPool, "acquire", no_memory)
            verdicts = await verdicts_of_all((a, a.reduce(ones(9))), (b, b.reduce(ones(9))))
        assert verdicts[0] == verdicts[1]
        assert verdicts[0].error == "UsageError"
        assert "Cannot allocate memory" in verdicts[0].message
        assert [r[0] for r in await reduce_all([a, b])] == [2.0, 2.0]


# --- lost ranks


async def test_a_killed_trainer_is_named_for_the_same_op_at_all_others(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        a, b, c = await here.job(*here.machines)
        await reduce_all([a, b, c])
        began = trio.current_time()

        async def kill() -> None:
            await until(
                lambda: all(
                    m.agent.jobs.ranks[0].ledger.started == 1
                    for m in [m for m in here.machines if m.agent.jobs.ranks[0].rank < 2]
                )
            )
            await c.die()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            verdicts = await verdicts_of_all((a, a.reduce(ones(9))), (b, b.reduce(ones(9))))
        assert trio.current_time() - began < 5
        assert verdicts[0] == verdicts[1]
        assert verdicts[0].error == "RankLost"
        assert verdicts[0].ranks == (2,)
        assert "rank 2 (mac-" in verdicts[0].message
        assert a.next_op == b.next_op == 2
        assert (await a.verdict_of(a.barrier())).error == "RankLost"


async def test_a_trainer_killed_in_the_middle_of_its_op_is_lost(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_swallow, b)
            await until(
                lambda: any(r.busy_since for m in here.machines for r in m.agent.jobs.ranks)
            )
            await b.die()
            await until(lambda: any(r.leaving for m in here.machines for r in m.agent.jobs.ranks))
            await trio.sleep(3)
            verdict = await a.verdict_of(a.reduce(ones(9)))
        assert verdict.error == "RankLost"
        assert "its trainer died in the middle of an op" in verdict.message


async def _swallow(trainer: Trainer) -> None:
    with pytest.raises((trio.ClosedResourceError, OSError, trio.EndOfChannel)):
        await trainer.reduce(ones(9))


async def test_a_killed_agent_is_a_lost_rank(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        trainers = await here.job(*here.machines)
        await reduce_all(trainers)
        victim = here.machines[1]
        lost = victim.agent.jobs.ranks[0].rank
        left = [t for t in trainers if t.rank != lost]
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(victim.kill)
            verdicts = await verdicts_of_all(*[(t, t.reduce(ones(9))) for t in left])
        assert trio.current_time() - began < 5
        assert verdicts[0] == verdicts[1]
        assert verdicts[0].error == "RankLost"
        assert verdicts[0].ranks == (lost,)
        assert "mac-1" in verdicts[0].message


# --- lanes


async def test_a_broken_lane_is_replaced_and_the_op_goes_on(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        trainers = await here.job(*here.machines)
        await reduce_all(trainers)
        for _ in range(2):
            here.machines[1].lanes()[0].close()
            assert [r[0] for r in await reduce_all(trainers)] == [3.0] * 3


async def test_a_forged_record_costs_a_lane_and_not_the_op(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        trainers = await here.job(*here.machines)
        await reduce_all(trainers)
        (rank,) = here.machines[0].agent.jobs.ranks
        sending = rank._to_next  # noqa: SLF001 - as somebody on the network would
        assert sending is not None
        sending._socket.send(b"\0" * 200)  # noqa: SLF001 - likewise
        assert [r[0] for r in await reduce_all(trainers)] == [2.0] * 2
        assert rank._to_next is not sending  # noqa: SLF001 - it is another one


async def test_lanes_that_break_again_and_again_fail_the_op(
    clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def breaks(*_: object, **__: object) -> None:
        raise LaneBroken("the data connection to mac-1 ended")

    async with village(clock, 2) as here:
        trainers = await here.job(*here.machines)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "all_reduce", breaks)
            verdicts = await verdicts_of_all(*[(t, t.reduce(ones(9))) for t in trainers])
        assert {v.error for v in verdicts} == {"LaneBroken"}
        assert verdicts[0] == verdicts[1]
        assert [r[0] for r in await reduce_all(trainers)] == [2.0] * 2


# --- retained results (O2)


@pytest.mark.parametrize("count", [10, 500_000])
@pytest.mark.parametrize("together_on_one", [False, True])
async def test_a_rank_that_missed_the_end_fetches_the_same_bits(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, count: int, *, together_on_one: bool
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        trainers = await here.job(*([one, one] if together_on_one else [one, two]))
        await reduce_all(trainers)
        misses, fetched = iter([True]), 0
        x = np.random.default_rng(1).random(count, np.float32)
        real_all_reduce, real_fetch = collectives.all_reduce, ops._fetch  # noqa: SLF001

        async def miss_the_end(ring: collectives.RingPosition, **call: object) -> None:
            await real_all_reduce(ring, **call)  # type: ignore[arg-type]
            if ring.rank == 1 and next(misses, False):
                call["result"][:] = bytes(len(call["result"]))  # type: ignore[index,arg-type]
                raise LaneBroken("its last record never arrived")

        async def count_fetches(*arguments: object) -> None:
            nonlocal fetched
            fetched += 1
            await real_fetch(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(ops, "all_reduce", miss_the_end)
        monkeypatch.setattr(ops, "_fetch", count_fetches)
        results = await reduce_all(trainers, x)
        assert fetched == 1
        assert results[0].tobytes() == results[1].tobytes()
        assert [r[0] for r in await reduce_all(trainers)] == [2.0] * 2


async def test_a_root_whose_broadcast_was_interrupted_has_its_result_already(
    clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    breaks = iter([True])
    real = collectives.broadcast

    async def break_at_the_end(ring: collectives.RingPosition, **call: object) -> None:
        await real(ring, **call)  # type: ignore[arg-type]
        if ring.rank == 0 and ring.size == 2 and next(breaks, False):
            raise LaneBroken("it ended")

    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines)
        monkeypatch.setattr(ops, "broadcast", break_at_the_end)
        x = np.arange(9, dtype=np.float32)
        results = await together(lambda: a.broadcast(x), lambda: b.broadcast(x))
        assert np.array_equal(results[1], x)


async def test_nobody_is_served_what_is_not_retained(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        trainers = await here.job(*here.machines)
        await reduce_all(trainers)
        jobs = here.machines[0].agent.jobs
        (rank,) = jobs.ranks
        roster = rank.roster
        other = Rank(1 - rank.rank)
        for op, holder, asker, number in (
            (99, rank.rank, other, roster.number),
            (0, rank.rank, other, roster.number - 1),
            (0, rank.rank, Rank(-7), roster.number),
            (0, rank.rank, Rank(7), roster.number),
            (0, other, rank.rank, roster.number),
        ):
            jobs.answer(
                AskResult(roster.job, roster.born, number, OpNumber(op), Rank(holder), asker)
            )
        await wait_all_tasks_blocked()
        assert [r[0] for r in await reduce_all(trainers)] == [2.0] * 2


# --- trainers that misbehave


def start_op(call: Call, **changed: object) -> StartOp:
    fields = {
        "op": 0,
        "call": call,
        "wire_dtype": "float32",
        "count": 0,
        "arena": -1,
        "timeout_s": 5.0,
    } | changed
    return StartOp(**fields)  # type: ignore[arg-type]


def hostile() -> Iterator[StartOp]:
    yield start_op(Call("all_reduce", "float32", (0,), "median"))
    yield start_op(Call("all_reduce", "int32", (0,), "mean"), wire_dtype="int32")
    yield start_op(Call("barrier", "bool", (0,)), wire_dtype="bool")
    yield start_op(Call("teleport", "float32", (0,)))
    yield start_op(Call("broadcast", "float32", (0,), root=2))
    yield start_op(Call("broadcast", "float32", (0,)))
    yield start_op(Call("barrier", "float32", (0,)), op=5)
    yield start_op(Call("barrier", "float32", (0,)), arena=3)
    yield start_op(Call("all_reduce", "float32", (9,), "sum"), count=9)
    yield start_op(Call("all_reduce", "float32", (9,), "sum"), count=9, arena=7)
    yield start_op(Call("all_reduce", "float32", (9,), "sum"), count=2**60, arena=0)


@pytest.mark.parametrize("request_", list(hostile()), ids=str)
async def test_a_call_that_no_client_makes_ends_that_trainer_alone(
    clock: MockClock, request_: StartOp
) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines)
        await b.input_arena(9)
        await b.send(request_)
        with pytest.raises(trio.EndOfChannel):
            await b.receive()
        verdict = await a.verdict_of(a.barrier())
        assert verdict.error == "RankLost"
        assert "its trainer sent garbage" in verdict.message
        await a.leave()
        trainers = await here.job(*here.machines)
        assert [r[0] for r in await reduce_all(trainers)] == [2.0] * 2
