"""O4: messages of many records, which the native library sends and receives, in real time."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.core.ops.plan import RankPlan
from pmesh.errors import LaneBroken
from pmesh.net.lanes import native
from pmesh.net.lanes.executor import run_plan
from pmesh.net.lanes.lane import Lane
from pmesh.p2p.agent import endpoint
from tests.p2p.p2p import some
from tests.worlds.faults import Faults, Real

LARGE = np.random.default_rng(1).random(2_000_000)


@pytest.fixture
def clock() -> MockClock:
    """Jumps until `follow_the_time`: it does not see that threads have something to do."""
    return MockClock(autojump_threshold=0)


@pytest.fixture
def runs(faults: Faults) -> list[RankPlan]:
    """The plans that the library runs."""
    seen = list[RankPlan]()

    def run(real: Real, library: Any, plan: RankPlan, *rest: Any, **values: Any) -> Any:  # noqa: ANN401
        seen.append(plan)
        return real(library, plan, *rest, **values)

    faults.around(native, "run", run)
    return seen


def follow_the_time(clock: MockClock) -> None:
    clock.autojump_threshold, clock.rate = math.inf, 1.0


async def test_the_library_sends_and_receives_what_did_not_come_with_its_announcement(
    clock: MockClock, runs: list[RankPlan]
) -> None:
    async with some(clock) as ranks:
        follow_the_time(clock)
        await ranks.deliver(LARGE)
        assert sorted(len(plan.sends) for plan in runs) == [0, 1]
        await ranks.check_that_nothing_is_left()
        assert len(runs) == 2


@pytest.mark.parametrize("at_sender", [True, False])
@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_lane_that_is_given_up_in_the_middle_is_replaced_and_the_message_comes_whole(
    clock: MockClock,
    runs: list[RankPlan],
    faults: Faults,
    at_sender: bool,  # noqa: FBT001 - parameters
    cancelled: bool,  # noqa: FBT001
) -> None:
    over = trio.Event()

    async def run_or_not(plan: RankPlan, *lanes: Any, **regions: Any) -> None:  # noqa: ANN401
        if over.is_set() or bool(plan.sends) != at_sender:
            if at_sender:
                await over.wait()  # else all might have arrived
            await run_plan(plan, *lanes, **regions)
            return
        (lane,) = (lanes[0] or lanes[1]).values()
        async with trio.open_nursery() as nursery:
            cancel = nursery.cancel_scope.cancel
            nursery.start_soon(once_it_moves, lane, cancel if cancelled else lane.close)
            with contextlib.suppress(LaneBroken):
                await run_plan(plan, *lanes, **regions)
        over.set()
        raise lane.broken("was given up")

    faults.instead(endpoint, "run_plan", run_or_not)
    async with some(clock) as ranks:
        follow_the_time(clock)
        await ranks.deliver(LARGE)
        assert over.is_set()
        assert len(runs) == 4
        await ranks.check_that_nothing_is_left()


async def once_it_moves(lane: Lane, give_up: Callable[[], None]) -> None:
    while lane.bytes_sent + lane.bytes_received < 100_000:  # more than its greeting
        await trio.lowlevel.checkpoint()
    give_up()
