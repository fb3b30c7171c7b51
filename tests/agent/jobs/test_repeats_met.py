"""Where ranks of one agent do not meet in the native library, it costs little."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from trio.testing import MockClock

from pmesh.agent.jobs import repeats
from pmesh.core.wire.calls import Call
from pmesh.core.wire.session import DropArena
from pmesh.ids import TrainerId
from pmesh.native.layout import address_of
from pmesh.net.lanes.persistent import PersistentCalls
from tests.agent.jobs.repeating import COUNT, SUM, OpsInPython, everywhere, reduces, repeating
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import TrainerClient
from tests.worlds.village import Village
from tests.worlds.village_ops import ones, ranks_of, run

SCATTERED = Call("reduce_scatter", "float32", (COUNT,), "sum")

pytestmark = pytest.mark.parametrize("in_python", ["together"], indirect=True)


async def test_a_rank_that_meets_nobody_is_seldom_recalled(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    """Each time the event loop waits until a thread has stopped."""
    served = list[PersistentCalls]()

    def serve(real: Real, calls: PersistentCalls, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - as the real one's
        served.append(calls)
        real(calls, *args, **settings)

    async def reduces_what_is_new(trainer: TrainerClient) -> None:
        if trainer.rank == 0:
            await trainer.drop_input()
        assert (await trainer.reduce(ones(COUNT))).tolist() == [2.0] * COUNT

    faults.limit(repeats, "TRUST_S", 60.0)  # of a busy machine's time, in which no agent looks
    faults.limit(repeats, "MOST_IN_VAIN", 5)
    faults.around(PersistentCalls, "serve", serve)
    async with repeating(clock, in_python, 2) as (_, trainers):
        served.clear()
        for _ in range(200):
            await everywhere(trainers, reduces_what_is_new)
        assert len(served) < 40
        for _ in range(70):
            await everywhere(trainers, reduces)
        in_python.clear()
        for _ in range(70):
            await everywhere(trainers, reduces)
        assert in_python == []


# --- what all ranks get lies in one memory


def places_of_results(here: Village) -> set[int]:
    """Where the last result of each rank begins."""
    places = set[int]()
    for rank in ranks_of(here):
        rank.catch_up()
        places |= {address_of(result.memory) for result in rank.results.values()}
    return places


async def test_a_result_that_is_the_same_for_all_is_written_once(
    clock: MockClock, in_python: OpsInPython
) -> None:
    async with repeating(clock, in_python, 3) as (here, trainers):
        for _ in range(3):
            await everywhere(trainers, reduces)
            assert len(places_of_results(here)) == 1
        assert in_python == []


async def test_results_that_differ_lie_apart(clock: MockClock, in_python: OpsInPython) -> None:
    async def scatters(trainer: TrainerClient) -> None:
        part = await run(trainer, SCATTERED, np.arange(COUNT, dtype=np.float32), (10, 10, 10))
        begin = 10 * trainer.rank
        assert part.tolist() == [3.0 * i for i in range(begin, begin + 10)]

    async def does_both(trainer: TrainerClient) -> None:
        await scatters(trainer)
        assert (await reduces(trainer)).tolist() == [3.0] * COUNT

    async with repeating(clock, in_python, 3, does_both) as (here, trainers):
        for _ in range(5):  # each takes its memory at another time
            await everywhere(trainers, does_both)
        in_python.clear()
        for _ in range(3):
            await everywhere(trainers, does_both)
            assert len(places_of_results(here)) == 1
            await everywhere(trainers, scatters)
            assert len(places_of_results(here)) == 3
        assert in_python == []


async def test_what_a_rank_keeps_nobody_overwrites(
    clock: MockClock, in_python: OpsInPython
) -> None:
    """Each keeps other results, so now and then none of the memory is free for all."""
    kept = dict[tuple[TrainerId, int], float]()

    async def keeps_some(trainer: TrainerClient, value: int) -> None:
        before = set(trainer.lent)
        result = await trainer.run(SUM, np.full(COUNT, value, np.float32), borrows=True)
        assert result is not None
        for number in set(trainer.lent) - before:
            kept[trainer.id, number] = 2.0 * value
        for number in list(trainer.lent):
            found = np.frombuffer(trainer.maps[number], np.float32, COUNT)
            assert found.tolist() == [kept[trainer.id, number]] * COUNT
            if (value + number * (1 + trainer.rank)) % 3 == 0:
                trainer.lent.remove(number)
                await trainer.send(DropArena(number))

    async with repeating(clock, in_python, 2, partial(keeps_some, value=0)) as (_, trainers):
        for value in range(60):
            await everywhere(trainers, partial(keeps_some, value=value))
        assert 0 < len(in_python) < 120  # Python has done some, and the library others
