"""Jobs whose calls the native library answers."""

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.core.ops.reductions import Values
from pmesh.core.values import Terms
from pmesh.core.wire.calls import Call
from tests.worlds.trainer import ANY, TrainerClient, together
from tests.worlds.village import Village, village
from tests.worlds.village_ops import ones, reduce_all

COUNT = 30
SUM = Call("all_reduce", "float32", (COUNT,), "sum")
AnyCall = Callable[[TrainerClient], Awaitable[object]]
APART = pytest.mark.parametrize("in_python", ["apart"], indirect=True)
"""For tests of what is only there among machines."""


class OpsInPython(list[int]):
    """The numbers of the ops that an agent's Python runs."""

    where = "apart"
    """Where the ranks of `repeating` are: "apart", each at an agent of its own; "together", at one;
    or "mixed", all but the last at one."""

    @property
    def together(self) -> bool:
        """Whether all are at one agent."""
        return self.where == "together"

    @property
    def before(self) -> int:
        """How many ops `repeating` has run: at one agent, rank 0 may be the last to make room."""
        return 3 if self.where == "apart" else 4


@asynccontextmanager
async def repeating(
    clock: MockClock,
    in_python: OpsInPython,
    count: int,
    make: AnyCall | None = None,
    *,
    terms: Terms = ANY,
) -> AsyncGenerator[tuple[Village, list[TrainerClient]]]:
    """So many ranks, somewhere: their next call needs no interpreter.

    No time passes for agents then: heartbeats, which recall the library, would come at once.
    """
    of_agents = {"apart": [1] * count, "together": [count], "mixed": [count - 1, 1]}
    each = of_agents[in_python.where]
    async with village(clock, len(each)) as here:
        machines = [m for m, ranks in zip(here.machines, each, strict=True) for _ in range(ranks)]
        trainers = await here.job(*machines, terms=terms)
        await repeat(clock, trainers, make or reduces, count=in_python.before - 1)
        in_python.clear()
        yield here, trainers


async def repeat(
    clock: MockClock, trainers: list[TrainerClient], make: AnyCall, *, count: int = 2
) -> None:
    """Make a call until the library may answer the next one; no time passes from then on."""
    clock.autojump_threshold = 0
    for _ in range(count):
        await everywhere(trainers, make)
        await trio.sleep(0.5)  # the agents have looked at their clocks (V8)
    clock.autojump_threshold = math.inf
    await wait_all_tasks_blocked(0.005)
    await everywhere(trainers, make)  # heartbeats have recalled the library


async def is_repeated(
    clock: MockClock, in_python: OpsInPython, trainers: list[TrainerClient]
) -> None:
    """The library answers again, with the right results."""
    await repeat(clock, trainers, reduces, count=in_python.before - 1)
    in_python.clear()
    for value in range(3):
        for result in await reduce_all(trainers, value * ones(COUNT)):
            assert result.tolist() == [value * len(trainers)] * COUNT
    assert in_python == []


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
