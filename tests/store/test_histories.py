"""What ranks see of a store while real agents lose each other, against an executable model."""

import itertools
from random import Random

import pytest
import trio
from trio.testing import MockClock

from pmesh.core.values import Terms
from pmesh.store.wire import Add, Answer, Append, Check, Command, CompareSet, Get, Keys, Set
from tests.worlds.linearizable import ObservedCall, is_linearizable
from tests.worlds.store_connection import RanksWithStores, StoreConnection, sharing
from tests.worlds.trainer import until
from tests.worlds.village_ops import cut, ranks_of

MAJORITY = Terms(quorum="majority")
COMMANDS: list[Command] = [
    Set("a", b"1"),
    Set("b", b"2"),
    Add("a", 1),
    Append("b", b"3"),
    CompareSet("a", b"1", b"5"),
    CompareSet("b", b"2", b""),
    Get("a"),
    Get("b"),
    Check(("a", "b")),
    Keys(""),
]


class CallHistory:
    """All calls that ranks have made, in the order of one clock."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)  # noqa: S311 - it decides what happens
        self.calls: list[ObservedCall] = []
        self._clock = itertools.count()

    async def call(self, store: StoreConnection, command: Command) -> bool:
        """Whether there was an answer."""
        seen = ObservedCall(command, next(self._clock))
        self.calls.append(seen)
        number = await store.begin(command, timeout_s=3.0)
        await until(lambda: number in store.answers)
        answer = store.answers.pop(number)
        if isinstance(answer, Answer):
            seen.ended, seen.answer = next(self._clock), answer
        return seen.answer is not None

    async def make_calls(self, store: StoreConnection, count: int) -> None:
        """One after the other, at times of their own."""
        for _ in range(count):
            await trio.sleep(self.random.random())
            await self.call(store, self.random.choice(COMMANDS))


async def cut_off_and_back(there: RanksWithStores, rank: int, *, for_s: float) -> None:
    """The machine of a rank is apart from the others for a while."""
    one = there.machine_of(rank)
    others = [machine for machine in there.here.machines if machine is not one]
    async with cut(one, *others):
        await trio.sleep(for_s)
    await there.here.settle(*there.here.machines)


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 8)),
    ],
)
async def test_with_a_majority_all_calls_on_all_sides_are_as_on_one_machine(
    clock: MockClock, seed: int
) -> None:
    history = CallHistory(seed)
    async with sharing(clock, 4, terms=MAJORITY) as there:
        async with trio.open_nursery() as nursery:
            for store in there.stores:
                nursery.start_soon(history.make_calls, store, 14)
            await trio.sleep(1)
            await cut_off_and_back(there, seed % 4, for_s=2.0)
            await cut_off_and_back(there, (seed + 1 + seed // 4) % 4, for_s=1.0)
        left = ranks_of(there.here)
        assert len(left) == 2, left  # each cut has cost the rank that was cut off, and no other
        # They go on, if perhaps not at the first call; simulated time passes while a thread of a
        # busy machine works.
        with trio.fail_after(300):
            while [await history.call(store, Keys("")) for store in there.stores].count(True) < 2:
                pass
    assert sum(call.answer is not None for call in history.calls) > 20
    assert is_linearizable(history.calls)
