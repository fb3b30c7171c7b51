"""What else goes on while the native library answers calls does no harm to them."""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import numpy as np
import psutil
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent import limits
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.core.wire.framing import frame
from pmesh.core.wire.session import DropArena, WantArena, encode
from pmesh.core.wire.trainer import GroupOf, OpDone, StartOp
from pmesh.ids import JobName, OpNumber
from pmesh.net.lanes import native
from pmesh.net.sessions.arena_pools import IDLE_S, ArenaBudget, ArenaShare
from tests.agent.jobs.repeating import (
    APART,
    COUNT,
    SUM,
    OpsInPython,
    everywhere,
    reduces,
    repeat,
    repeating,
    time_passes,
)
from tests.worlds.faults import Faults, Real
from tests.worlds.system import without_library
from tests.worlds.trainer import TrainerClient, together, until
from tests.worlds.village import Village, village
from tests.worlds.village_ops import (
    RAISE,
    enter,
    kinds_of_events,
    machine_of,
    ones,
    ranks_of,
    reduce_all,
    syncing_job,
)


async def test_a_call_is_learnt_as_itself_though_others_have_come_since(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2) as (_, trainers):
        await reduce_all(trainers, ones(7))  # for the first time
        await reduce_all(trainers, ones(COUNT))  # by the library
        await trainers[0].ask(WantArena(100))  # after which Python serves one of them
        for _ in range(3):
            results = await reduce_all(trainers, ones(7))
            assert [r.tolist() for r in results] == [[2.0] * 7] * 2


def all_budgets(faults: Faults) -> set[ArenaBudget]:
    """The budgets of all agents, once a trainer has come."""
    budgets = set[ArenaBudget]()

    def share(real: Real, budget: ArenaBudget, pid: int) -> object:
        budgets.add(budget)
        return real(budget, pid)

    faults.around(limits, "ArenaShare", share)
    return budgets


@contextmanager
def used_up(budgets: set[ArenaBudget]) -> Iterator[None]:
    """Meanwhile other programs have nearly all that is left."""
    with ExitStack() as taken:
        for budget in budgets:
            for pid in range(1, 40):
                share = ArenaShare(budget, -pid)
                nbytes = share.allowed_bytes
                share.take(nbytes)
                taken.callback(share.give_back, nbytes)
        yield


async def borrows(trainer: TrainerClient) -> Values:
    """A result that stays."""
    result = await trainer.run(SUM, ones(COUNT), borrows=True)
    assert result is not None
    return result


async def keeps_many(trainer: TrainerClient) -> None:
    for count in range(1, 7):
        call = Call("all_reduce", "float32", (count,), "sum")
        await trainer.run(call, ones(count), borrows=True)


async def drops(trainer: TrainerClient) -> None:
    """Drop what stays, and let the agent read that before the next call comes."""
    for number in trainer.lent:
        await trainer.send(DropArena(number))
    trainer.lent.clear()
    await wait_all_tasks_blocked(0.005)


async def test_what_the_library_has_lent_is_lent_though_others_have_taken_the_memory_since(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    budgets = all_budgets(faults)
    async with repeating(clock, in_python, 2, borrows) as (_, trainers):
        await everywhere(trainers, keeps_many)
        await everywhere(trainers, borrows)
        in_python.clear()
        with used_up(budgets):
            await everywhere(trainers, borrows)
            assert in_python == []
            await everywhere(trainers, drops)
        for _ in range(4):
            await everywhere(trainers, borrows)
            for trainer in trainers:
                kept = trainer.maps[trainer.lent[0]]
                assert np.frombuffer(kept, np.float32, COUNT).tolist() == [2.0] * COUNT


@APART
@pytest.mark.parametrize("answers", ["library", "Python"])
async def test_memory_for_calls_that_were_repeated_is_there_for_others(
    clock: MockClock,
    in_python: OpsInPython,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    answers: str,
) -> None:
    memory = psutil.virtual_memory()._replace(total=48 * 2**20)  # 12 MiB for one program
    faults.instead(psutil, "virtual_memory", lambda: memory)
    with nullcontext() if answers == "library" else without_library(monkeypatch):
        small, large = (np.ones(count * 2**17, np.float32) for count in (2, 7))
        async with repeating(clock, in_python, 2, lambda trainer: trainer.reduce(small)) as (
            _,
            trainers,
        ):
            for _ in range(3):
                await reduce_all(trainers, small)
            assert (answers == "library") == (in_python == [])
            for trainer in trainers:
                trainer.lose_input()  # it keeps those values, too
            with time_passes(clock):
                await trio.sleep(1.0)  # until the results of these are stable
                for less in range(3):  # which are no repetitions
                    results = await reduce_all(trainers, large[less:])
                    assert [r[0] for r in results] == [2.0] * 2


def is_expelled(rank: LocalRank) -> bool:
    return rank.superseded is not None


async def test_who_comes_back_holds_no_more_memory_than_before(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with village(clock, 2) as here:
        a, b = await syncing_job(here, *here.machines)
        held = list[int]()
        for _ in range(4):
            await repeat(clock, [a, b], reduces)
            in_python.clear()
            await reduce_all([a, b], ones(COUNT))
            assert in_python == []
            clock.autojump_threshold = 0
            rank = max(ranks_of(here), key=lambda rank: rank.id)
            jobs = machine_of(here, b).agent.jobs
            jobs.depart(rank, "is lost: its trainer has been stopped for 60 s")
            await until(partial(is_expelled, rank))
            await b.verdict_of(b.barrier())
            await enter(here, [b], [a])
            held.append(rank.arenas.inputs.nbytes + rank.arenas.outputs.nbytes)
        assert held[-1] == held[1], held


@APART
async def test_a_lane_that_is_closed_keeps_its_descriptor_while_threads_use_it(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    faults.limit(native, "TWO_THREADS_FROM_BYTES", 1)

    async def reduces_many(trainer: TrainerClient) -> float:
        return float((await trainer.reduce(ones(1234)))[0])  # a plan that no other test has

    async with repeating(clock, in_python, 2, reduces_many) as (here, (a, b)):
        rank = next(rank for rank in ranks_of(here) if rank.id == a.id)

        async def lose_lanes() -> float:
            await wait_all_tasks_blocked(0.02)
            assert rank.running is None  # the library runs it, in two threads
            lanes = rank.lanes.all_open()
            descriptors = [lane.state.fd for lane in lanes]
            for lane in lanes:
                lane.close()
            assert rank.repeats is not None
            rank.recall()
            assert rank.running is not None
            for descriptor in descriptors:
                os.fstat(descriptor)  # nobody else can have it
            clock.autojump_threshold = 0
            return await reduces_many(b)

        assert await together(partial(reduces_many, a), lose_lanes) == [2.0] * 2


@pytest.mark.parametrize("step", [2**63, 2**64 - 1])
async def test_a_step_that_no_client_says_ends_the_session(
    clock: MockClock, in_python: OpsInPython, step: int
) -> None:
    """The other machines would refuse a heartbeat that says it, and so this machine."""

    async def reduces_in_step(trainer: TrainerClient) -> None:
        await trainer.run(SUM, ones(COUNT), step=1)

    async with repeating(clock, in_python, 2, reduces_in_step, terms=RAISE) as (_, (a, b)):
        await everywhere([a, b], reduces_in_step)
        assert in_python == []
        arena = await b.input_arena(4 * COUNT)
        request = StartOp(OpNumber(b.next_op), SUM, "float32", COUNT, arena, 1800.0, step=step)

        async def lies() -> None:
            await b.send(request)
            with pytest.raises(trio.EndOfChannel):
                await b.receive()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lies)
            with time_passes(clock):
                verdict = await a.verdict_of(reduces_in_step(a))
        assert "its trainer sent garbage" in verdict.message


async def keeps_the_last(trainer: TrainerClient) -> None:
    """As a client does: what it keeps no longer is dropped in one packet with the next call."""
    arena = await trainer.input_arena(4 * COUNT)
    trainer.maps[arena][: 4 * COUNT] = ones(COUNT).tobytes()
    drops = b"".join(frame(encode(DropArena(number))) for number in trainer.lent)
    trainer.lent.clear()
    op = OpNumber(trainer.next_op)
    request = StartOp(op, SUM, "float32", COUNT, arena, 1800.0, borrows=True)
    await trainer.stream.send_all(drops + frame(encode(request)))
    reply = await trainer.receive()
    assert isinstance(reply, OpDone)
    trainer.has_ended(reply, op)
    trainer.lent.append(reply.arena)


async def test_a_trainer_that_drops_a_result_with_its_next_call_is_answered_by_the_library(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 2, keeps_the_last) as (_, trainers):
        await everywhere(trainers, keeps_the_last)
        in_python.clear()
        for _ in range(4):
            await everywhere(trainers, keeps_the_last)
        assert in_python == []


async def test_who_leaves_right_after_a_call_was_learnt_is_not_lost(clock: MockClock) -> None:
    async def ends(trainer: TrainerClient) -> None:
        for _ in range(2):
            await reduces(trainer)
        await trainer.leave()

    async with village(clock, 2) as here:
        trainers = await here.job(*here.machines, terms=RAISE)
        await everywhere(trainers, ends)
        await until(lambda: not ranks_of(here))
        for machine in here.machines:
            assert "loss noticed" not in kinds_of_events(machine)


async def group_of(here: Village, trainers: list[TrainerClient]) -> list[TrainerClient]:
    """A group of all these trainers, in the order of its ranks."""
    ids = tuple(trainer.id for trainer in trainers)
    made = [await here.trainer(machine_of(here, trainer)) for trainer in trainers]

    async def join(group: TrainerClient, trainer: TrainerClient) -> None:
        of = GroupOf(JobName("digits"), ids, trainer.id)
        await group.join("digits/1", len(made), group_of=of)

    await together(*[partial(join, *pair) for pair in zip(made, trainers, strict=True)])
    return sorted(made, key=lambda trainer: trainer.rank)


async def test_a_group_does_not_rest_in_an_op_that_the_library_has_begun(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with village(clock, 2) as here:
        a, b = await group_of(here, await here.job(*here.machines))
        await repeat(clock, [a, b], reduces)
        rank = next(r for r in ranks_of(here) if r.roster.job == "digits/1" and r.id == a.id)
        clock.autojump_threshold = 0
        await until(lambda: rank.is_stable)
        in_python.clear()
        await trio.sleep(IDLE_S - 1.0)
        clock.autojump_threshold = math.inf

        async def late() -> float:
            for _ in range(6):
                await wait_all_tasks_blocked(0.005)
                clock.jump(0.4)
            await wait_all_tasks_blocked(0.005)
            assert len(rank.lanes.all_open()) == 2
            await b.drop_input()  # its own session rests
            return float((await reduces(b))[0])

        async def early() -> float:
            return float((await reduces(a))[0])

        assert await together(early, late) == [2.0] * 2
        assert set(in_python) <= {a.next_op - 1}
