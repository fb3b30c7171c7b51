"""I5 and O5: a failure that is told late, and the world that the trainer sees with it."""

from typing import cast

import pytest

from pmesh.agent.jobs.op_task import run_op
from pmesh.agent.jobs.surroundings import Surroundings
from pmesh.core.values import OpOutcome
from pmesh.core.wire.local import OpFailed, StartOp
from pmesh.ids import OpNumber
from tests.agent.jobs.test_ranks import BARRIER, FAILED, ME, NOTHING, ONE, OTHER, ZERO, rank_of


@pytest.mark.parametrize(("ended", "world"), [([ZERO], (ME,)), ([ZERO, ONE], None)])
async def test_the_world_of_a_failure_is_told_only_if_no_later_op_has_ended_here(
    ended: list[OpNumber], world: tuple[object, ...] | None
) -> None:
    async with rank_of() as (rank, _):
        for op in ended:
            rank.start(op, BARRIER)
            rank.complete(op, NOTHING, (ME, OTHER))
        rank.owed = OpOutcome(ZERO, (ME,), verdict=FAILED)
        request = StartOp(OpNumber(len(ended)), BARRIER, "float32", 0, -1, 1.0)
        # Nothing around it is asked: the call has not begun.
        reply, _arena = await run_op(rank, request, cast("Surroundings", None))
        assert isinstance(reply, OpFailed)
        assert (reply.verdict, reply.consumed) == (FAILED, False)
        assert (reply.world and reply.world.trainers) == world
