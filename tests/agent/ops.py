"""Calls that several trainers make together."""

from functools import partial

import numpy as np

from pmesh.core.reductions import Values
from pmesh.core.views import Verdict
from tests.agent.fake_trainer import Trainer, together


def ones(count: int) -> Values:
    return np.ones(count, np.float32)


async def verdicts_of_all(*calls: "tuple[Trainer, object]") -> list[Verdict]:
    async def one(trainer: Trainer, call: object) -> Verdict:
        return await trainer.verdict_of(call)  # type: ignore[arg-type] # a coroutine

    return await together(*[lambda t=t, c=c: one(t, c) for t, c in calls])


async def reduce_all(trainers: list[Trainer], values: "Values | None" = None) -> list[Values]:
    x = ones(1000) if values is None else values
    return await together(*[partial(t.reduce, x) for t in trainers])
