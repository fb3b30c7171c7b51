import errno
import itertools
import tracemalloc

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from pmesh.errors import ProtocolError, UsageError
from pmesh.net.sessions.arena_pools import (
    IDLE_S,
    MAX_ARENAS,
    MAX_INPUT_ARENAS,
    MAX_LENT,
    ArenaBudget,
    ArenaShare,
    Budget,
    InputArenas,
    OutputArenas,
    SessionArenas,
)
from pmesh.net.sessions.arenas import SMALLEST_BYTES
from tests.worlds.faults import Faults
from tests.worlds.kept import kept
from tests.worlds.lanes import share_of_one

MIB = 1024 * 1024


def output_arenas(limit_bytes: int = 64 * MIB) -> OutputArenas:
    return OutputArenas(itertools.count(), share_of_one(limit_bytes))


def input_arenas(limit_bytes: int = 64 * MIB) -> InputArenas:
    return InputArenas(itertools.count(), share_of_one(limit_bytes))


async def test_a_released_arena_serves_the_next_op_of_its_size() -> None:
    pool = output_arenas()
    first = await pool.acquire(100_000)
    second = await pool.acquire(100_000)
    assert second is not first
    pool.release(first)
    assert await pool.acquire(90_000) is first
    await pool.aclose()


async def test_what_a_trainer_may_still_read_is_not_written_by_its_next_op() -> None:
    pool = output_arenas()
    read = await pool.acquire(100_000)
    pool.deliver(read)
    pool.release(read)  # it is stable already
    written = await pool.acquire(100_000)
    assert written is not read
    pool.deliver(written)
    pool.release(written)
    assert await pool.acquire(100_000) is read
    await pool.aclose()


async def test_several_ranks_have_one_memory_each_as_an_arena_of_its_own() -> None:
    owner, other = output_arenas(), output_arenas()
    arena = await owner.acquire(100_000)
    await other.acquire(10)
    alias = other.adopt(arena)
    assert alias is not None
    arena.memory[:3] = b"sum"
    assert bytes(alias.memory[:3]) == b"sum"
    assert (alias.number, alias.nbytes, other.nbytes) == (1, arena.nbytes, 65536 + arena.nbytes)
    await owner.aclose()
    assert bytes(alias.memory[:3]) == b"sum"
    await other.aclose()
    with pytest.raises(ValueError, match="released"):
        alias.memory[0]


async def test_what_another_rank_may_still_read_is_not_written() -> None:
    owner, other = output_arenas(), output_arenas()
    arena = await owner.acquire(10)
    alias = other.adopt(arena)
    assert alias is not None
    other.deliver(alias)
    owner.release(arena)
    assert await owner.acquire(10) is not arena  # the other's op is not stable
    other.release(alias)
    for _ in range(2):  # the other's trainer may read it until its second call
        assert await owner.acquire(10) is not arena
        await other.acquire(10)
    assert await owner.acquire(10) is arena
    assert other.adopt(arena) is alias  # which the trainer has mapped
    await owner.aclose()
    await other.aclose()


async def test_what_another_rank_keeps_is_not_written_though_it_has_left() -> None:
    owner, other = output_arenas(), output_arenas()
    kept, dropped = await owner.acquire(10), await owner.acquire(10)
    aliases = [other.adopt(kept), other.adopt(dropped)]
    assert aliases[0] is not None
    assert aliases[1] is not None
    assert other.lend(aliases[0])
    for alias in aliases:
        assert alias is not None
        other.release(alias)
    for arena in (kept, dropped):
        owner.release(arena)
    await other.aclose()
    assert await owner.acquire(10) is dropped
    assert await owner.acquire(10) is not kept
    await owner.aclose()


async def test_nothing_is_written_through_an_alias() -> None:
    owner, other = output_arenas(), output_arenas()
    arena = await owner.acquire(10)
    alias = other.adopt(arena)
    assert alias is not None
    other.release(alias)
    assert await other.acquire(10) is not alias
    await owner.aclose()
    assert await other.acquire(10) is not alias
    await other.aclose()


async def test_an_alias_counts_as_the_memory_that_it_keeps() -> None:
    owner, other = output_arenas(), output_arenas(limit_bytes=4 * MIB)
    arenas = [await owner.acquire(3 * MIB) for _ in range(2)]
    alias = other.adopt(arenas[0])
    assert alias is not None
    assert other.adopt(arenas[1]) is None
    other.release(alias)
    assert other.adopt(arenas[1]) is None
    await other.acquire(2 * MIB)  # for which the free alias makes way
    assert other.take_gone() == (alias.number,)
    for many in [await owner.acquire(10) for _ in range(MAX_ARENAS - 2)]:
        assert other.adopt(many) or other.nbytes > 4 * MIB - SMALLEST_BYTES
    await owner.aclose()
    await other.aclose()


async def test_aliases_that_rest_make_way_for_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    owner, other = output_arenas(), output_arenas()
    first, second = [await owner.acquire(10) for _ in range(2)]
    old, own = other.adopt(first), await other.acquire(10)
    assert old is not None
    other.release(old)
    autojump_clock.jump(IDLE_S)
    other.release(own)
    assert other.adopt(second) is not None
    assert await other.acquire(10) is own
    assert other.take_gone() == (old.number,)
    await owner.aclose()
    await other.aclose()


async def test_the_smallest_that_fits_is_taken() -> None:
    pool = output_arenas()
    large, small = await pool.acquire(3 * SMALLEST_BYTES), await pool.acquire(2 * SMALLEST_BYTES)
    await pool.acquire(SMALLEST_BYTES)
    pool.release(large)
    pool.release(small)
    assert await pool.acquire(2 * SMALLEST_BYTES) is small
    await pool.aclose()


async def test_one_more_than_four_times_too_large_stays_free_for_larger_ops() -> None:
    pool = output_arenas()
    large = await pool.acquire(5 * SMALLEST_BYTES)
    pool.release(large)
    assert await pool.acquire(10) is not large
    assert await pool.acquire(4 * SMALLEST_BYTES) is large
    await pool.aclose()


async def test_idle_arenas_go_when_a_new_one_is_made(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pool = output_arenas()
    old = await pool.acquire(10)
    pool.release(old)
    autojump_clock.jump(IDLE_S / 2)
    recent = await pool.acquire(5 * SMALLEST_BYTES)
    pool.release(recent)
    autojump_clock.jump(IDLE_S / 2)
    assert pool.take_gone() == ()
    await pool.acquire(MIB * 4)
    assert pool.take_gone() == (old.number,)
    assert pool.take_gone() == ()
    assert await pool.acquire(5 * SMALLEST_BYTES) is recent
    await pool.aclose()


async def test_free_arenas_give_way_before_the_limit_refuses_an_op() -> None:
    pool = output_arenas(limit_bytes=4 * MIB)
    first = await pool.acquire(3 * MIB)
    with pytest.raises(UsageError, match="hold 3 MiB, 4 MiB are allowed"):
        await pool.acquire(2 * MIB)
    pool.release(first)
    second = await pool.acquire(4 * MIB)
    assert pool.nbytes == second.nbytes == 4 * MIB
    await pool.aclose()
    assert pool.nbytes == 0


async def test_a_trainer_cannot_use_up_the_descriptors() -> None:
    arenas = input_arenas()
    for _ in range(MAX_INPUT_ARENAS):  # two for the residuals of each bucket, and the values
        await arenas.create(1)
    with pytest.raises(UsageError):
        await arenas.create(1)
    await arenas.aclose()
    pool = output_arenas()
    for _ in range(MAX_ARENAS):
        await pool.acquire(1)
    with pytest.raises(UsageError, match="has 64 output arenas"):
        await pool.acquire(1)
    await pool.aclose()


async def test_a_claim_of_a_terabyte_is_refused_before_any_memory_is_touched() -> None:
    arenas = SessionArenas(share_of_one(2**32))
    with pytest.raises(UsageError, match="smaller arrays"):
        await arenas.inputs.create(2**50)
    assert arenas.inputs.nbytes == 0
    await arenas.aclose()


async def test_numbers_are_unique_across_both_kinds() -> None:
    arenas = SessionArenas(share_of_one(MIB))
    numbers = [
        (await arenas.inputs.create(1)).number,
        (await arenas.outputs.acquire(1)).number,
        (await arenas.inputs.create(1)).number,
    ]
    assert len(set(numbers)) == 3
    await arenas.aclose()


async def test_closing_completes_though_cancelled() -> None:
    pool = output_arenas()
    arena = await pool.acquire(2 * MIB)
    with trio.CancelScope() as scope:
        scope.cancel()
        await pool.aclose()
    with pytest.raises(ValueError, match="released"):
        arena.memory[0]


async def test_an_op_holds_an_input_that_the_trainer_has_dropped() -> None:
    arenas = input_arenas()
    arena = await arenas.create(10)
    assert arenas.hold(arena.number, 10) is arena
    arenas.drop(arena.number)
    assert await arenas.create(10) is not arena
    arenas.release(arena)
    assert await arenas.create(10) is arena
    await arenas.aclose()


async def test_the_trainer_keeps_an_input_whose_op_has_ended() -> None:
    arenas = input_arenas()
    arena = await arenas.create(10)
    arenas.hold(arena.number, 10)
    arenas.release(arena)
    assert await arenas.create(10) is not arena
    assert arenas.hold(arena.number, 10) is arena
    await arenas.aclose()


async def test_an_input_that_the_trainer_does_not_have_is_refused() -> None:
    arenas = input_arenas()
    arena = await arenas.create(10)
    with pytest.raises(ProtocolError, match="no arena 99"):
        arenas.hold(99, 0)
    for nbytes, offset in ((arena.nbytes + 1, 0), (8, arena.nbytes - 7), (8, -1), (0, 2**70)):
        with pytest.raises(ProtocolError, match="in an arena of"):
            arenas.hold(arena.number, nbytes, offset=offset)
    arenas.drop(arena.number)
    for use in (arenas.drop, lambda number: arenas.hold(number, 0)):
        with pytest.raises(ProtocolError):
            use(arena.number)
    await arenas.aclose()


async def test_what_is_lent_serves_no_other_op_until_it_comes_back() -> None:
    arenas = output_arenas()
    arena, last = await arenas.acquire(10), await arenas.acquire(10)
    assert arenas.lend(arena)
    arenas.release(arena)  # it is stable
    assert await arenas.acquire(10) not in {arena, last}
    assert arena.number in arenas
    arenas.drop(arena.number)
    assert await arenas.acquire(10) is arena
    with pytest.raises(ProtocolError):
        arenas.drop(arena.number)
    await arenas.aclose()


async def test_who_waits_for_room_does_not_wait_for_what_is_lent() -> None:
    arenas = output_arenas(limit_bytes=4 * MIB)
    lent, given = await arenas.acquire(MIB), await arenas.acquire(2 * MIB)
    assert arenas.lend(lent)
    arenas.give(given)
    arenas.release(given)
    with trio.move_on_after(1) as waiting:
        await arenas.acquire_in_turn(3 * MIB)
    assert waiting.cancelled_caught  # what was given will be dropped soon
    arenas.drop(given.number)
    await arenas.acquire_in_turn(3 * MIB)
    with pytest.raises(UsageError, match="no shared memory"):
        await arenas.acquire_in_turn(MIB)


async def test_what_others_may_still_fetch_stays_though_the_trainer_has_dropped_it() -> None:
    arenas = output_arenas()
    arena = await arenas.acquire(10)
    assert arenas.lend(arena)
    arenas.drop(arena.number)
    await arenas.acquire(10)
    assert await arenas.acquire(10) is not arena
    arenas.release(arena)
    assert await arenas.acquire(10) is arena
    await arenas.aclose()


async def test_a_trainer_that_keeps_all_results_leaves_arenas_for_ops() -> None:
    arenas = output_arenas()
    lent = [arenas.lend(await arenas.acquire(1)) for _ in range(MAX_ARENAS)]
    assert lent == [True] * MAX_LENT + [False] * (MAX_ARENAS - MAX_LENT)
    await arenas.aclose()
    arenas = output_arenas(limit_bytes=8 * MIB)
    assert [arenas.lend(await arenas.acquire(3 * MIB)) for _ in range(2)] == [True, False]
    await arenas.aclose()


async def test_the_trainer_drops_an_arena_of_either_kind() -> None:
    arenas = SessionArenas(share_of_one(64 * MIB))
    given, lent = await arenas.inputs.create(1), await arenas.outputs.acquire(1)
    assert arenas.outputs.lend(lent)
    for arena in (given, lent):
        arenas.drop(arena.number)
        with pytest.raises(ProtocolError, match="holds no arena"):
            arenas.drop(arena.number)
    await arenas.aclose()


# --- what all programs have together


async def test_a_program_has_half_of_what_the_others_leave_over_all_its_sessions() -> None:
    budget = ArenaBudget(files=1000, nbytes=24 * MIB)
    one, again = (SessionArenas(ArenaShare(budget, 1)) for _ in range(2))
    other = SessionArenas(ArenaShare(budget, 2))
    await one.inputs.create(8 * MIB)
    await again.outputs.acquire(4 * MIB)
    with pytest.raises(UsageError, match="hold 12 MiB, 12 MiB are allowed"):
        await again.inputs.create(MIB)
    await other.inputs.create(6 * MIB)
    with pytest.raises(UsageError, match="half of what other programs leave of 24 MiB"):
        await other.inputs.create(MIB)
    await one.aclose()
    await again.aclose()
    await other.outputs.acquire(6 * MIB)
    await other.aclose()
    assert (budget.memory.held, budget.files.held) == (0, 0)


async def test_descriptors_of_all_sessions_together_are_bounded_and_named() -> None:
    budget = ArenaBudget(files=8, nbytes=2**40)
    everyone = [SessionArenas(ArenaShare(budget, pid)) for pid in range(20)]
    refusals = list[str]()
    for arenas in everyone:
        for _ in range(10):
            try:
                await arenas.inputs.create(1)
            except UsageError as e:
                refusals.append(str(e))
    assert budget.files.held == 8
    assert refusals[0].startswith("no file descriptor for another arena: this program has 4, 4 ")
    assert "ulimit -n" in refusals[0]
    for arenas in everyone:
        await arenas.aclose()
    assert budget.files.held == 0


async def test_what_rests_in_another_program_makes_way(
    autojump_clock: trio.testing.MockClock,
) -> None:
    budget = ArenaBudget(files=1000, nbytes=24 * MIB)
    one, other = (SessionArenas(ArenaShare(budget, pid)) for pid in (1, 2))
    resting = await one.outputs.acquire(12 * MIB)
    one.outputs.release(resting)
    with pytest.raises(UsageError):
        await other.outputs.acquire(12 * MIB)
    autojump_clock.jump(IDLE_S)
    await other.outputs.acquire(12 * MIB)
    assert one.outputs.take_gone() == (resting.number,)
    await one.aclose()
    await other.aclose()


async def test_memory_that_is_being_made_counts_already(faults: Faults) -> None:
    budget = ArenaBudget(files=1000, nbytes=16 * MIB)
    arenas = SessionArenas(ArenaShare(budget, 1))
    made, go_on = trio.Event(), trio.Event()

    async def slow(*_: object) -> None:
        made.set()
        await go_on.wait()
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    async def ask() -> None:
        with pytest.raises(OSError, match="Cannot allocate"):
            await arenas.inputs.create(8 * MIB)

    async with trio.open_nursery() as nursery:
        with faults.instead(trio.to_thread, "run_sync", slow):
            nursery.start_soon(ask)
            await made.wait()
        with pytest.raises(UsageError):
            await arenas.inputs.create(MIB)
        go_on.set()
    assert (budget.memory.held, budget.files.held) == (0, 0)
    await arenas.inputs.create(8 * MIB)
    await arenas.aclose()


def test_one_alone_has_half_and_each_of_many_an_equal_part_of_one_more() -> None:
    for count in range(1, 10):
        budget = Budget[int](limit=5040)
        while sum(budget.take(holder, 1) for holder in range(count)):
            pass
        assert {budget.held_by(holder) for holder in range(count)} <= {
            5040 // (count + 1),
            5040 // (count + 1) + (5040 % (count + 1) > 0),
        }


def test_who_comes_late_has_something_whatever_the_others_have_taken() -> None:
    budget = Budget[int](limit=100)
    assert [
        budget.allowed(holder) * budget.take(holder, budget.allowed(holder)) for holder in range(9)
    ] == [
        50,
        25,
        12,
        6,
        3,
        2,
        1,
        1,
        0,
    ]


@given(
    limit=st.integers(0, 50),
    asked=st.lists(st.tuples(st.integers(0, 3), st.integers(-10, 10))),
)
def test_never_more_is_held_than_there_is(limit: int, asked: list[tuple[int, int]]) -> None:
    budget, held = Budget[int](limit=limit), dict.fromkeys(range(4), 0)
    for holder, amount in asked:
        if amount < 0:
            returned = min(-amount, held[holder])
            budget.give_back(holder, returned)
            held[holder] -= returned
        elif budget.take(holder, amount):
            held[holder] += amount
        assert budget.held == sum(held.values()) <= limit
        assert all(budget.held_by(holder) == held[holder] for holder in held)


def test_nothing_is_remembered_of_who_holds_nothing() -> None:
    budget = Budget[int](limit=10)
    for holder in range(1000):
        assert budget.take(holder, 5)
        budget.give_back(holder, 5)
    assert not any(kept(budget).values())


async def test_a_session_keeps_nothing_of_the_inputs_that_it_has_had() -> None:
    arenas = SessionArenas(share_of_one(64 * MIB))

    async def rest(times: int) -> None:
        for _ in range(times):
            arena = await arenas.inputs.create(100_000)
            await arenas.inputs.rest()
            arenas.drop(arena.number)

    async def grown(times: int) -> int:
        before = tracemalloc.get_traced_memory()[0]
        await rest(times)
        return tracemalloc.get_traced_memory()[0] - before

    await rest(10)
    tracemalloc.start()
    try:
        await rest(10)
        # The least of some: other threads of this process take memory, too.
        least = min([await grown(1000) for _ in range(3)])
    finally:
        tracemalloc.stop()
    assert least < 1000 * 8  # not even a reference to each
    await arenas.aclose()


async def test_where_no_thread_can_be_started_large_arenas_come_and_go_all_the_same(
    faults: Faults,
) -> None:
    faults.fail(trio.to_thread, "run_sync", RuntimeError("can't start new thread"))
    pool = output_arenas()
    arena = await pool.acquire(2 * MIB)
    arena.memory[-1] = 1
    await pool.aclose()
    with pytest.raises(ValueError, match="released"):
        arena.memory[-1]
