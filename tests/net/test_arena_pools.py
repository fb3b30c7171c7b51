import itertools

import pytest
import trio
import trio.testing

from pmesh.errors import ProtocolError, UsageError
from pmesh.net.arena_pools import (
    IDLE_S,
    MAX_ARENAS,
    MAX_INPUT_ARENAS,
    InputArenas,
    OutputPool,
    SessionArenas,
)
from pmesh.net.arenas import SMALLEST_BYTES

MIB = 1024 * 1024


def output_pool(limit_bytes: int = 64 * MIB) -> OutputPool:
    return OutputPool(itertools.count(), limit_bytes=limit_bytes)


def input_arenas(limit_bytes: int = 64 * MIB) -> InputArenas:
    return InputArenas(itertools.count(), limit_bytes=limit_bytes)


async def test_a_released_arena_serves_the_next_op_of_its_size() -> None:
    pool = output_pool()
    first = await pool.acquire(100_000)
    second = await pool.acquire(100_000)
    assert second is not first
    pool.release(first)
    assert await pool.acquire(90_000) is first
    await pool.aclose()


async def test_what_a_trainer_may_still_read_is_not_written_by_its_next_op() -> None:
    pool = output_pool()
    read = await pool.acquire(100_000)
    pool.release(read)  # it is stable already
    written = await pool.acquire(100_000)
    assert written is not read
    pool.release(written)
    assert await pool.acquire(100_000) is read
    await pool.aclose()


async def test_the_smallest_that_fits_is_taken() -> None:
    pool = output_pool()
    large, small = await pool.acquire(3 * SMALLEST_BYTES), await pool.acquire(2 * SMALLEST_BYTES)
    await pool.acquire(SMALLEST_BYTES)
    pool.release(large)
    pool.release(small)
    assert await pool.acquire(2 * SMALLEST_BYTES) is small
    await pool.aclose()


async def test_one_more_than_four_times_too_large_stays_free_for_larger_ops() -> None:
    pool = output_pool()
    large = await pool.acquire(5 * SMALLEST_BYTES)
    pool.release(large)
    assert await pool.acquire(10) is not large
    assert await pool.acquire(4 * SMALLEST_BYTES) is large
    await pool.aclose()


async def test_idle_arenas_go_when_a_new_one_is_made(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pool = output_pool()
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
    pool = output_pool(limit_bytes=4 * MIB)
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
    pool = output_pool()
    for _ in range(MAX_ARENAS):
        await pool.acquire(1)
    with pytest.raises(UsageError):
        await pool.acquire(1)
    await pool.aclose()


async def test_a_claim_of_a_terabyte_is_refused_before_any_memory_is_touched() -> None:
    arenas = SessionArenas()
    with pytest.raises(UsageError, match="smaller arrays"):
        await arenas.inputs.create(2**50)
    assert arenas.inputs.nbytes == 0
    await arenas.aclose()


async def test_numbers_are_unique_across_both_kinds() -> None:
    arenas = SessionArenas(limit_bytes=MIB)
    numbers = [
        (await arenas.inputs.create(1)).number,
        (await arenas.outputs.acquire(1)).number,
        (await arenas.inputs.create(1)).number,
    ]
    assert len(set(numbers)) == 3
    await arenas.aclose()


async def test_closing_completes_though_cancelled() -> None:
    pool = output_pool()
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
    with pytest.raises(ProtocolError, match="no input arena 99"):
        arenas.hold(99, 0)
    with pytest.raises(ProtocolError, match="in an arena of"):
        arenas.hold(arena.number, arena.nbytes + 1)
    arenas.drop(arena.number)
    for use in (arenas.drop, lambda number: arenas.hold(number, 0)):
        with pytest.raises(ProtocolError):
            use(arena.number)
    await arenas.aclose()
