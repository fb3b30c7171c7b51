"""A rank is lost in the middle of an op: the others complete it, all with the same bits."""

from functools import partial

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.jobs.driver import Jobs
from pmesh.agent.jobs.session import WATCH_S
from pmesh.core.jobs.jobs import LEAVE_GRACE_S
from pmesh.core.ops.reductions import Values
from pmesh.core.values import View
from pmesh.core.wire.calls import Call
from pmesh.core.wire.session import SessionMessage
from pmesh.core.wire.trainer import RanksLost
from pmesh.ids import TrainerId
from pmesh.net.sessions.sessions import Session
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import TrainerClient, together, until
from tests.worlds.village import Village, training, village
from tests.worlds.village_ops import (
    RAISE,
    events_of,
    hold_all_reduces,
    kinds_of_events,
    losing,
    machine_of,
    ones,
    ranks_of,
    reduce_all,
    run,
    swallow,
    verdicts_of_all,
)


async def lose(here: Village, trainer: TrainerClient, how: str) -> None:
    if how != "agent":
        await trainer.die()
    if how != "trainer":
        await machine_of(here, trainer).kill()


def inputs_of(trainers: list[TrainerClient], count: int) -> list[Values]:
    dice = np.random.default_rng(3)
    return [dice.random(count, np.float32) for _ in trainers]


@pytest.mark.parametrize("how", ["trainer", "agent", "machine"])
@pytest.mark.parametrize("count", [10, 300_000])
async def test_the_survivors_complete_the_op_with_their_own_values(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, how: str, count: int
) -> None:
    async with training(clock, 3) as (here, trainers):
        a, b, c = trainers
        await reduce_all(trainers)
        held = hold_all_reduces(monkeypatch, size=3, ranks=[2], complete=False)
        x, y, z = inputs_of(trainers, count)
        worlds: list[tuple[TrainerId, ...]] = []

        async def lose_one() -> None:
            await until(lambda: held == [2])
            began = clock.current_time()
            worlds.extend(rank.world for rank in ranks_of(here))
            await lose(here, c, how)
            if how == "trainer":  # its agent sees that the connection is gone, and says so
                await until(lambda: all(rank.size == 2 for rank in ranks_of(here)))
                assert clock.current_time() - began <= WATCH_S + 0.1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose_one)
            nursery.start_soon(swallow, c.reduce(z))
            results = await together(lambda: a.reduce(x), lambda: b.reduce(y))
        assert results[0].tobytes() == results[1].tobytes() == (x + y).tobytes()
        assert worlds == [c.world.trainers] * 3
        assert a.world.trainers == b.world.trainers == (0, 1)  # those who have contributed
        assert (a.rank, b.rank) == (0, 1)
        means = await together(lambda: a.reduce(x, "mean"), lambda: b.reduce(x, "mean"))
        assert [m[0] for m in means] == [x[0]] * 2


def reducing(strategy: str, count: int) -> Call:
    return Call("all_reduce", "float32", (count,), "sum", strategy=strategy)


@pytest.mark.parametrize("how", ["trainer", "machine"])
async def test_the_lanes_between_those_that_stay_are_kept_with_what_was_under_way(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """V4: what the attempt before has left in them is dropped; and none is opened."""
    async with training(clock, 3) as (here, trainers):
        a, b, c = trainers
        call, values = reducing("direct", 300_000), inputs_of(trainers, 300_000)
        run = {t: partial(t.run, call, x) for t, x in zip(trainers, values, strict=True)}
        await together(*run.values())
        before = {machine: set(machine.lanes()) for machine in here.machines}
        held = hold_all_reduces(monkeypatch, size=3, ranks=[2], complete=False)

        async def lose_one() -> None:
            await until(lambda: held == [2])
            await lose(here, c, how)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose_one)
            nursery.start_soon(swallow, run[c]())
            results = await together(run[a], run[b])
        x, y, _ = values
        for result in results:
            np.testing.assert_array_equal(result, x + y)
        for trainer in (a, b):
            machine = machine_of(here, trainer)
            assert set(machine.lanes()) < before[machine]
            assert len(machine.lanes()) == 2
        kept = [lane for trainer in (a, b) for lane in machine_of(here, trainer).lanes()]
        assert sum(lane.records_dropped for lane in kept) > 0


async def test_no_lane_is_kept_where_one_broke(clock: MockClock) -> None:
    async with training(clock, 3) as (here, trainers):
        await reduce_all(trainers)
        before = {lane for machine in here.machines for lane in machine.lanes()}
        here.machines[1].lanes()[0].close()
        await reduce_all(trainers)
        assert not before & {lane for machine in here.machines for lane in machine.lanes()}


async def test_a_kept_lane_that_breaks_is_replaced(clock: MockClock) -> None:
    async with training(clock, 3) as (here, trainers):
        await reduce_all(trainers)
        *others, lost = trainers
        before = machine_of(here, others[0]).lanes()
        await lose(here, lost, "machine")
        await reduce_all(others)
        (kept,) = set(before) & set(machine_of(here, others[0]).lanes())
        kept.close()
        assert [r[0] for r in await reduce_all(others)] == [2.0] * 2


# --- what one of them had completed (I4)


async def test_what_a_survivor_completed_the_others_fetch_with_the_lost_ranks_values(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(clock, 3) as (here, trainers):
        a, b, c = trainers
        held = hold_all_reduces(monkeypatch, size=3, ranks=[1, 2], complete=True)
        values = inputs_of(trainers, 1000)
        async with losing(c, c.reduce(values[2]), once=lambda: sorted(held) == [1, 2]):
            results = await together(lambda: a.reduce(values[0]), lambda: b.reduce(values[1]))
        assert results[0].tobytes() == results[1].tobytes()
        np.testing.assert_allclose(results[0], sum(values), rtol=1e-6)
        assert a.names == b.names == c.names
        assert "op fetched" in kinds_of_events(machine_of(here, b))
        assert [r[0] for r in await reduce_all([a, b])] == [2.0] * 2
        assert a.world.trainers == b.world.trainers == (0, 1)


async def test_what_only_a_lost_rank_completed_is_fetched_from_its_agent(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(clock, 3) as (here, trainers):
        a, b, c = trainers
        held = hold_all_reduces(monkeypatch, size=3, ranks=[0, 1], complete=True)
        values = inputs_of(trainers, 1000)
        theirs: list[bytes] = []

        async def complete_and_die() -> None:
            theirs.append((await c.reduce(values[2])).tobytes())
            await until(lambda: sorted(held) == [0, 1])
            await c.die()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(complete_and_die)
            results = await together(lambda: a.reduce(values[0]), lambda: b.reduce(values[1]))
        assert [r.tobytes() for r in results] == theirs * 2
        assert a.names == b.names == c.names
        await until(lambda: len(ranks_of(here)) == 2)  # nobody needs the lost holder any more
        assert [r[0] for r in await reduce_all([a, b])] == [2.0] * 2


async def test_an_op_that_was_interrupted_is_noted_with_how_long_the_ring_stood_still(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(clock, 3) as (here, trainers):
        held = hold_all_reduces(monkeypatch, size=3, ranks=[2], complete=False)

        async def lose_one() -> None:
            await until(lambda: held == [2])
            await trio.sleep(0.6)  # nothing moves, which is seen four times a second
            await trainers[2].die()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose_one)
            nursery.start_soon(swallow, trainers[2].reduce(ones(1000)))
            await reduce_all(trainers[:2])
        for trainer in trainers[:2]:
            events = events_of(machine_of(here, trainer))
            (halt,) = [event for event in events if event.kind == "ring stood still"]
            assert halt.op == 0
            assert halt.duration_s is not None
            assert 0.25 <= halt.duration_s <= 0.9 + WATCH_S
            assert "op rerun" in [event.kind for event in events]


# --- a lost root, and a loss that is to be raised


async def test_a_root_keeps_its_broadcast_when_ranks_before_it_are_lost(
    clock: MockClock,
) -> None:
    """O5: it is a trainer, whatever its rank becomes."""
    async with training(clock, 3) as (here, (a, b, c)):
        x = np.arange(9, dtype=np.float32)

        async def lose_the_first() -> None:
            await until(lambda: sum(rank.ledger.started == 0 for rank in ranks_of(here)) == 1)
            await a.die()
            await until(lambda: all(rank.size == 2 for rank in ranks_of(here)))
            await c.broadcast(x, 2)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose_the_first)
            assert np.array_equal(await b.broadcast(x, 2), x)
        assert b.names == c.names
        assert c.rank == 1


@pytest.mark.parametrize("between_ops", [False, True])
async def test_where_a_loss_is_to_raise_the_op_fails_alike_and_the_job_goes_on(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, *, between_ops: bool
) -> None:
    async with village(clock, 3) as here:
        trainers = await here.job(*here.machines, terms=RAISE)
        a, b, c = trainers
        await reduce_all(trainers)
        held = hold_all_reduces(monkeypatch, size=3, ranks=[2], complete=False)

        async def lose_one() -> None:
            await until(lambda: held == [2])
            await c.die()

        if between_ops:
            await c.die()
            await until(lambda: all(rank.size == 2 for rank in ranks_of(here)))
        async with trio.open_nursery() as nursery:
            if not between_ops:
                nursery.start_soon(lose_one)
                nursery.start_soon(swallow, c.reduce(ones(9)))
            verdicts = await verdicts_of_all((a, a.reduce(ones(9))), (b, b.reduce(ones(9))))
        assert verdicts[0] == verdicts[1]
        assert verdicts[0].error == "RankLost"
        assert verdicts[0].trainers == (2,)
        assert "rank 2 (mac-" in verdicts[0].message
        assert "its trainer died" in verdicts[0].message
        assert a.next_op == b.next_op == 2
        assert [r[0] for r in await reduce_all([a, b])] == [2.0] * 2
        assert a.world.trainers == b.world.trainers == (0, 1)


# --- leaving in order


async def test_who_leaves_waits_a_moment_for_the_others_to_end_its_last_op(
    clock: MockClock,
) -> None:
    async with training(clock, 2) as (here, (a, b)):
        await a.broadcast(ones(9))
        (other,) = [r for r in ranks_of(here) if r.id == b.id]
        began = clock.current_time()
        await a.leave()
        await until(lambda: other.size == 1)
        assert LEAVE_GRACE_S <= clock.current_time() - began <= LEAVE_GRACE_S + 0.5
        assert (await b.broadcast(ones(9)))[0] == 1.0


async def test_a_rank_that_has_given_its_part_of_a_gather_may_leave_long_before_the_root_has_it(
    clock: MockClock,
) -> None:
    async with training(clock, 2) as (here, (root, giver)):
        gather = Call("gather", "float32", (), root=0)
        await run(giver, gather, ones(3), (3, 3))
        await giver.leave()
        await trio.sleep(60 * LEAVE_GRACE_S)  # on a slow line, the other parts take that long
        assert (await run(root, gather, ones(3), (3, 3))).tolist() == [1.0] * 6
        await until(lambda: [rank.size for rank in ranks_of(here)] == [1])


async def test_one_lost_while_another_loss_is_being_agreed_on_is_told_with_the_next_view(
    clock: MockClock, faults: Faults
) -> None:
    """A view request names a roster, and the one that replaces it may not know of it."""
    async with training(clock, 3) as (here, trainers):
        a, b, c = trainers
        await reduce_all(trainers)

        def die_as_the_view_comes(real: Real, jobs: Jobs, view: View) -> None:
            for rank in jobs.ranks:
                if rank.id == b.id and rank.leaving is None:
                    jobs.depart(rank, "is lost: its trainer died")
            real(jobs, view)

        faults.around(Jobs, "install", die_as_the_view_comes)
        faults.pretend(Jobs, "poll", lambda _: None)  # which would report it again, but later
        began = clock.current_time()
        await c.die()
        await until(lambda: [rank.size for rank in ranks_of(here) if rank.rank == 0] == [1])
        assert clock.current_time() - began <= 0.2
        assert (await a.reduce(ones(9)))[0] == 1.0


async def test_a_loss_that_comes_while_another_is_told_is_told_as_well(
    clock: MockClock, faults: Faults
) -> None:
    """A trainer that is busy reads late, and its agent waits until it may write."""
    real, waits, may_send = Session.send, trio.Event(), trio.Event()

    async def send(session: Session, reply: SessionMessage, *descriptors: tuple[int, ...]) -> None:
        if isinstance(reply, RanksLost):
            waits.set()
            await may_send.wait()
        await real(session, reply, *descriptors)

    faults.instead(Session, "send", send)
    async with training(clock, 3) as (here, trainers):
        a, b, c = trainers
        await reduce_all(trainers)
        (rank,) = machine_of(here, a).agent.jobs.ranks
        await c.die()
        await until(lambda: rank.size == 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swallow, b.reduce(ones(10)))
            nursery.start_soon(a.reduce, ones(10))
            await waits.wait()
            await lose(here, b, "machine")
            await until(lambda: rank.size == 1)
            may_send.set()
        await a.reduce(ones(10))
        assert [text.partition(" (")[0] for text in a.losses] == ["rank 2", "rank 1"]
