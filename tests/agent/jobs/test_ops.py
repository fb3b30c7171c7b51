"""Ops across whole agents: one verdict for all, whatever goes wrong."""

from functools import partial

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.jobs.ranks import LocalRank
from pmesh.core.jobs.attempt import MAX_UNSTABLE_OPS
from pmesh.core.values import Verdict
from pmesh.core.wire.calls import Call
from pmesh.core.wire.views import ViewRequest
from pmesh.net.sessions.arena_pools import OutputArenas
from pmesh.net.sessions.arenas import arena_bytes
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import TrainerClient, together, until
from tests.worlds.village import training, village
from tests.worlds.village_ops import ones, reduce_all, verdicts_of_all

# --- what works


@pytest.mark.parametrize("count", [0, 1, 1000, 600_000])
async def test_every_machine_gets_the_same_bits(clock: MockClock, count: int) -> None:
    async with training(clock, 3) as (_, trainers):
        dice = np.random.default_rng(1)
        inputs = [dice.random(count, np.float32) for _ in trainers]

        async def reduce(trainer: TrainerClient) -> list[bytes]:
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
        names = trainers[0].names
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
    async with training(clock, 2) as (_, (root, other)):
        ahead = 0

        async def send_all() -> None:
            nonlocal ahead
            for i in range(100):
                await root.broadcast(np.full(10, i, np.float32))
                ahead = i + 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all)
            await until(lambda: ahead == MAX_UNSTABLE_OPS)
            await trio.sleep(5)
            assert ahead == MAX_UNSTABLE_OPS
            for i in range(100):
                assert (await other.broadcast(ones(10)))[0] == i


# --- what all ranks get an error for


async def test_different_calls_fail_at_every_rank_and_each_call_is_named(clock: MockClock) -> None:
    async with training(clock, 3) as (_, trainers):
        a, b, c = trainers
        verdicts = await verdicts_of_all(
            (a, a.reduce(ones(10))), (b, b.reduce(ones(11))), (c, c.reduce(ones(10)))
        )
        assert len(set(verdicts)) == 1
        (verdict,) = set(verdicts)
        assert verdict.error == "OpMismatch"
        assert "op 0 of job 'digits' differs" in verdict.message
        for rank, size in ((0, 10), (1, 11), (2, 10)):
            assert (
                f"rank {rank} ({a.names[rank]}): all_reduce(float32, {size}, sum)"
                in verdict.message
            )
        assert [r[0] for r in await reduce_all(trainers)] == [3.0] * 3  # and they go on


async def test_two_roots_of_one_broadcast_hear_of_it_at_their_next_call(clock: MockClock) -> None:
    async with training(clock, 2) as (here, (a, b)):
        await a.broadcast(ones(9), 0)
        await b.broadcast(ones(9), 1)
        await until(lambda: all(m.agent.jobs.ranks[0].late_failure for m in here.machines))
        verdicts = await verdicts_of_all((a, a.reduce(ones(9))), (b, b.reduce(ones(9))))
        assert verdicts[0] == verdicts[1]
        assert "root=0" in verdicts[0].message
        assert "root=1" in verdicts[0].message
        assert a.next_op == b.next_op == 1  # the call in which they heard of it was not used up
        assert [r[0] for r in await reduce_all([a, b])] == [2.0, 2.0]


async def test_a_call_that_is_under_way_when_an_earlier_one_fails_is_taken_back(
    clock: MockClock,
) -> None:
    async with training(clock, 2) as (here, (a, b)):
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


async def test_a_timeout_names_who_is_late_and_holds_for_all(clock: MockClock) -> None:
    async with training(clock, 3) as (_, (a, b, c)):
        x = ones(10)
        verdicts = await verdicts_of_all(
            (a, a.reduce(x, timeout_s=3.0)), (b, b.reduce(x, timeout_s=1000.0))
        )
        assert verdicts[0] == verdicts[1]
        assert verdicts[0].error == "OpTimedOut"
        assert verdicts[0].trainers == (c.id,)
        assert f"not started by rank 2 ({a.names[2]})" in verdicts[0].message
        assert "within 3 s" in verdicts[0].message
        assert await c.verdict_of(c.reduce(x)) == verdicts[0]  # the late one hears it at its call
        assert [r[0] for r in await reduce_all([a, b, c])] == [3.0] * 3


async def test_a_timeout_that_another_view_overtakes_is_told_to_the_leader_again(
    clock: MockClock, faults: Faults
) -> None:
    told = 0

    def tell_in_vain_once(
        tell: Real, rank: LocalRank, verdict: Verdict | None, op: int = -1
    ) -> None:
        nonlocal told
        told += 1
        if told > 1:
            tell(rank, verdict, op)

    faults.around(LocalRank, "request_view", tell_in_vain_once)
    async with training(clock, 2) as (here, (a, b)):
        agent = next(m.agent for m in here.machines if m.agent.jobs.ranks[0].rank == 1)

        async def bring_another_view() -> None:
            await until(lambda: told == 1)
            (rank,) = agent.jobs.ranks
            roster = rank.roster
            rank.view_request = ViewRequest(roster.job, roster.born, roster.number, None, 0)
            agent.jobs.reevaluate()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(bring_another_view)
            verdict = await a.verdict_of(a.reduce(ones(5), timeout_s=3.0))
        assert verdict.error == "OpTimedOut"
        assert told == 2
        assert await b.verdict_of(b.reduce(ones(5))) == verdict


async def test_no_room_in_shared_memory_fails_the_op_at_all_ranks(
    clock: MockClock,
    faults: Faults,
) -> None:
    async with training(clock, 2) as (here, (a, b)):
        pool = here.machines[0].agent.jobs.ranks[0].arenas.outputs

        async def no_memory(
            acquire: Real, self: OutputArenas, nbytes: int, *, follows: bool
        ) -> object:
            if self is pool:
                raise OSError(12, "Cannot allocate memory")
            return await acquire(self, nbytes, follows=follows)

        with faults.around(OutputArenas, "acquire", no_memory):
            verdicts = await verdicts_of_all((a, a.reduce(ones(9))), (b, b.reduce(ones(9))))
        assert verdicts[0] == verdicts[1]
        assert verdicts[0].error == "UsageError"
        assert "Cannot allocate memory" in verdicts[0].message
        assert [r[0] for r in await reduce_all([a, b])] == [2.0, 2.0]


async def test_a_result_takes_no_more_shared_memory_than_its_values(clock: MockClock) -> None:
    count = 100_000
    async with training(clock, 3) as (here, trainers):
        await reduce_all(trainers, ones(count))
        pools = [m.agent.jobs.ranks[0].arenas.outputs for m in here.machines]
        assert {pool.nbytes for pool in pools} == {arena_bytes(4 * count)}
