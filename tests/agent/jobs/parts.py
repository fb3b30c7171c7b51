"""What ranks of one agent bring to an op, made by hand."""

import numpy as np

from pmesh.agent.jobs.ranks import KeptResult
from pmesh.agent.jobs.together import Attempt, RankPart
from pmesh.core.ops.machines import plan_fold
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import StartOp
from pmesh.ids import Epoch, Incarnation, JobName, NodeId, OpNumber
from pmesh.net.sessions.arenas import create_arena

ATTEMPT = Attempt(JobName("digits"), Epoch(1, NodeId(b"n" * 32), Incarnation(1)), 0, OpNumber(0))


def result_of(nbytes: int) -> KeptResult:
    return KeptResult(arena=create_arena("output", 0, nbytes), nbytes=nbytes)


def part_of(value: float, result: KeptResult) -> RankPart:
    source = np.full(9, value, np.float32)
    call = Call("all_reduce", "float32", (9,), "sum")
    return RankPart(
        request=StartOp(OpNumber(0), call, "float32", 9, 0, 1.0),
        source=source.view(np.uint8).data,
        result=result,
        root=0,
        gets=True,
        describe=lambda: "a rank",
        folds=plan_fold(36, 2),
    )
