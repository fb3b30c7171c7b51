"""What else goes on while the native library answers calls does no harm to them."""

from trio.testing import MockClock

from pmesh.core.wire.session import WantArena
from tests.agent.jobs.repeating import COUNT, repeating
from tests.worlds.village_ops import ones, reduce_all


async def test_a_call_is_learnt_as_itself_though_others_have_come_since(
    clock: MockClock, in_python: list[int]
) -> None:
    async with repeating(clock, in_python, 2) as (_, trainers):
        await reduce_all(trainers, ones(7))  # for the first time
        await reduce_all(trainers, ones(COUNT))  # by the library
        await trainers[0].ask(WantArena(100))  # after which Python serves one of them
        for _ in range(3):
            results = await reduce_all(trainers, ones(7))
            assert [r.tolist() for r in results] == [[2.0] * 7] * 2
