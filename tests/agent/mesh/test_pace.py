"""How often agents send heartbeats."""

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.mesh.membership import HEARTBEAT_S, REST_HEARTBEAT_S, RESTS_AFTER_S
from pmesh.core.links.bandwidth import STEADY_S
from tests.worlds.trainer import together
from tests.worlds.village import Village, training, village

COUNTED_S = 4.0
VALUES = np.ones(5000, np.float32)
QUIET, BUSY = pytest.approx(REST_HEARTBEAT_S, rel=0.1), pytest.approx(HEARTBEAT_S, rel=0.1)


async def interval_s(here: Village) -> float:
    """Between two messages on the first link."""
    (live,) = here.machines[0].agent.peers.links.values()
    before = live.messages_received
    await trio.sleep(COUNTED_S)
    return COUNTED_S / (live.messages_received - before)


async def test_heartbeats_are_slower_while_no_job_runs_or_waits(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        await trio.sleep(2.0)
        assert await interval_s(here) == QUIET
        waiting = await here.trainer(here.machines[0])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waiting.join, "words", 2)
            await trio.sleep(1.0)
            assert await interval_s(here) == BUSY
            other = await here.trainer(here.machines[1])
            await other.join("words", 2)
        assert await interval_s(here) == BUSY
        await trio.sleep(2 * STEADY_S)  # the edge between them is probed
        await waiting.leave()
        await other.leave()
        await trio.sleep(2.0)
        assert await interval_s(here) == QUIET


async def test_heartbeats_are_slower_while_a_job_moves_nothing(clock: MockClock) -> None:
    async with training(clock, 2) as (here, (early, late)):
        for _ in range(2):
            await trio.sleep(2 * RESTS_AFTER_S)
            assert await interval_s(here) == QUIET
            await together(lambda: early.reduce(VALUES), lambda: late.reduce(VALUES))
            await trio.sleep(REST_HEARTBEAT_S)
            assert await interval_s(here) == BUSY


async def test_so_they_are_while_a_rank_waits_for_a_slow_one(clock: MockClock) -> None:
    async with training(clock, 2) as (here, (early, late)), trio.open_nursery() as nursery:
        nursery.start_soon(early.reduce, VALUES)
        await trio.sleep(2 * RESTS_AFTER_S)
        assert await interval_s(here) == QUIET
        await late.reduce(VALUES)
        await trio.sleep(REST_HEARTBEAT_S)
        assert await interval_s(here) == BUSY
