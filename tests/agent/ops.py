"""Calls that several trainers make together."""

from functools import partial

import numpy as np

from pmesh.agent.ranks import LocalRank
from pmesh.core.reductions import Values
from pmesh.core.views import Terms, Verdict
from tests.agent.fake_trainer import Trainer, together, until
from tests.agent.fakes import Village

RAISE = Terms(on_loss="raise")


def ones(count: int) -> Values:
    return np.ones(count, np.float32)


async def verdicts_of_all(*calls: "tuple[Trainer, object]") -> list[Verdict]:
    async def one(trainer: Trainer, call: object) -> Verdict:
        return await trainer.verdict_of(call)  # type: ignore[arg-type] # a coroutine

    return await together(*[lambda t=t, c=c: one(t, c) for t, c in calls])


def ranks_of(here: Village) -> list[LocalRank]:
    """The ranks of all machines, by their numbers."""
    ranks = [rank for machine in here.machines for rank in machine.agent.jobs.ranks]
    return sorted(ranks, key=lambda rank: rank.id)


async def enter(here: Village, newcomers: list[Trainer], inside: list[Trainer]) -> list[list[int]]:
    """A sync in which the newcomers enter: those inside call it when they have heard of them."""

    async def sync_when_they_are_here(trainer: Trainer) -> list[int]:
        jobs = [machine.agent.jobs for machine in here.machines]
        here_too = [j for j in jobs if any(rank.rank is not None for rank in j.ranks)]
        await until(lambda: all(j.newcomers(j.ranks[0]) == len(newcomers) for j in here_too))
        return await trainer.sync(trainer.id)

    calls = [partial(sync_when_they_are_here, trainer) for trainer in inside]
    return await together(*calls, *[partial(t.sync, 100 + i) for i, t in enumerate(newcomers)])


async def reduce_all(trainers: list[Trainer], values: "Values | None" = None) -> list[Values]:
    x = ones(1000) if values is None else values
    return await together(*[partial(t.reduce, x) for t in trainers])
