"""Calls that a trainer repeats, answered by a thread of the native library."""

import ctypes
import gc
import itertools
import socket
from contextlib import suppress

import psutil
import pytest
import trio

from pmesh import native
from pmesh.core.wire.framing import frame
from pmesh.core.wire.session import DropArena, encode
from pmesh.errors import LaneBroken
from pmesh.native.layout import (
    LOGGED_OPS,
    MESSAGE_PARTS,
    MOST_CALLS,
    MOST_SLOTS,
    OWN_SLOTS,
    CallStruct,
    EndedOpStruct,
    MessageStruct,
    PersistentStruct,
    SlotStruct,
)
from pmesh.net.lanes import persistent
from pmesh.net.lanes.lane import CallsDiffer
from pmesh.net.lanes.persistent import (
    NO_LIMIT,
    PersistentCalls,
)
from tests.net.lanes.persistent_ranks import (
    ARENA_BYTES,
    BIG,
    COUNT,
    DROP,
    Rank,
    answered,
    asked,
    request,
    two_ranks,
)
from tests.worlds.faults import Faults
from tests.worlds.lanes import is_closed, native_threads


@pytest.fixture(autouse=True)
def _others_may_be_late(faults: Faults) -> None:
    """A busy machine is no late rank."""
    faults.limit(persistent, "MOST_WAIT_S", 30.0)


# --- what is answered


async def test_requests_are_answered_until_the_thread_is_recalled() -> None:
    with two_ranks() as ranks, trio.fail_after(30):
        for rank in ranks:
            rank.calls.serve(3)
            assert rank.calls.serves
        for number in range(3, 13):
            await answered(ranks, number)
        for rank in ranks:
            rank.calls.recall()
            assert not rank.calls.serves
            peer = 1 - rank.rank
            assert rank.lanes.receiving[peer, rank.rank].peer_completed == 11  # O2
            ended = rank.calls.take_ended()
            assert [op.number for op in ended] == list(range(3, 13))
            assert all(op.call == 0 and 0 < op.began_s <= op.ended_s for op in ended)
            assert rank.calls.take_ended() == []
            assert rank.calls.begun is None
            assert rank.calls.take_unread() == b""
            assert not rank.calls.trainer_is_stuck


@pytest.mark.parametrize("first", [126, 254, 65_534, 2**32 - 2, 2**62])
async def test_numbers_of_all_lengths_are_read_and_written(first: int) -> None:
    with two_ranks(COUNT, 0) as ranks, trio.fail_after(30):
        for rank in ranks:
            rank.calls.serve(first)
        for number in range(first, first + 4):
            await answered(ranks, number, count=COUNT if number % 2 else 0)


async def test_values_lie_where_a_request_says() -> None:
    with two_ranks(moves=True) as ranks, trio.fail_after(30):
        for rank in ranks:
            rank.calls.serve(0)
        offsets = (4, 124, 128, 252, 256, 65_532, 65_536, ARENA_BYTES - 4 * COUNT)
        for number, offset in enumerate(offsets):
            for rank in ranks:
                rank.fill(number, offset=offset)
                rank.ask(request(number, offset=offset))
            for rank in ranks:
                assert rank.values((await rank.reply()).arena) == [2 * number + 1] * COUNT


@pytest.mark.parametrize("offset", [2, ARENA_BYTES - 4 * COUNT + 4, ARENA_BYTES, 2**48])
async def test_values_that_lie_nowhere_are_left_to_python(offset: int) -> None:
    with two_ranks(moves=True) as (rank, _), trio.fail_after(30):
        rank.calls.serve(0)
        rank.ask(request(0, offset=offset))
        assert await rank.left() == request(0, offset=offset)
        assert rank.calls.begun is None


async def test_several_calls_are_told_apart() -> None:
    counts = [COUNT, 0, *range(1, MOST_CALLS - 1)]
    with two_ranks(*counts) as ranks, trio.fail_after(30):
        for rank in ranks:
            assert len(rank.calls) == MOST_CALLS
            rank.calls.serve(7)
        order = [*counts, *counts[::-1], COUNT, COUNT, 0, 0]
        for number, count in enumerate(order, 7):
            await answered(ranks, number, count=count)
        for rank in ranks:
            rank.calls.recall()
            assert [counts[op.call] for op in rank.calls.take_ended()] == order
            rank.calls.clear()
            assert not len(rank.calls)


async def test_requests_may_come_in_pieces_and_several_at_once() -> None:
    with two_ranks() as ranks, trio.fail_after(30):
        for rank in ranks:
            rank.fill(1)
            rank.calls.serve(3)
            for byte in request(3) + request(4)[:5]:
                rank.ask(bytes([byte]))
            rank.ask(request(4)[5:] + request(5))
        for number in (3, 4, 5):
            for rank in ranks:
                assert (await rank.reply()).op == number


async def test_a_large_op_is_answered_by_more_threads() -> None:
    with two_ranks(BIG) as ranks, trio.fail_after(60):
        for rank in ranks:
            rank.make_room(BIG)
            rank.calls.serve(0)
        for number in range(3):
            await answered(ranks, number, count=BIG)


# --- what is left to Python


async def test_the_first_op_that_is_not_served_stays() -> None:
    with two_ranks() as ranks, trio.fail_after(30):
        for rank in ranks:
            rank.calls.serve(3, limit=5)
        for number in (3, 4):
            await answered(ranks, number)
        for rank in ranks:
            rank.ask(request(5))
            assert await rank.left() == request(5)
            rank.calls.serve(5, limit=NO_LIMIT)
            rank.ask(request(5))
        for rank in ranks:
            assert (await rank.reply()).op == 5


async def test_a_machine_that_may_have_slept_begins_nothing() -> None:
    """V8."""
    with two_ranks() as ranks, trio.fail_after(30):
        for rank in ranks:
            rank.calls.serve(3)
        await answered(ranks, 3)
        ranks[0].calls.vouch(0)
        ranks[0].ask(request(4))
        assert await ranks[0].left() == request(4)
        assert ranks[0].calls.begun is None


@pytest.mark.parametrize(
    "other",
    [
        request(2),
        request(4),
        request(3, count=COUNT + 1),
        request(3, offset=4),
        frame(encode(DropArena(10))),
        frame(b"\xff" * 10),
        frame(encode(asked(3)) + b"\0"),
        frame(encode(asked(3)).replace(b"\xa2op\x03", b"\xa2op\xcc\x03")),
        frame(encode(asked(3)).replace(b"\xa2op\x03", b"\xa2op\xd0\x03")),
        frame(encode(asked(3)).replace(b"\xa2op\x03", b"\xa2op\xff")),
        b"\0" * 4,
        b"\xff" * 5000,
    ],
)
async def test_what_is_no_next_request_is_left_as_it_came(other: bytes) -> None:
    with two_ranks() as (rank, _), trio.fail_after(30):
        rank.calls.serve(3)
        with suppress(BlockingIOError):
            rank.ask(other + request(3))
        left = await rank.left()
        assert left == (other + request(3))[: len(left)]
        assert len(left) >= min(len(other), 4096)
        assert rank.calls.take_ended() == []
        assert rank.calls.begun is None


async def test_what_has_come_of_a_request_is_pythons_once_it_is_recalled() -> None:
    with two_ranks() as (rank, _):
        rank.calls.serve(3)
        rank.ask(request(3)[:-1])
        await trio.lowlevel.checkpoint()
        rank.calls.recall()
        unread = rank.calls.take_unread()
        with suppress(BlockingIOError):  # it was recalled before it has read anything
            unread += rank.session.recv(4096)
        assert unread == request(3)[:-1]
        assert rank.calls.take_unread() == b""


async def test_a_trainer_that_is_gone_is_pythons() -> None:
    with two_ranks() as (rank, _), trio.fail_after(30):
        rank.calls.serve(3)
        rank.trainer.close()
        assert await rank.left() == b""
        assert not rank.calls.trainer_is_stuck


async def test_a_trainer_that_does_not_read_is_stuck() -> None:
    with two_ranks() as (a, b), trio.fail_after(30):
        for rank in (a, b):
            rank.calls.serve(3)
        with suppress(BlockingIOError):
            while True:
                a.session.send(bytes(1000))
        for rank in (a, b):
            rank.ask(request(3))
        assert (await b.reply()).op == 3
        assert await a.left() == b""
        assert a.calls.trainer_is_stuck
        assert [op.number for op in a.calls.take_ended()] == [3]


# --- ops that have begun


async def begins(rank: Rank, number: int) -> None:
    """Let the other rank be late; the thread has begun the op, and is recalled."""
    sent = rank.lanes.bytes_sent(rank.rank)
    rank.fill(1)
    rank.ask(request(number))
    while rank.lanes.bytes_sent(rank.rank) == sent:
        await trio.lowlevel.checkpoint()
    rank.calls.recall()
    assert rank.calls.take_unread() == request(number)
    assert rank.calls.begun is not None
    assert (rank.calls.begun.number, rank.calls.begun.call) == (number, 0)


async def test_an_op_that_has_begun_goes_on() -> None:
    with two_ranks() as (a, b), trio.fail_after(30):
        for rank in (a, b):
            rank.calls.serve(3)
        await answered((a, b), 3)
        b.calls.recall()
        b.fill(1)
        await begins(a, 4)
        begun, a.calls.begun = a.calls.begun, None
        assert begun is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(begun.threads.finish)
            assert await b.goes_on(4) == [3.0] * COUNT
        assert a.values(a.results[begun.result].number) == [3.0] * COUNT
        for rank in (a, b):  # and the lanes are whole
            rank.calls.serve(5)
        await answered((a, b), 5)
        assert [op.number for op in a.calls.take_ended()] == [3, 5]


@pytest.mark.parametrize("count", [COUNT, BIG])
async def test_an_op_that_waits_too_long_for_other_ranks_is_left_to_python(
    faults: Faults, count: int
) -> None:
    faults.limit(persistent, "MOST_WAIT_S", 0.001)
    with two_ranks(count) as (a, b), trio.fail_after(30):
        for rank in (a, b):
            rank.make_room(count)
        a.calls.serve(3)
        a.fill(1, count=count)
        a.ask(request(3, count=count))
        assert await a.left() == request(3, count=count)
        begun, a.calls.begun = a.calls.begun, None
        assert begun is not None
        b.fill(1, count=count)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(begun.threads.finish)
            assert await b.goes_on(3, count=count) == [3.0] * count
        assert a.values(a.results[begun.result].number, count) == [3.0] * count


async def test_an_op_that_is_abandoned_leaves_its_lanes_whole() -> None:
    """V4."""
    with two_ranks() as (a, b), trio.fail_after(30):
        a.calls.serve(3)
        await begins(a, 3)
        begun, a.calls.begun = a.calls.begun, None
        assert begun is not None
        begun.threads.abandon()
        b.fill(1)
        results = list[list[float]]()

        async def run(rank: Rank) -> None:
            results.append(await rank.goes_on(3, roster=2))

        async with trio.open_nursery() as nursery:
            for rank in (a, b):
                nursery.start_soon(run, rank)
        assert results == [[3.0] * COUNT] * 2


async def test_an_op_that_has_begun_ends_with_its_calls() -> None:
    with two_ranks() as (a, _), trio.fail_after(30):
        a.calls.serve(3)
        await begins(a, 3)


async def test_a_machine_that_may_have_slept_ends_nothing() -> None:
    """V8: the trainer gets no result before somebody has looked."""
    with two_ranks() as (a, b), trio.fail_after(30):
        for rank in (a, b):
            rank.calls.serve(3)
            rank.fill(1)
        a.ask(request(3))
        while not a.lanes.bytes_sent(0):
            await trio.lowlevel.checkpoint()
        a.calls.vouch(0)
        b.ask(request(3))
        assert (await b.reply()).op == 3
        assert await a.left() == request(3)
        begun, a.calls.begun = a.calls.begun, None
        assert begun is not None
        await begun.threads.finish()
        assert a.values(a.results[begun.result].number) == [3.0] * COUNT


async def test_a_rank_that_calls_something_else_is_found() -> None:
    with two_ranks() as (a, b), trio.fail_after(30):
        a.calls.serve(3)
        a.ask(request(3))

        async def other() -> None:
            with pytest.raises(CallsDiffer):
                await b.goes_on(3, mark=8)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            assert await a.left() == request(3)
            begun, a.calls.begun = a.calls.begun, None
            assert begun is not None
            with pytest.raises(CallsDiffer):
                await begun.threads.finish()


# --- lanes that are closed


async def test_a_lane_that_is_closed_recalls_the_thread() -> None:
    with two_ranks() as (a, b), trio.fail_after(30):
        for rank in (a, b):
            rank.calls.serve(3)
        await answered((a, b), 3)
        lane = a.lanes.sending[0, 1]
        lane.close()
        assert not a.calls.serves
        assert is_closed(lane)
        with pytest.raises(LaneBroken):
            a.calls.serve(4)
        assert not a.calls.serves


async def test_a_lane_that_is_closed_ends_the_op_that_has_begun() -> None:
    with two_ranks() as (a, _), trio.fail_after(30):
        a.calls.serve(3)
        await begins(a, 3)
        begun, a.calls.begun = a.calls.begun, None
        assert begun is not None
        async with trio.open_nursery() as nursery:

            async def fails() -> None:
                with pytest.raises(LaneBroken, match="was closed"):
                    await begun.threads.finish()

            nursery.start_soon(fails)
            await trio.testing.wait_all_tasks_blocked()
            a.lanes.receiving[1, 0].close()
        assert is_closed(a.lanes.receiving[1, 0])


async def test_a_lane_that_breaks_is_found_by_who_goes_on() -> None:
    with two_ranks() as (a, b), trio.fail_after(30):
        a.calls.serve(3)
        b.lanes.sending[1, 0].close()
        a.ask(request(3))
        assert await a.left() == request(3)
        begun, a.calls.begun = a.calls.begun, None
        assert begun is not None
        with pytest.raises(LaneBroken, match="ended"):
            await begun.threads.finish()


# --- memory of results


async def test_a_result_stays_until_the_op_after_the_next_one() -> None:
    with two_ranks() as ranks, trio.fail_after(30):
        for rank in ranks:
            rank.calls.serve(0)
        arenas = [[r.arena for r in await answered(ranks, number)] for number in range(10)]
        for (one, _), (other, _) in itertools.pairwise(arenas):
            assert one != other
        assert len({one for one, _ in arenas}) == 2


async def test_what_others_may_ask_for_is_not_written_by_the_next_op() -> None:
    with two_ranks() as ranks, trio.fail_after(30):
        for rank in ranks:
            rank.calls.serve(0, kept=[10, 12])
        arenas = [(await answered(ranks, number))[0].arena for number in range(4)]
        assert arenas[0] == 11
        assert arenas[1] != 11


@pytest.mark.parametrize("may_lend", [False, True])
async def test_only_what_may_be_lent_is(*, may_lend: bool) -> None:
    with two_ranks(slots=MOST_SLOTS, lends=True) as ranks, trio.fail_after(30):
        for rank in ranks:
            rank.calls.serve(0, may_lend=may_lend)
        for number in range(MOST_SLOTS - OWN_SLOTS):
            for reply in await answered(ranks, number):
                assert reply.lent == may_lend
        a, b = ranks
        a.calls.recall()
        assert len(a.calls.lent) == 2 * may_lend
        b.ask(request(2))
        if may_lend:
            assert await b.left() == request(2)


async def test_what_is_dropped_is_lent_again() -> None:
    with two_ranks(slots=MOST_SLOTS, lends=True) as ranks, trio.fail_after(30):
        for rank in ranks:
            rank.calls.serve(0, lent=[13], may_lend=True)
        for number in range(10):
            for rank, reply in zip(ranks, await answered(ranks, number), strict=True):
                assert reply.lent
                assert reply.arena != 13
                for byte in frame(encode(DropArena(reply.arena))):
                    rank.ask(bytes([byte]))
        for rank in ranks:
            rank.ask(frame(encode(DropArena(13))), frame(encode(DropArena(13))))
            assert await rank.left() == frame(encode(DropArena(13)))
            assert rank.calls.lent == []


async def test_what_the_trainer_holds_is_not_written() -> None:
    with two_ranks() as ranks, trio.fail_after(30):
        for rank in ranks:
            rank.calls.serve(0, lent=[10, 11])
        assert [reply.arena for reply in await answered(ranks, 0)] == [12, 12]
        ranks[0].ask(request(1))
        assert await ranks[0].left() == request(1)


async def test_without_memory_for_a_result_python_answers() -> None:
    with two_ranks() as (rank, _), trio.fail_after(30):
        rank.calls.serve(0, lent=[10, 11, 12])
        rank.ask(request(0))
        assert await rank.left() == request(0)


# --- what the system lacks


@pytest.mark.parametrize(
    ("call", "error"), [("pmesh_server_new", OSError), ("pmesh_runner_new", LaneBroken)]
)
def test_without_room_for_pipes_or_threads_there_is_none(
    faults: Faults, call: str, error: type[Exception]
) -> None:
    library = native.library()
    assert library is not None
    session, trainer = socket.socketpair()
    with session, trainer:
        before = psutil.Process().num_fds()
        faults.instead(library, call, lambda *_: None)
        with pytest.raises(error):
            PersistentCalls(library, session.fileno(), DROP)
        assert psutil.Process().num_fds() == before


async def test_when_it_is_closed_no_thread_and_no_pipe_is_left() -> None:
    await trio.lowlevel.checkpoint()
    gc.collect()  # what earlier tests have left
    before = native_threads(), psutil.Process().num_fds()
    with two_ranks():
        assert native_threads() == before[0] + 2
    gc.collect()  # views of the memory
    assert (native_threads(), psutil.Process().num_fds()) == before


def test_the_structs_are_those_of_the_library() -> None:
    library = native.library()
    assert library is not None
    kinds = [MessageStruct, CallStruct, SlotStruct, EndedOpStruct, PersistentStruct]
    known = [
        *map(ctypes.sizeof, kinds),
        *[getattr(PersistentStruct, name).offset for name in ("runner", "log", "unread")],
        *(MOST_CALLS, MOST_SLOTS, OWN_SLOTS, LOGGED_OPS, MESSAGE_PARTS),
    ]
    assert library.pmesh_persistent_layout()[: len(known)] == known
