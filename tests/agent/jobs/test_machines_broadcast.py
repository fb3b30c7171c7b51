"""Broadcasts among ranks of several agents, of which some have several: one copy for each agent."""

import itertools
import math
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from msgspec import structs
from trio.testing import MockClock

from pmesh.agent.jobs import op_task
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.jobs.regions import Op
from pmesh.agent.jobs.together import SHARED_BYTES, Meetings
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.ids import OpNumber
from pmesh.net.lanes.folding import SourceFold
from pmesh.net.sessions.arenas import Arena
from tests.agent.jobs.machines import KILLED, hold_at_network, machine_at, placed
from tests.agent.jobs.parts import ATTEMPT, part_of, result_of
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import OpError, TrainerClient, together, until
from tests.worlds.village import Village, village
from tests.worlds.village_ops import machine_of, ones, ranks_of, reduce_all, swallow

LARGE = SHARED_BYTES // 4  # values
PLACEMENTS = ["aaab", "abbb", "aabc", "abbc"]


async def broadcast_to(
    trainers: list[TrainerClient], values: Values, root: int, receivers: tuple[int, ...] = ()
) -> list[Values]:
    return await together(*[partial(t.broadcast, values, root, receivers) for t in trainers])


def memory_of(rank: LocalRank) -> Arena | None:
    """In which its last result is."""
    arena = [*rank.results.values()][-1].arena
    return arena and (arena.of or arena)


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_all_get_what_the_root_of_any_machine_gives(clock: MockClock, placement: str) -> None:
    async with village(clock, len(set(placement))) as here:
        trainers = await placed(here, placement)
        for root in range(4):
            for count in (0, 3, LARGE, 3 * LARGE):
                values = np.arange(count, dtype=np.float32) + root
                call = Call("broadcast", "float32", (count,), root=root)
                calls = [
                    partial(t.run, call, values if count and t.rank == root else None, count=count)
                    for t in trainers
                ]
                results = [x for x in await together(*calls) if x is not None]
                assert len(results) == (3 if count else 0)
                assert {x.tobytes() for x in results} <= {values.tobytes()}


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_a_large_result_is_in_one_memory_of_a_machine(
    clock: MockClock, faults: Faults, placement: str
) -> None:
    faults.skip(LocalRank, "stabilize")
    async with village(clock, len(set(placement))) as here:
        trainers = await placed(here, placement)
        for root in range(4):
            await broadcast_to(trainers, ones(LARGE), root)
            for at in set(placement):
                mine = [r for i, r in enumerate(ranks_of(here)) if placement[i] == at and i != root]
                assert len({memory_of(rank) for rank in mine}) == bool(mine)


@pytest.mark.parametrize(
    ("placement", "root", "to"),
    [
        ("aaab", 1, ([3], [0, 1, 3])),  # 0 sends to the other machine what 1 has
        ("aaab", 1, ([2], [1, 2])),
        ("aaab", 3, ([2], [0, 2, 3])),
        ("aabc", 1, ([1], [1])),
        ("aabc", 0, ([1], [0, 1])),
        ("aabc", 1, ([3], [0, 1, 2, 3])),
        ("abbc", 2, ([2, 3], [1, 2, 3])),
        ("abbc", 3, ([0], [0, 3])),
        ("aabb", 1, ([3], [0, 1, 2, 3])),
        ("abbc", 1, ([3, 2], [1, 2, 3])),
    ],
)
async def test_who_holds_it_are_receivers_and_those_who_pass_it_on(
    clock: MockClock,
    faults: Faults,
    placement: str,
    root: int,
    to: tuple[list[int], list[int]],
) -> None:
    receivers, reached = to
    faults.skip(LocalRank, "stabilize")
    async with village(clock, len(set(placement))) as here:
        trainers = await placed(here, placement)
        for count in (9, LARGE):
            values = np.arange(1, count + 1, dtype=np.float32)
            got = await broadcast_to(trainers, values, root, tuple(receivers))
            has = [i for i, result in enumerate(got) if result.tobytes() == values.tobytes()]
            reports = [[*rank.ledger.ops.values()][-1] for rank in ranks_of(here)]
            assert [i for i, report in enumerate(reports) if report.holds] == has == reached
            assert all(report.completed for report in reports)


def sent_by(here: Village) -> list[int]:
    """How many bytes each machine has sent, in the order of their letters."""
    letters = "abc"[: len(here.machines)]
    return [machine_at(here, letter).agent.jobs.traffic[0] for letter in letters]


@pytest.mark.parametrize("placement", ["ab", "aabb", "aaab", "abc", "aabc", "aabbcc"])
async def test_a_broadcast_goes_once_to_each_other_machine(
    clock: MockClock, placement: str
) -> None:
    nbytes, machines = 4 * LARGE, len(set(placement))
    async with village(clock, machines) as here:
        trainers = await placed(here, placement)
        clock.autojump_threshold = math.inf  # it doesn't see that the library's threads work
        for root, of_root in enumerate(placement):
            before = sent_by(here)
            await broadcast_to(trainers, ones(nbytes // 4), root)
            after = sent_by(here)
            sent = [now - earlier for now, earlier in zip(after, before, strict=True)]
            last = ("abc".index(of_root) - 1) % machines  # of the ring that begins at the root
            assert sent.pop(last) < nbytes // 100
            assert all(nbytes <= count < 1.01 * nbytes for count in sent)


@pytest.mark.parametrize("root", range(4))
async def test_the_root_waits_for_nobody(clock: MockClock, root: int) -> None:
    async with village(clock, 2) as here:
        trainers = await placed(here, "aabb")
        for value in range(3):
            await trainers[root].broadcast(np.full(9, value, np.float32), root)
        late = [trainer for trainer in trainers if trainer.rank != root]
        for value in range(3):
            results = await broadcast_to(late, ones(9), root)
            assert [result[0] for result in results] == [value] * 3
        assert [x[0] for x in await reduce_all(trainers)] == [4.0] * 4


@pytest.mark.parametrize("odd", range(4))
@pytest.mark.parametrize("root", [0, 1])
async def test_broadcasts_that_differ_fail_at_all(clock: MockClock, odd: int, root: int) -> None:
    """O8: also where the root, and whoever has taken its values, have gone on."""
    async with village(clock, 2) as here:
        trainers = await placed(here, "aabb")
        calls = [
            partial(error_of, t, t.broadcast(ones(9 + (t.rank == odd)), root)) for t in trainers
        ]
        assert await together(*calls) == ["OpMismatch"] * 4


async def error_of(trainer: TrainerClient, call: Awaitable[object]) -> str:
    """The error of a call, or of the barrier after it."""
    try:
        await call
        await trainer.barrier()
    except OpError as e:
        return e.verdict.error
    return ""


async def test_machines_with_roots_of_their_own_are_noticed(clock: MockClock) -> None:
    """O8: nobody waits for the other machine, in this op or the next."""
    async with village(clock, 2) as here:
        trainers = await placed(here, "aabb")
        calls = [
            partial(error_of, t, t.broadcast(ones(9), 1 if t.rank < 2 else 3)) for t in trainers
        ]
        assert await together(*calls) == ["OpMismatch"] * 4


@pytest.mark.parametrize("count", [9, LARGE])
@pytest.mark.parametrize("root", [0, 1, 3])
@pytest.mark.parametrize("who", [*itertools.product([0, 1], KILLED)])
async def test_who_dies_in_a_broadcast_leaves_the_others_its_values_or_one_error(
    clock: MockClock, faults: Faults, who: tuple[int, str], root: int, count: int
) -> None:
    """O2, O3: the first ranks of both machines have come to the network, or come there no more."""
    at_network, (at, dies) = hold_at_network(faults), who
    async with village(clock, 2) as here:
        trainers = await placed(here, "aaabbb")
        mine = trainers[3 * at : 3 * at + 3]
        one = KILLED.index(dies)
        lost = mine if dies == "the agent" else [mine[one]]
        left = [trainer for trainer in trainers if trainer not in lost]
        values = np.arange(count, dtype=np.float32)

        async def lose() -> None:
            await until(lambda: len(at_network) == 2)
            if dies == "the agent":
                await machine_of(here, mine[0]).kill()
            else:
                await lost[0].die()

        results, errors = list[bytes](), list[str]()

        async def survive(trainer: TrainerClient) -> None:
            try:
                results.append((await trainer.broadcast(values, root)).tobytes())
                await trainer.barrier()
            except OpError as e:
                errors.append(e.verdict.error)

        calls = [partial(swallow, trainer.broadcast(values, root)) for trainer in lost]
        await together(lose, *calls, *[partial(survive, trainer) for trainer in left])
        assert set(results) <= {values.tobytes()}
        if trainers[root] in lost and not results:
            assert errors == ["RankLost"] * len(left)
        else:
            assert not errors
            assert len(results) == len(left)
        assert [x[0] for x in await reduce_all(left)] == [len(left)] * len(left)


@pytest.mark.parametrize("seed", range(12))
async def test_whoever_is_killed_at_any_moment_leaves_the_others_the_same_broadcasts(
    clock: MockClock, seed: int
) -> None:
    """O2, O3: of each op, all have the root's values, or all learn that the root is lost."""
    random = Random(seed)  # noqa: S311 - no secret
    placement = random.choice(["aabb", "aaab", "abbb", "aabc", "abbc", "aabbcc"])
    count, moments = random.choice([9, LARGE]), random.randrange(random.choice([60, 600]))
    async with village(clock, len(set(placement))) as here:
        trainers = await placed(here, placement)
        victim, alone = random.randrange(len(trainers)), random.random() < 0.75
        lost = [
            trainer
            for i, trainer in enumerate(trainers)
            if i == victim or (not alone and placement[i] == placement[victim])
        ]
        left = [trainer for trainer in trainers if trainer not in lost]
        roots = random.choices([trainer.id for trainer in trainers], k=5)
        ended: dict[TrainerClient, list[bytes | str]] = {trainer: [] for trainer in trainers}

        async def train(trainer: TrainerClient) -> None:
            for op, root in enumerate(roots):
                if root not in trainer.world.trainers:
                    ended[trainer].append("no root")
                    continue
                values = np.full(count, op, np.float32)
                try:
                    got = await trainer.broadcast(values, trainer.world.trainers.index(root))
                    ended[trainer].append(got.tobytes())
                except OpError as e:
                    ended[trainer].append(e.verdict.error)

        async def lose() -> None:
            for _ in range(moments):
                await trio.lowlevel.checkpoint()
            at = machine_at(here, placement[victim])
            await (trainers[victim].die() if alone else at.kill())

        calls = [partial(swallow, train(trainer)) for trainer in lost]
        await together(lose, *calls, *[partial(train, trainer) for trainer in left])
        for op, result in enumerate(ended[left[0]]):
            right = {np.full(count, op, np.float32).tobytes(), "RankLost", "no root"}
            assert result in right
            assert {ended[trainer][op] for trainer in left} == {result}
        assert [x[0] for x in await reduce_all(left)] == [len(left)] * len(left)


@pytest.mark.parametrize(("root", "count"), [(0, 9), (1, 9), (1, LARGE), (2, 9), (3, LARGE)])
async def test_what_a_root_has_given_stays_if_it_dies_before_the_others_come(
    clock: MockClock, root: int, count: int
) -> None:
    """O2: its agent still has the values."""
    async with village(clock, 2) as here:
        trainers = await placed(here, "aabb")
        lost = trainers.pop(root)
        await lost.broadcast(np.full(count, 5, np.float32), root)
        await lost.die()
        results = await broadcast_to(trainers, ones(count), root)
        assert all((result == 5).all() for result in results)
        assert [x[0] for x in await reduce_all(trainers)] == [3.0] * 3


async def test_an_attempt_that_has_ended_sends_no_values(clock: MockClock, faults: Faults) -> None:
    """V3: also if it ends just as the first rank has taken them from the root."""
    attempts, sent = list[trio.CancelScope](), list[OpNumber]()

    def begin(real: Real, rank: LocalRank, *deadline: float) -> trio.CancelScope:
        scope: trio.CancelScope = real(rank, *deadline)
        if rank.rank == 0:
            attempts.append(scope)
        return scope

    async def take(real: Real, rank: LocalRank, op: Op, *args: Any) -> None:  # noqa: ANN401 - as it is
        await real(rank, op, *args)
        if rank.rank == 0 and op.number == 1:
            attempts[-1].cancel()

    async def run(real: Real, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - as it is
        sent.append(args[3].op)
        await real(*args, **settings)

    faults.around(LocalRank, "attempt", begin)
    faults.around(op_task, "_take_result", take)
    faults.around(op_task, "run_plan", run)
    async with village(clock, 2) as here:
        trainers = await placed(here, "aabb")
        for value in range(2):
            results = await broadcast_to(trainers, np.full(9, value, np.float32), 1)
            assert [result[0] for result in results] == [value] * 4
        assert sent.count(OpNumber(1)) == 1  # of who receives


async def test_what_the_first_rank_receives_is_progress_of_all() -> None:
    """V6: the others wait for it."""
    meetings, receives = Meetings(), trio.Event()
    part = replace(part_of(1, result_of(36)), source=memoryview(b""))
    call = Call("broadcast", "float32", (9,), root=3)
    part = replace(part, request=structs.replace(part.request, call=call), folds=None)

    async def run(source: memoryview, fold: SourceFold | None) -> None:
        assert not source
        assert fold is None
        await receives.wait()

    async with trio.open_nursery() as nursery:
        first = partial(meetings.relay, ATTEMPT, 0, 2, part, run=run, traffic=lambda: 7)
        nursery.start_soon(first)
        await trio.testing.wait_all_tasks_blocked()
        assert meetings.taken(ATTEMPT) == 7
        with trio.move_on_after(1):  # it stops nobody
            await meetings.relay(ATTEMPT, 1, 2, part, run=run, traffic=lambda: 0)
        receives.set()
        assert await meetings.relay(ATTEMPT, 1, 2, part, run=run, traffic=lambda: 0) is part.result


async def test_who_comes_after_another_kind_was_withdrawn_meets_the_next_ones() -> None:
    meetings, part = Meetings(), part_of(1, result_of(36))
    call = Call("broadcast", "float32", (9,), root=1)
    other = replace(part, root=1, request=structs.replace(part.request, call=call))
    with trio.move_on_after(0.01):
        await meetings.take_part(ATTEMPT, 0, 2, other)

    async def run(source: memoryview, fold: SourceFold | None) -> None:
        assert fold is not None
        await fold.finish()
        assert np.frombuffer(source[:36], np.float32).tolist() == [2.0] * 9

    async with trio.open_nursery() as nursery:
        for place in range(2):
            own = replace(part, result=result_of(36))
            take = partial(meetings.relay, ATTEMPT, place, 2, own, run=run, traffic=lambda: 0)
            nursery.start_soon(take)


async def test_a_receiver_that_claims_more_than_there_is_has_memory_of_its_own(
    clock: MockClock,
) -> None:
    """A trainer has lied: what is kept for it must be as large as it says."""
    async with village(clock, 2) as here:
        *honest, liar = await placed(here, "aabb")
        call = Call("broadcast", "float32", (LARGE,), root=0)
        lie = partial(liar.run, call, None, count=2 * LARGE)
        *_, result = await together(*[partial(t.broadcast, ones(LARGE)) for t in honest], lie)
        assert result is not None
        assert (result[:LARGE] == 1).all()
        assert result.size == 2 * LARGE
