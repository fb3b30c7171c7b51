"""Jobs whose calls the native library answers."""

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.core.ops.reductions import Values
from pmesh.core.values import Terms
from pmesh.core.wire.calls import Call
from tests.worlds.trainer import ANY, TrainerClient, together
from tests.worlds.village import Village, village
from tests.worlds.village_ops import ones

COUNT = 30
SUM = Call("all_reduce", "float32", (COUNT,), "sum")
AnyCall = Callable[[TrainerClient], Awaitable[object]]


@asynccontextmanager
async def repeating(
    clock: MockClock,
    in_python: list[int],
    count: int,
    make: AnyCall | None = None,
    *,
    terms: Terms = ANY,
) -> AsyncGenerator[tuple[Village, list[TrainerClient]]]:
    """So many machines with a rank each, whose next call of the same kind the library answers.

    No time passes for agents then: heartbeats, which recall the library, would come at once.
    """
    async with village(clock, count) as here:
        trainers = await here.job(*here.machines, terms=terms)
        await repeat(clock, trainers, make or reduces)
        in_python.clear()
        yield here, trainers


async def repeat(clock: MockClock, trainers: list[TrainerClient], make: AnyCall) -> None:
    """Make a call until the library may answer the next one; no time passes from then on."""
    clock.autojump_threshold = 0
    for _ in range(2):
        await everywhere(trainers, make)
        await trio.sleep(0.5)  # the agents have looked at their clocks (V8)
    clock.autojump_threshold = math.inf
    await wait_all_tasks_blocked(0.005)
    await everywhere(trainers, make)  # heartbeats have recalled the library


@contextmanager
def time_passes(clock: MockClock) -> Iterator[None]:
    """Meanwhile the agents do what they do by themselves."""
    clock.autojump_threshold = 0
    try:
        yield
    finally:
        clock.autojump_threshold = math.inf


async def reduces(trainer: TrainerClient) -> Values:
    return await trainer.reduce(ones(COUNT))


async def everywhere(trainers: list[TrainerClient], make: AnyCall) -> list[object]:
    return await together(*[partial(make, t) for t in trainers])
