"""O2: results that are fetched from who has them, also while views come and links are slow."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.jobs import retained
from pmesh.agent.jobs.retained import ResultServer
from pmesh.core.jobs.attempt import ASK_AGAIN_S
from pmesh.core.ops.reductions import Values
from pmesh.core.values import OpOutcome
from pmesh.core.wire.lanes import AskResult
from pmesh.ids import Member, OpNumber, TrainerId
from pmesh.net.lanes.ring import RingPosition
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import TrainerClient, together, until
from tests.worlds.village import Village, training, village
from tests.worlds.village_ops import (
    hold_all_reduces,
    learn,
    losing,
    machine_of,
    ranks_of,
    reduce_all,
    swallow,
)


@dataclass
class Missed:
    """Rank 0 alone has completed op 0; rank 1 is to fetch it, and the last rank is lost."""

    here: Village
    trainers: list[TrainerClient]
    values: list[Values]
    results: list[Values]

    async def end(self) -> None:
        """Both have the same bits."""
        await until(lambda: len(self.results) == 2)
        assert self.results[0].tobytes() == self.results[1].tobytes()
        np.testing.assert_allclose(self.results[0], sum(self.values), rtol=1e-6)


@asynccontextmanager
async def a_missed_end(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, *, ranks: int, count: int
) -> AsyncGenerator[Missed]:
    async with training(clock, ranks) as (here, trainers):
        others = range(1, ranks)
        held = hold_all_reduces(monkeypatch, size=ranks, ranks=others, complete=True)
        dice = np.random.default_rng(5)
        values = [dice.random(count, np.float32) for _ in trainers]
        missed = Missed(here, trainers, values, [])

        async def reduce(trainer: TrainerClient) -> None:
            missed.results.append(await trainer.reduce(values[trainer.rank]))

        async with trio.open_nursery() as nursery:
            for trainer in trainers[:2]:
                nursery.start_soon(reduce, trainer)
            for trainer in trainers[2:]:
                nursery.start_soon(swallow, trainer.reduce(values[trainer.rank]))
            await until(lambda: sorted(held) == list(others))
            await until(lambda: len(missed.results) == 1)
            await trainers[-1].die()
            yield missed
        await missed.end()


async def test_a_fetch_that_takes_longer_than_a_peer_may_be_silent_is_left_alone(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:

    async def trickle(real: Real, ring: RingPosition, **call: object) -> None:
        if ring.from_previous is not None:
            for _ in range(20):
                await trio.sleep(0.5)
                ring.from_previous.state.bytes_received += 1  # as a slow network brings it
        await real(ring, **call)

    faults.around(retained, "broadcast", trickle)
    async with a_missed_end(clock, monkeypatch, ranks=3, count=1000) as missed:
        asker = ranks_of(missed.here)[1]
        await until(lambda: asker.size == 2)
        number = asker.roster.number
        await missed.end()
        assert asker.roster.number == number


async def test_a_fetch_that_brings_nothing_is_begun_again_in_another_view(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    tries = 0

    async def hang_once(real: Real, ring: RingPosition, **call: object) -> None:
        nonlocal tries
        if ring.from_previous is not None:
            tries += 1
            if tries == 1:
                await trio.sleep_forever()
        await real(ring, **call)

    faults.around(retained, "broadcast", hang_once)
    async with a_missed_end(clock, monkeypatch, ranks=3, count=1000) as missed:
        asker = ranks_of(missed.here)[1]
        await until(lambda: asker.size == 2)
        number = asker.roster.number
        await missed.end()
        assert asker.roster.number > number
        assert tries == 2


async def test_a_view_that_comes_while_a_result_is_served_ends_that_before_its_memory_is_reused(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    ended = list[int]()

    async def serve_slowly(real: Real, ring: RingPosition, **call: object) -> None:
        if ring.to_next is not None and not ended:
            try:
                await trio.sleep_forever()
            finally:
                ended.append(ring.roster)
        await real(ring, **call)

    faults.around(retained, "broadcast", serve_slowly)
    async with a_missed_end(clock, monkeypatch, ranks=4, count=1000) as missed:
        here = missed.here
        holder = ranks_of(here)[0]
        await until(lambda: bool(holder.serving))
        number = holder.roster.number
        await missed.trainers[2].die()
        await missed.end()
        assert set(ended) == {number}
        await until(lambda: not holder.serving)
        assert holder.size == 2
        assert [r[0] for r in await reduce_all(missed.trainers[:2])] == [2.0] * 2


async def test_several_who_missed_the_end_each_fetch_it(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(clock, 4) as (_, trainers):
        held = hold_all_reduces(monkeypatch, size=4, ranks=[1, 2, 3], complete=True)
        x = np.random.default_rng(6).random(200_000, np.float32)
        async with losing(trainers[3], trainers[3].reduce(x), once=lambda: len(held) == 3):
            results = await together(*[lambda t=t: t.reduce(x) for t in trainers[:3]])
        assert len({r.tobytes() for r in results}) == 1
        assert results[0][0] == 4 * x[0]


async def test_a_result_that_another_rank_of_the_agent_has_is_copied_there(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    async with village(clock, 3) as here:
        trainers = await here.job(*[machine for machine in here.machines for _ in range(2)])
        held = hold_all_reduces(monkeypatch, size=6, ranks=[3, 5], complete=True)
        faults.forbid(retained, "_ask_for_lane")  # it is near
        async with losing(trainers[5], trainers[5].sync(5), once=lambda: len(held) == 2):
            rows = await together(*[lambda t=t: t.sync(t.rank) for t in trainers[:5]])
        assert rows == [[0, 1, 2, 3, 4, 5]] * 5


async def test_a_holder_whose_lane_breaks_is_asked_again(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    breaks = iter([True])

    async def break_once(real: Real, ring: RingPosition, **call: object) -> None:
        if ring.to_next is not None and next(breaks, False):
            ring.to_next.close()
        await real(ring, **call)

    faults.around(retained, "broadcast", break_once)
    async with a_missed_end(clock, monkeypatch, ranks=3, count=1000) as missed:
        await missed.end()


async def test_a_holder_that_is_asked_before_its_view_comes_answers_as_soon_as_it_has_it(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    asked_at = list[float]()

    def answer_early(real: Real, server: ResultServer, member: Member, ask: AskResult) -> None:
        asked_at.append(trio.current_time())
        (holder,) = jobs.ranks
        roster = holder.roster
        holder.roster = msgspec.structs.replace(roster, number=ask.number - 1)
        real(server, member, ask)
        holder.roster = roster
        early.end()
        jobs.install(jobs.membership.view)

    early = faults.around(ResultServer, "answer", answer_early)
    async with training(clock, 3) as (here, trainers):
        held = hold_all_reduces(monkeypatch, size=3, ranks=[1, 2], complete=True)
        jobs = machine_of(here, trainers[0]).agent.jobs
        x = np.ones(9, np.float32)
        async with losing(
            trainers[2],
            trainers[2].reduce(x),
            once=lambda: len(held) == 2 and jobs.ranks[0].ledger.ended == 0,
        ):
            results = await together(*[lambda t=t: t.reduce(x) for t in trainers[:2]])
        assert [r[0] for r in results] == [3.0] * 2
        assert trio.current_time() - asked_at[0] < ASK_AGAIN_S


async def test_a_second_holder_is_asked_when_the_first_does_not_answer(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    asked = list[AskResult]()

    def answer(real: Real, server: ResultServer, member: Member, ask: AskResult) -> None:
        asked.append(ask)
        if ask.holder != 0:
            real(server, member, ask)

    faults.around(ResultServer, "answer", answer)
    async with training(clock, 4) as (here, trainers):
        held = hold_all_reduces(monkeypatch, size=4, ranks=[2, 3], complete=True)
        x = np.ones(9, np.float32)

        def all_have_ended() -> bool:
            return len(held) == 2 and all(r.ledger.ended == 0 for r in ranks_of(here)[:2])

        async with losing(trainers[3], trainers[3].reduce(x), once=all_have_ended):
            results = await together(*[lambda t=t: t.reduce(x) for t in trainers[:3]])
        assert [r[0] for r in results] == [4.0] * 3
        assert [ask.holder for ask in asked][:2] == [0, 1]


@pytest.mark.parametrize(("machines", "holder"), [(1, 0), (2, 0), (2, 7)])
async def test_a_result_that_is_nowhere_is_computed_after_all(
    clock: MockClock, faults: Faults, machines: int, holder: int
) -> None:
    """Whoever is said to hold it does not; the next view knows better."""
    async with village(clock, machines) as here:
        a, b = await here.job(here.machines[0], here.machines[-1])
        asker = ranks_of(here)[1]
        outcome = OpOutcome(OpNumber(0), asker.roster.ids, holders=(TrainerId(holder),))
        learn(faults, asker, outcome)
        assert [r[0] for r in await reduce_all([a, b])] == [2.0] * 2
        assert asker.roster.number > asker.roster.born.counter


async def test_what_is_stable_is_let_go_of_everywhere(clock: MockClock) -> None:
    async with training(clock, 3) as (here, trainers):
        for _ in range(5):
            await reduce_all(trainers)
        await trio.sleep(1)
        for rank in ranks_of(here):
            assert rank.ledger.stable == 4
            assert rank.retained_bytes == 0
            assert rank.results.get(OpNumber(4)) is None
            assert machine_of(here, trainers[0]).agent.jobs.progress.stable(rank.roster) == 4
