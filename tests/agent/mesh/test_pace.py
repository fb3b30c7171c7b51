"""How often agents send heartbeats."""

import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.mesh.membership import HEARTBEAT_S, QUIET_HEARTBEAT_S
from pmesh.core.links.bandwidth import STEADY_S
from tests.worlds.village import Village, village

COUNTED_S = 4.0


async def interval_s(here: Village) -> float:
    """Between two messages on the first link."""
    (live,) = here.machines[0].agent.peers.links.values()
    before = live.messages_received
    await trio.sleep(COUNTED_S)
    return COUNTED_S / (live.messages_received - before)


async def test_heartbeats_are_slower_while_no_job_runs_or_waits(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        quiet, busy = pytest.approx(QUIET_HEARTBEAT_S, rel=0.1), pytest.approx(HEARTBEAT_S, rel=0.1)
        await trio.sleep(2.0)
        assert await interval_s(here) == quiet
        waiting = await here.trainer(here.machines[0])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waiting.join, "words", 2)
            await trio.sleep(1.0)
            assert await interval_s(here) == busy
            other = await here.trainer(here.machines[1])
            await other.join("words", 2)
        await trio.sleep(2 * STEADY_S)  # the edge between them is probed
        assert await interval_s(here) == busy
        await waiting.leave()
        await other.leave()
        await trio.sleep(2.0)
        assert await interval_s(here) == quiet
