"""The native library and Python run plans alike: results, bytes on the wire, errors."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import psutil
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from pmesh import native
from pmesh.core.ops.moving import plan_all_to_all, plan_broadcast
from pmesh.core.ops.reduce_scatter import plan_reduce_scatter
from pmesh.core.ops.reducing import plan_direct, plan_ring, plan_tree
from pmesh.core.wire.records import OVERHEAD_BYTES, RecordHeader, Sealer
from pmesh.errors import LaneBroken, PmeshError
from pmesh.net.lanes.executor import begin_plan, run_in_python, run_plan
from pmesh.net.lanes.lane import CallsDiffer, Lane
from pmesh.net.lanes.native import MOST_RUNNERS, LibraryThreads, Patience
from tests.worlds.lanes import (
    OpOfAllRanks,
    Web,
    bytes_on_the_wire,
    inputs_of,
    offer_between,
    raw_receiving_lane,
    web,
)

NOTHING = np.empty(0, np.uint8)
COUNTS = st.sampled_from([0, 1, 1000, 40_000, 300_001])
REDUCING = {"ring": plan_ring, "tree": plan_tree, "direct": plan_direct}


def test_the_library_is_here() -> None:
    """Else this module would compare Python with itself."""
    assert native.library() is not None, native.why_missing()


# --- among ranks with the library and ranks without it


@st.composite
def collectives(draw: st.DrawFn) -> OpOfAllRanks:
    """By some ranks with the library, and by some without it."""
    size, count = draw(st.integers(1, 5)), draw(COUNTS)
    kind = draw(st.sampled_from([*REDUCING, "reduce_scatter", "all_to_all", "broadcast"]))
    asked = {
        "all_to_all": _all_to_all,
        "reduce_scatter": _reduce_scatter,
        "broadcast": _broadcast,
    }.get(kind)
    made = _reducing(kind, size, count) if asked is None else asked(size, count)
    return replace(made, in_python=draw(st.sets(st.integers(0, size - 1))))


def _reducing(kind: str, size: int, count: int) -> OpOfAllRanks:
    return OpOfAllRanks(
        plans=[REDUCING[kind](rank=r, size=size, count=count, itemsize=4) for r in range(size)],
        sources=[row.view(np.uint8) for row in inputs_of(size, count, "float32")],
        results=[4 * count] * size,
        dtype="float32",
        reduction="mean",
    )


def _reduce_scatter(size: int, count: int) -> OpOfAllRanks:
    nbytes = tuple(part.nbytes for part in np.array_split(np.empty(count, np.int16), size))
    return OpOfAllRanks(
        plans=[plan_reduce_scatter(rank=r, size=size, nbytes=nbytes) for r in range(size)],
        sources=[row.view(np.uint8) for row in inputs_of(size, count, "int16")],
        results=nbytes,
        dtype="int16",
        reduction="prod",
    )


def _broadcast(size: int, count: int) -> OpOfAllRanks:
    """With two ranks also a message from one to the other."""
    plans = [plan_broadcast(rank=r, size=size, root=0, nbytes=9 * count) for r in range(size)]
    sources = [np.arange(9 * count).astype(np.uint8) if not r else NOTHING for r in range(size)]
    return OpOfAllRanks(plans=plans, sources=sources, results=[0] + [9 * count] * (size - 1))


def _all_to_all(size: int, count: int) -> OpOfAllRanks:
    rows = [tuple(count + 13 * a + 101 * b for b in range(size)) for a in range(size)]
    columns = [tuple(row[rank] for row in rows) for rank in range(size)]
    sources = [np.arange(sum(row), dtype=np.uint8) for row in rows]
    plans = [plan_all_to_all(rank=r, size=size, to=rows[r], from_=columns[r]) for r in range(size)]
    return OpOfAllRanks(plans=plans, sources=sources, results=list(map(sum, columns)))


async def results_and_traffic(asked: OpOfAllRanks) -> tuple[list[bytes], list[int]]:
    with web() as lanes, trio.fail_after(30):
        results = await asked.everywhere(lanes)
        sent = [lanes.bytes_sent(rank) for rank in range(len(asked.plans))]
        return [result.tobytes() for result in results], sent


@given(collectives())
async def test_ranks_with_and_without_it_get_the_same_by_the_same_bytes(
    asked: OpOfAllRanks,
) -> None:
    results, sent = await results_and_traffic(asked)
    everybody = range(len(asked.plans))
    assert (results, sent) == await results_and_traffic(replace(asked, in_python=everybody))
    assert sent == list(map(bytes_on_the_wire, asked.plans))


@given(collectives(), st.lists(st.integers(0, 400), min_size=1, max_size=3), st.data())
async def test_after_a_cancel_at_any_point_both_go_on_over_the_same_lanes(
    asked: OpOfAllRanks, moments: Sequence[int], data: st.DataObject
) -> None:
    """V4, V7: what an attempt left in lanes and sockets is dropped, whoever reads it."""
    wanted, _ = await results_and_traffic(asked)
    everybody = range(len(asked.plans))
    with web(buffer_bytes=16_384) as lanes, trio.fail_after(60):
        for number, moment in enumerate(moments, 2):
            async with trio.open_nursery() as nursery:
                for rank in data.draw(st.sets(st.sampled_from(everybody))):
                    nursery.start_soon(asked.at, rank, lanes)
                for _ in range(moment):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            lanes.roster = number
            changed = replace(asked, in_python=data.draw(st.sets(st.sampled_from(everybody))))
            results = await changed.everywhere(lanes)
            assert [result.tobytes() for result in results] == wanted


async def test_however_many_ops_run_at_once_their_threads_take_few_descriptors() -> None:
    """A program can begin an op in each of a hundred jobs, and leave it waiting for its peers."""
    size = 2 * MOST_RUNNERS
    asked = _reducing("ring", size, 64)
    everybody = replace(asked, in_python=range(size))
    results = list[list[int]]()

    async def call(rank: int, lanes: Web) -> None:
        results.append((await asked.at(rank, lanes)).tolist())

    with web() as lanes, trio.fail_after(30):
        lanes.open(asked.plans)
        before = psutil.Process().num_fds()
        async with trio.open_nursery() as nursery:
            for rank in range(1, size):
                nursery.start_soon(call, rank, lanes)
            await wait_all_tasks_blocked()
            assert psutil.Process().num_fds() - before <= 6 * MOST_RUNNERS
            nursery.start_soon(call, 0, lanes)
    with web() as lanes, trio.fail_after(30):
        alike = [result.tolist() for result in await everybody.everywhere(lanes)]
    assert results == alike


async def test_no_thread_writes_once_an_op_has_been_cancelled() -> None:
    """V3, I8: the memory of a cancelled attempt belongs to others."""
    asked = _reducing("ring", 2, 5_000_000)
    with web() as lanes, trio.fail_after(30):
        results = [np.zeros(nbytes, np.uint8) for nbytes in asked.results]
        for number in range(2, 12):
            async with trio.open_nursery() as nursery:
                for rank, result in enumerate(results):
                    nursery.start_soon(asked.run, rank, lanes, result)
                while lanes.bytes_sent(0) < number * 3_000_000:
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            lanes.roster = number
            for result in results:
                result[:] = 7
            assert all((result == 7).all() for result in results)


@pytest.mark.parametrize("count", [1000, 3_000_000])
async def test_closing_a_lane_ends_the_op_that_uses_it(count: int) -> None:
    asked = _reducing("ring", 2, count)
    with web() as lanes, trio.fail_after(30):
        lanes.open(asked.plans)

        async def run() -> None:
            with pytest.raises(LaneBroken, match="the data connection from mac-1 was closed"):
                await asked.at(0, lanes)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            lanes.receiving[1, 0].close()


# --- whatever a peer sends


@dataclass(frozen=True)
class Sent:
    """One record of a peer, which may be changed on its way."""

    header: RecordHeader
    flip: int = -1
    """The byte that is changed; -1 for none."""
    cut: int = 0
    """How many bytes are missing at its end."""


BODY = bytes(range(256)) * 2
PLAN = plan_broadcast(rank=1, size=2, root=0, nbytes=300, segment_bytes=100)
EXPECTED = RecordHeader(100, roster=5, op=7, segment=0, fingerprint=9, completed=6)


@st.composite
def transcripts(draw: st.DrawFn) -> list[Sent]:
    """Mostly what is expected, in its order."""
    sent: list[Sent] = []
    segment = 0
    for _ in range(draw(st.integers(0, 6))):
        header = EXPECTED._replace(segment=segment)
        match draw(st.sampled_from([*["expected"] * 4, "late", "other", "shorter", "broken"])):
            case "late":
                low, nbytes = draw(st.integers(0, 4)), draw(st.integers(0, 500))
                sent.append(Sent(header._replace(roster=low, body_bytes=nbytes)))
                continue
            case "other":
                field = draw(st.sampled_from(["op", "segment", "fingerprint"]))
                header = header._replace(**{field: draw(st.integers(0, 12))})
            case "shorter":
                header = header._replace(body_bytes=draw(st.integers(0, 120)))
            case "broken":
                # Not in the roster's number: whatever has a higher one waits (V4).
                flip = draw(st.integers(-1, 3) | st.integers(12, 171))
                sent.append(Sent(header, flip, draw(st.integers(0, 60))))
                continue
            case _:
                segment += 1
        sent.append(Sent(header))
    return sent


def on_the_wire(transcript: Sequence[Sent]) -> bytes:
    sealer, wire = Sealer(offer_between(0, 1).key), bytearray()
    for sent in transcript:
        record = memoryview(bytearray(OVERHEAD_BYTES + sent.header.body_bytes))
        sealer.seal(sent.header, BODY[: sent.header.body_bytes], record)
        if 0 <= sent.flip < len(record):
            record[sent.flip] ^= 1
        wire += record[: len(record) - sent.cut]
    return bytes(wire)


WHOLE = on_the_wire([Sent(EXPECTED._replace(segment=n)) for n in range(3)])
"""All that PLAN waits for."""


@dataclass
class NativeOutcome:
    """What became of an op whose peer sent something."""

    error: str
    result: bytes
    received: int
    dropped: int
    completed: int


WAYS = ("in Python", "in the library", "at once")


def begin(lane: Lane, source: memoryview, result: memoryview) -> LibraryThreads:
    begun = begin_plan(PLAN, [lane], EXPECTED, source=source, result=result, dtype="", reduction="")
    assert begun is not None
    return begun


async def run_receives(lane: Lane, source: memoryview, result: memoryview, *, way: str) -> None:
    """Run PLAN; "at once" it waits for nobody before it lets the event loop go on."""
    if way == "in Python":
        regions = source, result, memoryview(b"")
        await run_in_python(PLAN, {}, {0: lane}, EXPECTED, regions, dtype="", reduction="")
    elif way == "in the library":
        await run_plan(PLAN, {}, {0: lane}, EXPECTED, source=source, result=result)
    else:
        begun = begin(lane, source, result)
        if not begun.ends_at_once(Patience()):
            await begun.finish()


async def outcome_of(wire: bytes, *, way: str) -> NativeOutcome:
    result = bytearray(300)
    with raw_receiving_lane() as (peer, lane), trio.fail_after(10):
        peer.sendall(wire)
        peer.close()
        error = ""
        try:
            await run_receives(lane, memoryview(b""), memoryview(result), way=way)
        except (LaneBroken, CallsDiffer) as e:
            error = _text_of(e)
        got = bytes(result) if not error else b""  # else garbage
        state = lane.state
        return NativeOutcome(error, got, state.bytes_received, state.dropped, state.peer_completed)


def _text_of(error: PmeshError) -> str:
    return f"{type(error).__name__} {error} {getattr(error, 'op', '')}"


@given(transcripts())
async def test_whatever_a_peer_sends_has_the_same_consequences(transcript: list[Sent]) -> None:
    wire = on_the_wire(transcript)
    first, *others = [await outcome_of(wire, way=way) for way in WAYS]
    assert others == [first, first]


@given(st.binary(max_size=200))
async def test_what_is_no_record_has_the_same_consequences(wire: bytes) -> None:
    wire = bytes(12) + wire  # else most claim too much, or wait for a higher roster (V4)
    first, *others = [await outcome_of(wire, way=way) for way in WAYS]
    assert others == [first, first]
    assert first.error


async def test_a_claim_of_4_gib_is_refused_in_the_same_words() -> None:
    wire = b"\xff" * 40
    first, *others = [await outcome_of(wire, way=way) for way in WAYS]
    assert others == [first, first]
    assert "a record claims 4294967295 bytes, 1048576 are allowed" in first.error


# --- in one turn of the event loop


async def test_the_event_loops_thread_waits_for_the_others_of_a_small_op() -> None:
    """The records come while the thread waits: no task could read them meanwhile."""
    result = memoryview(bytearray(300))
    with raw_receiving_lane() as (peer, lane):
        lane.leads_away = True
        begun = begin(lane, result[:0], result)
        peer.sendall(WHOLE)
        assert begun.ends_at_once(Patience())
    assert result == 3 * BODY[:100]


async def test_it_does_not_wait_for_ranks_of_its_own_agent_which_need_it() -> None:
    result = memoryview(bytearray(300))
    with raw_receiving_lane() as (peer, lane), trio.fail_after(10):
        lane.leads_away = False
        begun = begin(lane, result[:0], result)
        peer.sendall(WHOLE)
        assert not begun.ends_at_once(Patience())
        await begun.finish()
    assert result == 3 * BODY[:100]


async def test_who_waits_in_vain_goes_on_as_ever_and_does_not_wait_the_next_time() -> None:
    result, patience = memoryview(bytearray(300)), Patience()
    with raw_receiving_lane() as (peer, lane), trio.fail_after(10):
        lane.leads_away = True
        begun = begin(lane, result[:0], result)
        assert not begun.ends_at_once(patience)
        assert not patience.waits()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(begun.finish)
            await wait_all_tasks_blocked()
            peer.sendall(WHOLE)
    assert result == 3 * BODY[:100]


async def test_a_plan_stays_as_long_as_it_runs_however_many_others_begin_meanwhile() -> None:
    result, room = memoryview(bytearray(300)), memoryview(bytearray(400))
    with raw_receiving_lane() as (peer, lane), trio.fail_after(10):
        begun = begin(lane, result[:0], result)
        for count in range(100):
            other = plan_direct(rank=0, size=1, count=count, itemsize=1)
            at_once = begin_plan(
                other, [], EXPECTED, source=room, result=room[200:], dtype="int8", reduction="sum"
            )
            assert at_once is not None
            assert at_once.ends_at_once(Patience())
        peer.sendall(WHOLE)
        await begun.finish()
    assert result == 3 * BODY[:100]


def test_the_more_often_others_are_late_the_more_rarely_anybody_waits_for_them() -> None:
    patience, waits = Patience(), list[int]()
    for number in range(400):
        if patience.waits():
            waits.append(number)
            patience.note(late=True)
    assert waits == [0, 2, 6, 14, 30, 62, 126, 191, 256, 321, 386]
    while not patience.waits():
        pass
    patience.note(late=False)
    assert patience.waits()
    patience.note(late=False)
    assert patience.waits()


async def test_a_record_of_a_higher_roster_stays_until_it_is_expected() -> None:
    """V4."""
    source, result = memoryview(b""), memoryview(bytearray(300))
    with raw_receiving_lane() as (peer, lane), trio.fail_after(10):

        def run(roster: int) -> Awaitable[None]:
            header = EXPECTED._replace(roster=roster)
            return run_plan(PLAN, {}, {0: lane}, header, source=source, result=result)

        peer.sendall(WHOLE)
        for roster in (3, 4):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run, roster)
                await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            assert result == bytes(300)
        await run(5)
    assert result == 3 * BODY[:100]
