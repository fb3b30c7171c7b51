"""V3 and V8: behind a fence nothing is sent of a new op, and nothing is delivered."""

import trio
from trio.testing import MockClock

from tests.worlds.village import village
from tests.worlds.village_ops import reduce_all


async def test_an_op_that_is_called_behind_a_fence_sends_nothing(clock: MockClock) -> None:
    """The flush answer has not named it."""
    async with village(clock, 2) as here:
        trainers = await here.job(*here.machines)
        await reduce_all(trainers)
        (rank,) = here.machines[0].agent.jobs.ranks
        before = rank.lanes.traffic[0]
        rank.fence("own stall")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reduce_all, trainers)
            await trio.sleep(1)
            assert rank.ledger.started > rank.ledger.ended  # it has been called
            assert rank.lanes.traffic[0] == before
            rank.lift("own stall")
        assert rank.lanes.traffic[0] > before


async def test_a_rank_that_begins_while_its_agent_doubts_delivers_nothing(clock: MockClock) -> None:
    """A commit that came while it slept is read after it has woken."""
    async with village(clock, 1) as here:
        (machine,) = here.machines
        await trio.sleep(3)  # until it begins jobs without having found anybody
        machine.agent.jobs.doubt()
        trainers = await here.job(machine)
        with trio.move_on_after(2) as waiting:
            await reduce_all(trainers)
        assert waiting.cancelled_caught
        (rank,) = machine.agent.jobs.ranks
        assert rank.ledger.ended < rank.ledger.started
        machine.agent.jobs.trust()
        await trio.sleep(1)
        assert rank.ledger.ended == rank.ledger.started
