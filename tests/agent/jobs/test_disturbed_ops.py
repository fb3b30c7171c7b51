"""Ops across whole agents that lose ranks, lanes or their end, and callers that misbehave."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent.jobs import op_task
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.jobs.regions import Op
from pmesh.agent.jobs.retained import MAX_EARLY
from pmesh.agent.lanes.rendezvous import LaneRendezvous
from pmesh.core.jobs.attempt import LANE_GRACE_S
from pmesh.core.links.health import WIRED
from pmesh.core.ops.plan import RankPlan
from pmesh.core.ops.reductions import Values
from pmesh.core.values import OpOutcome
from pmesh.core.wire.calls import Call
from pmesh.core.wire.lanes import AskResult
from pmesh.core.wire.trainer import StartOp
from pmesh.errors import LaneBroken
from pmesh.ids import OpNumber, TrainerId
from pmesh.net.lanes import native
from pmesh.net.lanes.lane import CallsDiffer
from tests.worlds.faults import Faults, Real
from tests.worlds.kept import kept
from tests.worlds.lanes import forgotten
from tests.worlds.trainer import together, until
from tests.worlds.village import training, village
from tests.worlds.village_ops import (
    RAISE,
    events_of,
    kinds_of_events,
    learn,
    ones,
    ranks_of,
    reduce_all,
    run_on_lanes_by,
    send_garbage,
    swallow,
    verdicts_of_all,
)

# --- lanes


async def test_a_view_that_comes_between_two_plans_of_an_op_stops_it_before_it_looks_at_lanes() -> (
    None
):
    """V3: the plan has places in a roster that is over, where there may be fewer ranks."""
    untouched: Any = None
    with trio.CancelScope() as attempt:
        attempt.cancel()
        await op_task.run_on_lanes(untouched, untouched, untouched, untouched)
    assert attempt.cancelled_caught


async def test_a_broken_lane_is_replaced_and_the_op_goes_on(clock: MockClock) -> None:
    async with training(clock, 3) as (here, trainers):
        await reduce_all(trainers)
        for _ in range(2):
            here.machines[1].lanes()[0].close()
            assert [r[0] for r in await reduce_all(trainers)] == [3.0] * 3


async def test_a_lane_that_swallows_what_it_is_given_is_replaced_while_heartbeats_flow(
    clock: MockClock,
) -> None:
    async with training(clock, 2) as (here, trainers):
        await reduce_all(trainers)
        (rank,) = here.machines[0].agent.jobs.ranks
        sending = rank.lanes.all_open()[0]
        began = clock.current_time()
        with forgotten(sending):
            assert [r[0] for r in await reduce_all(trainers)] == [2.0] * 2
        assert sending not in rank.lanes.all_open()
        assert clock.current_time() - began >= WIRED.gone_after_s


async def test_who_computes_for_long_costs_no_lane(clock: MockClock) -> None:
    async with training(clock, 2) as (here, (a, b)):
        (rank,) = here.machines[0].agent.jobs.ranks
        number = rank.roster.number

        async def compute_first() -> Values:
            await trio.sleep(30)
            return await b.reduce(ones(10))

        results = await together(lambda: a.reduce(ones(10)), compute_first)
        assert [r[0] for r in results] == [2.0] * 2
        assert rank.roster.number == number


async def test_an_op_whose_path_fails_runs_again_over_another_at_once(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await trio.sleep(1)  # a path that ends sooner has been refused
        trainers = await here.job(one, two)
        await reduce_all(trainers)
        real, fails = op_task.run_on_lanes, iter([True])

        async def fail_in_the_middle(
            rank: LocalRank, op: Op, plan: RankPlan, rendezvous: LaneRendezvous
        ) -> None:
            if rank.rank == 0 and next(fails, False):
                for machine, other in ((one, two), (two, one)):
                    link = machine.agent.peers.links[other.key.node]
                    (path,) = link.paths.values()
                    machine.agent.peers.end_path(link, path, "it is silent")
            await real(rank, op, plan, rendezvous)

        run_on_lanes_by(monkeypatch, fail_in_the_middle)
        began = trio.current_time()
        results = await reduce_all(trainers)
        assert [r[0] for r in results] == [2.0] * 2
        assert trio.current_time() - began < LANE_GRACE_S
        (broken,) = [e.text for e in events_of(one) if e.kind == "lane broken"]
        assert broken.endswith("has lost its path")
        assert len(one.names) == len(two.names) == 2


@pytest.mark.parametrize("error", [LaneBroken("it was closed"), CallsDiffer(0, "mac-1")], ids=str)
async def test_what_breaks_because_a_view_has_come_is_no_news(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The view closes the lanes while the op is about to read from them."""
    async with training(clock, 3) as (here, (a, b, c)):
        real = op_task.run_on_lanes

        async def break_with_the_view(
            rank: LocalRank, op: Op, plan: RankPlan, rendezvous: LaneRendezvous
        ) -> None:
            if rank.size == 2:
                await real(rank, op, plan, rendezvous)
                return
            try:
                await trio.sleep_forever()
            finally:
                raise error

        run_on_lanes_by(monkeypatch, break_with_the_view)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swallow, c.reduce(ones(1000)))

            async def lose_one() -> None:
                await until(lambda: all(rank.busy_since is not None for rank in ranks_of(here)))
                await trio.sleep(0.1)
                await c.die()

            nursery.start_soon(lose_one)
            results = await reduce_all([a, b])
        assert [r[0] for r in results] == [2.0] * 2
        for machine in here.machines[:2]:
            assert "lane broken" not in kinds_of_events(machine)


# --- retained results (O2)


@pytest.mark.parametrize("count", [10, 500_000])
@pytest.mark.parametrize("together_on_one", [False, True])
async def test_a_rank_that_missed_the_end_fetches_the_same_bits(
    clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
    count: int,
    *,
    together_on_one: bool,
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        trainers = await here.job(*([one, one] if together_on_one else [one, two]))
        await reduce_all(trainers)
        misses, fetched = iter([True]), 0
        x = np.random.default_rng(1).random(count, np.float32)
        real_run = op_task.run_on_lanes

        async def miss_the_end(
            rank: LocalRank, op: Op, plan: RankPlan, rendezvous: LaneRendezvous
        ) -> None:
            await real_run(rank, op, plan, rendezvous)
            if rank.rank == 1 and next(misses, False):
                op.result.memory[:] = bytes(op.result.nbytes)
                raise LaneBroken("its last record never arrived")

        async def count_fetches(real_fetch: Real, *arguments: object) -> None:
            nonlocal fetched
            fetched += 1
            await real_fetch(*arguments)

        run_on_lanes_by(monkeypatch, miss_the_end)
        faults.around(op_task, "_fetch", count_fetches)
        results = await reduce_all(trainers, x)
        assert fetched == 1
        assert results[0].tobytes() == results[1].tobytes()
        assert [r[0] for r in await reduce_all(trainers)] == [2.0] * 2


async def test_a_root_whose_broadcast_was_interrupted_has_its_result_already(
    clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    breaks = iter([True])
    real = op_task.run_on_lanes

    async def break_at_the_end(
        rank: LocalRank, op: Op, plan: RankPlan, rendezvous: LaneRendezvous
    ) -> None:
        await real(rank, op, plan, rendezvous)
        if op.call.kind == "broadcast" and rank.rank == 0 and next(breaks, False):
            raise LaneBroken("it ended")

    async with training(clock, 2) as (_, (a, b)):
        run_on_lanes_by(monkeypatch, break_at_the_end)
        x = np.arange(9, dtype=np.float32)
        results = await together(lambda: a.broadcast(x), lambda: b.broadcast(x))
        assert np.array_equal(results[1], x)


async def test_an_op_for_which_the_system_has_no_pipe_runs_as_soon_as_it_has_one(
    clock: MockClock, faults: Faults
) -> None:
    fails = iter([True, True])
    async with training(clock, 2) as (_, trainers):
        await reduce_all(trainers)

        def begin(real: Real, *arguments: object, **named: object) -> object:
            if next(fails, False):
                raise LaneBroken("the data connections have no pipe: the system has no room for it")
            return real(*arguments, **named)

        faults.around(native, "begin", begin)
        assert [r[0] for r in await reduce_all(trainers)] == [2.0] * 2
    assert next(fails, None) is None


async def test_nobody_is_served_what_is_not_retained(clock: MockClock) -> None:
    async with training(clock, 2) as (here, trainers):
        await reduce_all(trainers)
        jobs = here.machines[0].agent.jobs
        (rank,) = jobs.ranks
        roster = rank.roster
        (other,) = [trainer for trainer in roster.ids if trainer != rank.id]
        for op, holder, asker, number in (
            (99, rank.id, other, roster.number),
            (0, rank.id, other, roster.number - 1),
            (0, rank.id, TrainerId(7), roster.number),
            (0, other, rank.id, roster.number),
        ):
            ask = AskResult(roster.job, roster.born, number, OpNumber(op), holder, asker)
            jobs.results.answer(here.machines[1].agent.jobs.me, ask)
        await wait_all_tasks_blocked()
        assert [r[0] for r in await reduce_all(trainers)] == [2.0] * 2


async def test_only_who_lacks_a_result_may_have_it_sent(clock: MockClock, faults: Faults) -> None:
    async with village(clock, 3) as here:
        one, other, third = here.machines
        trainers = await here.job(one, other)
        await reduce_all(trainers)
        jobs, (rank,) = one.agent.jobs, one.agent.jobs.ranks
        roster = rank.roster
        (peer,) = [trainer for trainer in roster.ids if trainer != rank.id]
        for op in range(200):  # early, too
            for number in (roster.number, roster.number + 1):
                ask = AskResult(roster.job, roster.born, number, OpNumber(op), rank.id, peer)
                jobs.results.answer(third.agent.jobs.me, ask)
        assert kept(jobs.results)["serving"] == 0
        again = list[AskResult]()
        with faults.instead(jobs.results, "answer", lambda _, ask: again.append(ask)):
            jobs.results.answer_early()
        assert len(again) == MAX_EARLY
        for ask in again:
            jobs.results.answer(third.agent.jobs.me, ask)
        await third.kill()
        await until(lambda: not kept(jobs.results)["early"])


async def test_a_result_of_another_call_is_not_taken_from_a_rank_on_the_same_machine(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        a, b = await here.job(one, one)
        holder, asker = ranks_of(here)
        await a.broadcast(ones(10))
        outcome = OpOutcome(OpNumber(0), asker.roster.ids, holders=(holder.id,))
        learn(faults, asker, outcome)
        verdict, _ = await verdicts_of_all((b, b.reduce(ones(10))), (a, a.reduce(ones(10))))
        assert verdict.error == "OpMismatch"


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
    yield start_op(Call("all_reduce", "complex64", (0,), "max"), wire_dtype="complex64")
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
        a, b = await here.job(*here.machines, terms=RAISE)
        await b.input_arena(9)
        await send_garbage(request_, b, other=a)
        assert a.names == (a.names[0],)
        await a.leave()
        trainers = await here.job(*here.machines)
        assert [r[0] for r in await reduce_all(trainers)] == [2.0] * 2
