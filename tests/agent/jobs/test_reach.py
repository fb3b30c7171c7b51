"""How far a broadcast goes that names its receivers, and how it ends when ranks are lost."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.jobs import op_task
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.jobs.regions import Op
from pmesh.agent.lanes.rendezvous import LaneRendezvous
from pmesh.core.ops.plan import RankPlan
from pmesh.core.ops.reductions import Values
from pmesh.core.values import OpOutcome
from pmesh.core.wire.calls import Call
from pmesh.core.wire.records import OVERHEAD_BYTES
from pmesh.ids import OpNumber
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import OpError, TrainerClient, together, until
from tests.worlds.village import Village, training, village
from tests.worlds.village_ops import (
    hold_ops,
    losing,
    machine_of,
    ranks_of,
    reduce_all,
    run_on_lanes_by,
    swallow,
    verdicts_of_all,
)

STATE = np.arange(1, 50_001, dtype=np.float32)  # several records

OP = OpNumber(0)


async def send_to(receivers: Sequence[int], trainer: TrainerClient, root: int = 0) -> Values:
    """The trainer's part of the broadcast: what it has then, whatever that is."""
    return await trainer.broadcast(STATE, root, tuple(receivers))


def has_state(got: Values) -> bool:
    return np.array_equal(got, STATE)


def who_completed(here: Village, *, holds: bool | None = None) -> list[int]:
    """As each rank says of itself."""
    told = [(rank.id, rank.ledger.ops.get(OP)) for rank in ranks_of(here)]
    return [
        id_
        for id_, report in told
        if report is not None and report.completed and holds in (None, report.holds)
    ]


def who_holds(here: Village) -> list[int]:
    return who_completed(here, holds=True)


@pytest.fixture
def unstable(faults: Faults) -> None:
    """Nobody hears that all have ended an op: what each knows of it can still be looked at."""
    faults.skip(LocalRank, "stabilize")


def note_fetches(faults: Faults) -> list[tuple[int, OpOutcome]]:
    """Who fetches, and of whom: a list that grows."""
    noted = list[tuple[int, OpOutcome]]()

    async def fetch(real: Real, rank: LocalRank, *what: Any) -> None:  # noqa: ANN401 - as it is
        noted.append((rank.id, what[2]))
        await real(rank, *what)

    faults.around(op_task, "fetch_result", fetch)
    return noted


# --- who gets it


@pytest.mark.parametrize(
    ("root", "receivers", "reached"),
    [
        (0, [1], [0, 1]),
        (0, [2], [0, 1, 2]),
        (0, [2, 1], [0, 1, 2]),
        (0, [3], [0, 1, 2, 3]),
        (2, [3], [2, 3]),
        (2, [0], [0, 2, 3]),
        (3, [1, 0], [0, 1, 3]),
        (1, [1], [1]),
        (1, [], [0, 1, 2, 3]),
    ],
)
@pytest.mark.usefixtures("unstable")
async def test_the_receivers_get_it_and_those_between_and_nobody_else(
    clock: MockClock, root: int, receivers: list[int], reached: list[int]
) -> None:
    async with training(clock, 4) as (here, trainers):
        got = await together(*[partial(send_to, receivers, t, root) for t in trainers])
        assert [rank for rank in range(4) if has_state(got[rank])] == reached
        assert who_holds(here) == reached
        assert who_completed(here) == [0, 1, 2, 3]
        assert {t.world.trainers for t in trainers} == {(0, 1, 2, 3)}
        assert [r[0] for r in await reduce_all(trainers)] == [4.0] * 4


@pytest.mark.parametrize(("receivers", "edges"), [([1], 1), ([2], 2), ([3], 3), ([0], 0)])
async def test_the_edges_beyond_carry_an_empty_record_and_the_last_one_nothing(
    clock: MockClock, receivers: list[int], edges: int
) -> None:
    async with training(clock, 4) as (here, trainers):
        await reduce_all(trainers)  # the lanes are open, and greeted
        before = [rank.lanes.traffic[0] for rank in ranks_of(here)]
        await together(*[partial(send_to, receivers, t) for t in trainers])
        after = [rank.lanes.traffic[0] for rank in ranks_of(here)]
        sent = [now - earlier for now, earlier in zip(after, before, strict=True)]
        assert all(STATE.nbytes < count < 1.01 * STATE.nbytes for count in sent[:edges])
        assert sent[edges:] == [OVERHEAD_BYTES] * (3 - edges) + [0]


async def test_a_state_without_values_ends_everywhere(clock: MockClock) -> None:
    async with training(clock, 3) as (_, trainers):
        call = Call("broadcast", "float32", (0,), root=0, receivers=(1,))
        assert await together(*[partial(t.run, call, None) for t in trainers]) == [None] * 3


async def test_several_of_one_machine_and_some_beyond(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        trainers = await here.job(one, two, one, two)
        for root in range(4):
            receiver = (root + 1) % 4
            got = await together(*[partial(send_to, [receiver], t, root) for t in trainers])
            assert has_state(got[receiver])


@pytest.mark.usefixtures("unstable")
async def test_those_beyond_complete_only_after_the_last_receiver_has_got_it(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(clock, 4) as (here, trainers):
        go_on, real, waiting = trio.Event(), op_task.run_on_lanes, list[int]()

        async def late(rank: LocalRank, op: Op, plan: RankPlan, rendezvous: LaneRendezvous) -> None:
            if rank.rank == 2:
                waiting.append(rank.rank)
                await go_on.wait()
            await real(rank, op, plan, rendezvous)

        run_on_lanes_by(monkeypatch, late)
        async with trio.open_nursery() as nursery:
            for trainer in trainers:
                nursery.start_soon(send_to, [1, 2], trainer)
            await until(lambda: waiting == [2])
            await trio.sleep(1)
            assert {*who_completed(here)} <= {0, 1}  # rank 3 has been told nothing yet
            go_on.set()
        assert who_completed(here) == [0, 1, 2, 3]
        assert who_holds(here) == [0, 1, 2]


# --- ranks that are lost


@pytest.mark.parametrize(
    ("lost", "receivers", "reached"),
    [
        (1, [2, 3], [0, 2, 3]),
        (2, [2, 3], [0, 1, 3]),
        (3, [2, 3], [0, 1, 2]),
        (4, [2, 3], [0, 1, 2, 3]),
        (2, [2], [0]),
    ],
    ids=["between", "first receiver", "last receiver", "beyond", "all receivers"],
)
@pytest.mark.usefixtures("unstable")
async def test_it_runs_again_for_those_of_its_trainers_who_are_left(
    clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    lost: int,
    receivers: list[int],
    reached: list[int],
) -> None:
    """O5: root and receivers are trainers, whatever their ranks become."""
    async with training(clock, 6) as (here, trainers):
        held = hold_ops(monkeypatch, reduces=False, size=6, ranks=range(6), complete=False)
        left = [t for t in trainers if t.rank != lost]
        async with losing(
            trainers[lost], send_to(receivers, trainers[lost]), once=lambda: len(held) == 6
        ):
            got = await together(*[partial(send_to, receivers, t) for t in left])
        assert [t.id for t, values in zip(left, got, strict=True) if has_state(values)] == reached
        assert who_holds(here) == reached
        assert {t.world.trainers for t in left} == {tuple(t.id for t in left)}
        assert [r[0] for r in await reduce_all(left)] == [5.0] * 5


@pytest.mark.parametrize("how", ["trainer", "machine"])
async def test_a_receiver_that_missed_the_end_fetches_from_another_when_the_root_is_gone(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults, how: str
) -> None:
    async with training(clock, 4) as (here, trainers):
        held = hold_ops(monkeypatch, reduces=False, size=4, ranks=[2], complete=True)
        fetches = note_fetches(faults)
        root, *left = trainers

        async def lose_the_root() -> None:
            await until(lambda: held == [2] and who_completed(here) == [0, 1, 3])
            if how == "machine":
                await machine_of(here, root).kill()
            await root.die()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose_the_root)
            nursery.start_soon(swallow, send_to([1, 2], root))
            got = await together(*[partial(send_to, [1, 2], t) for t in left])
        assert has_state(got[0])
        assert has_state(got[1])
        assert {(asker, outcome.holders) for asker, outcome in fetches} == {(2, (1,))}
        assert {t.world.trainers for t in left} == {(0, 1, 2, 3)}
        assert [r[0] for r in await reduce_all(left)] == [3.0] * 3


@pytest.mark.usefixtures("unstable")
async def test_all_who_missed_the_end_fetch_from_the_root_when_it_alone_holds_it(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    """Also a rank beyond that has not heard of the end: from then on it can serve it too."""
    async with training(clock, 5) as (here, trainers):
        held = hold_ops(monkeypatch, reduces=False, size=5, ranks=[1, 2], complete=True)
        fetches = note_fetches(faults)
        left = trainers[:4]
        async with losing(
            trainers[4],
            send_to([1], trainers[4]),
            once=lambda: len(held) == 2 and who_completed(here) == [0, 3, 4],
        ):
            got = await together(*[partial(send_to, [1], t) for t in left])
        assert [has_state(values) for values in got[:3]] == [True] * 3
        assert {(asker, outcome.holders) for asker, outcome in fetches} == {(1, (0,)), (2, (0,))}
        assert who_holds(here) == [0, 1, 2]
        assert who_completed(here) == [0, 1, 2, 3]


async def test_a_root_that_missed_its_own_end_serves_where_only_ranks_beyond_have_completed(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    """I4: it can't run again without those whose call has returned, though they hold nothing."""
    async with training(clock, 5) as (here, trainers):
        held = hold_ops(monkeypatch, reduces=False, size=5, ranks=[0, 1, 3], complete=True)
        fetches = note_fetches(faults)
        left = trainers[:4]
        async with losing(
            trainers[4],
            send_to([1], trainers[4]),
            once=lambda: len(held) == 3 and who_completed(here) == [2, 4],
        ):
            got = await together(*[partial(send_to, [1], t) for t in left])
        assert has_state(got[0])
        assert has_state(got[1])
        assert {t.world.trainers for t in left} == {(0, 1, 2, 3, 4)}  # I3
        assert {(asker, outcome.holders) for asker, outcome in fetches} == {(1, (0,)), (3, (0,))}
        assert [r[0] for r in await reduce_all(left)] == [4.0] * 4
        assert {t.world.trainers for t in left} == {(0, 1, 2, 3)}


async def test_with_the_root_lost_and_nobody_holding_it_fails_and_those_beyond_are_told_late(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(clock, 4) as (here, (root, a, b, beyond)):
        held = hold_ops(monkeypatch, reduces=False, size=4, ranks=[0, 1, 2], complete=True)
        async with losing(
            root, send_to([1, 2], root), once=lambda: len(held) == 3 and who_completed(here) == [3]
        ):
            here.nursery.start_soon(send_to, [1, 2], beyond)  # it hears that all went well
            verdicts = await verdicts_of_all((a, send_to([1, 2], a)), (b, send_to([1, 2], b)))
        assert verdicts[0] == verdicts[1]
        assert verdicts[0].error == "RankLost"
        assert "its result is lost, and others went on; rank 0" in verdicts[0].message
        with pytest.raises(OpError) as told:
            await beyond.barrier()
        assert told.value.verdict == verdicts[0]
        assert not told.value.failed.consumed
        assert {t.next_op for t in (a, b, beyond)} == {1}
        assert {t.world.trainers for t in (a, b, beyond)} == {(1, 2, 3)}
        assert [r[0] for r in await reduce_all([a, b, beyond])] == [3.0] * 3


async def test_a_rank_beyond_that_has_completed_needs_no_result_when_the_root_is_lost_then(
    clock: MockClock,
) -> None:
    async with training(clock, 2) as (_, (root, beyond)):
        await together(partial(send_to, [0], root), partial(send_to, [0], beyond))
        await root.die()
        assert [r[0] for r in await reduce_all([beyond])] == [1.0]
