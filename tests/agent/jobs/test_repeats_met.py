"""Where ranks of one agent do not meet in the native library, it costs little."""

from typing import Any

import pytest
from trio.testing import MockClock

from pmesh.agent.jobs import repeats
from pmesh.net.lanes.persistent import PersistentCalls
from tests.agent.jobs.repeating import COUNT, OpsInPython, everywhere, reduces, repeating
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import TrainerClient
from tests.worlds.village_ops import ones, reduce_all

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


async def test_what_all_ranks_write_has_a_bound(
    clock: MockClock, in_python: OpsInPython, faults: Faults
) -> None:
    """A larger result is written once, for all of them."""
    faults.limit(repeats, "MOST_BYTES_HERE", 2 * 4 * COUNT)
    async with repeating(clock, in_python, 2) as (_, trainers):
        await everywhere(trainers, reduces)
        assert in_python == []
        for _ in range(5):
            await reduce_all(trainers, ones(COUNT + 1))
        assert len(in_python) == 10
