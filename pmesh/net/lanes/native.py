"""Runs plans in the native library (native/executor.c), whose threads need no interpreter.

`pmesh.net.lanes.executor` runs the same plans in Python, with the same results, bytes on the wire
and errors. It serves where there is no library, and for what the library does not do: lanes over
several connections, and products of complex numbers.
"""

import ctypes
import itertools
import os
from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
import trio
from numpy.typing import NDArray

from pmesh import native
from pmesh.compression.codecs import Codec, codec_of
from pmesh.compression.compiled import kernels
from pmesh.core.ops.plan import Event, Need, RankPlan, Receive, Send, Work
from pmesh.core.ops.reductions import REDUCTIONS, WIRE_DTYPES
from pmesh.core.wire import aead
from pmesh.core.wire.records import RecordHeader, too_large
from pmesh.errors import LaneBroken, PmeshError
from pmesh.native.layout import (
    CODECS,
    COPY,
    FIRST_HOP,
    NEED,
    RECORD,
    TRACK,
    WORK,
    Coding,
    Op,
    Plan,
    State,
    Status,
)
from pmesh.net.lanes.lane import CallsDiffer, Lane, Wait

HAS_CORES: Final = (os.cpu_count() or 1) > 2  # noqa: PLR2004 - the trainer needs one, too
TWO_THREADS_FROM_BYTES: Final = 512 * 1024 if HAS_CORES else 4 * 1024 * 1024
"""To wake a second thread takes longer than it saves below; on two cores an op of 1 MiB takes 0.8
of the time with one."""
COMPUTING_THREAD_FROM_BYTES: Final = 128 * 1024
"""Encoded: more would hold up the event loop for some tenths of a millisecond."""
_KEPT_PLANS: Final = 64
_KEPT_RUNNERS: Final = 4
MOST_RUNNERS: Final = 16
"""Each has six descriptors. Ops beyond, of jobs and groups that all run at once, run in Python."""
NUMBERS_OF_CODECS: Final = {codec_of(name): number for number, name in enumerate(CODECS)}
_DTYPES: Final = {name: number for number, name in enumerate(WIRE_DTYPES)}
_REDUCTIONS: Final = {name: number for number, name in enumerate(REDUCTIONS)}
_NOWHERE: Final = np.zeros(1, np.uint64).view(np.uint8)
"""Where a region without values lies."""


def library_for(
    plan: RankPlan,
    lanes: Sequence[Lane],
    dtype: str = "",
    reduction: str = "",
    codec: Codec | None = None,
) -> ctypes.CDLL | None:
    """Return the library if it can run this plan over these lanes; for the arguments see `run`."""
    library = native.library()
    if library is None or not all(lane.has_one_socket for lane in lanes):
        return None
    if plan.works and (codec not in NUMBERS_OF_CODECS or kernels() is None):
        return None
    if len(_busy) >= MOST_RUNNERS:
        return None
    if dtype and not library.pmesh_itemsize(_DTYPES[dtype], _REDUCTIONS[reduction]):
        return None
    return library


async def run(
    library: ctypes.CDLL,
    plan: RankPlan,
    lanes: Sequence[Lane],
    header: RecordHeader,
    regions: Sequence[memoryview],
    *,
    dtype: str = "",
    reduction: str = "",
    coding: Coding | None = None,
) -> None:
    """Run a plan to its end, as `pmesh.net.lanes.executor.run_plan` does.

    Args:
        library: as `library_for` has returned it.
        plan: what to do.
        lanes: one for each rank in `plan.receives`, then one for each in `plan.sends`.
        header: the header of every record, except its size and its segment.
        regions: the source, the result and the scratch.
        dtype: one of WIRE_DTYPES if the plan reduces, else empty.
        reduction: one of REDUCTIONS; only for plans that reduce.
        coding: how a codec does the works; only for plans that have any.

    Raises:
        CallsDiffer: a rank that sends to this one called something else.
        LaneBroken: one of the lanes is gone.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    runner = _idle.pop() if _idle else _Runner(library)
    _busy.add(runner)
    try:
        values = (_DTYPES[dtype], _REDUCTIONS[reduction]) if dtype else (-1, -1)
        await runner.run(plan, lanes, header, regions, values=values, coding=coding)
    finally:
        _busy.remove(runner)
        if len(_idle) < _KEPT_RUNNERS:
            _idle.append(runner)
        else:
            runner.close()


class _Runner:
    """Two threads of the library, which run one op at a time. They begin when they are needed."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._runner = ctypes.c_void_p(library.pmesh_runner_new())
        if not self._runner:
            raise LaneBroken("the data connections have no pipe: the system has no room for it")
        self._ended: int = library.pmesh_runner_fd(self._runner)
        self._op = Op(seal=aead.SEAL_ADDRESS, open=aead.OPEN_ADDRESS, aead=aead.LIBRARY)

    def close(self) -> None:
        """End the threads."""
        self._library.pmesh_runner_free(self._runner)

    def stop(self) -> None:
        """Make the threads end soon; a lane that is closed calls this from the event loop."""
        self._library.pmesh_stop(self._runner)

    async def run(
        self,
        plan: RankPlan,
        lanes: Sequence[Lane],
        header: RecordHeader,
        regions: Sequence[memoryview],
        *,
        values: tuple[int, int],
        coding: Coding | None,
    ) -> None:
        """Run one op. No thread works on it any more when this ends, however it ends (V3)."""
        op, flat, memory = self._op, _laid_out(plan), list(map(_array, regions))
        op.plan, (op.dtype, op.reduction) = flat.address, values
        op.coding = None if coding is None else ctypes.addressof(coding)
        _, op.roster, op.number, _, op.fingerprint, op.completed = header
        for place, (octets, region) in enumerate(zip(memory, regions, strict=True)):
            op.regions[place] = octets.__array_interface__["data"][0]
            op.region_bytes[place] = len(region)
        for lane in lanes:
            lane.check_open()
        states = array("Q", [lane.share_state() for lane in lanes])
        op.lanes, _ = states.buffer_info()
        try:
            status = await self._run(lanes, awaits_here=flat.awaits_here)
        finally:
            for lane in lanes:
                lane.take_back()
        if status != Status.DONE:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise self._failure(status, lanes)

    async def _run(self, lanes: Sequence[Lane], *, awaits_here: bool) -> int:
        library, runner = self._library, self._runner
        try:
            state = library.pmesh_begin(runner, ctypes.byref(self._op))
            if state == State.OVER:
                await trio.lowlevel.checkpoint()
            elif state == State.AWAITS and awaits_here:
                await lanes[0].wait_for(Wait.READABLE)
                for lane in lanes:
                    lane.check_open()
                state = library.pmesh_advance(runner)
            if state != State.OVER:
                for lane in lanes:
                    lane.lend(self.stop)
                if library.pmesh_hand_over(runner):
                    await trio.lowlevel.wait_readable(self._ended)
        except BaseException:
            self.stop()
            raise
        finally:
            status: int = library.pmesh_end(runner)
        return status

    def _failure(self, status: int, lanes: Sequence[Lane]) -> Exception:
        match status:
            case Status.INVALID:
                return ValueError("the plan does not fit its memory")
            case Status.NO_THREAD:
                return LaneBroken("the data connections have no thread: the system has no room")
            case Status.STOPPED:
                closed = next(lane for lane in lanes if lane.is_closed)
                return closed.broken("was closed")
            case _:
                return _failure_of(lanes[self._op.track], status, self._op.detail)


_idle: list[_Runner] = []
_busy: set[_Runner] = set()


def _failure_of(lane: Lane, status: int, detail: int) -> PmeshError:
    match status:
        case Status.DIFFERS:
            return CallsDiffer(detail, lane.peer)
        case Status.ENDED:
            return lane.broken("ended")
        case Status.OUT_OF_PLACE:
            return lane.broken("brought a record out of its place")
        case Status.TOO_LARGE:
            return lane.broken(f"broke: {too_large(detail)}")
        case Status.FORGED:
            return lane.broken("broke: a record fails authentication")
        case _:
            return lane.broken(f"broke: {os.strerror(detail)}")


def _array(region: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(region, np.uint8) if len(region) else _NOWHERE


# --- a plan, laid out flat


class _FlatPlan:
    """A plan as the library reads it, and the memory in which it lies."""

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan
        """Kept, so that no other plan gets its id."""
        peers = [(Event.LANDED, peer) for peer in plan.receives]
        peers += [(Event.SENT, peer) for peer in plan.sends]
        peers += [(Event.COMPUTED, queue) for queue in range(len(plan.works))]
        self._tracks = {at: number for number, at in enumerate(peers)}
        self._needs = list[tuple[int, int]]()
        queues: list[tuple[Send | Receive, ...]] = [*plan.receives.values(), *plan.sends.values()]
        records = [self._record(record) for queue in queues for record in queue]
        works = [self._work(work) for queue in plan.works for work in queue]
        self._tables = (
            np.array(records, RECORD),
            np.array(self._needs, NEED),
            np.array(list(plan.copies), COPY),
            np.array(works, WORK),
            np.array([*_tracks(queues), *_tracks(plan.works)], TRACK),
        )
        self._struct = Plan(
            *[table.__array_interface__["data"][0] for table in self._tables],
            *[len(table) for table in self._tables[:4]],
            receiving=len(plan.receives),
            sending=len(plan.sends),
            computing=len(plan.works),
            size=plan.size,
            added_twice=plan.added_twice,
            two_threads=plan.moving_bytes >= TWO_THREADS_FROM_BYTES,
            computes_much=bool(plan.works) and plan.moving_bytes >= COMPUTING_THREAD_FROM_BYTES,
        )
        self.address = ctypes.addressof(self._struct)
        self.awaits_here = [len(queue) for queue in plan.receives.values()] in ([1], [2])
        """Whether so little is awaited that the event loop wakes up sooner than a thread and the
        event loop."""

    def _record(self, record: Send | Receive) -> tuple[int, ...]:
        begin = len(self._needs)
        self._needs += map(self._need, record.needs)
        receive = record if isinstance(record, Receive) else None
        return (
            record.offset,
            record.nbytes,
            0 if receive is None else receive.other,
            begin,
            len(self._needs),
            record.region,
            0 if receive is None else receive.then,
            receive is not None and receive.finishes,
        )

    def _work(self, work: Work) -> tuple[int, ...]:
        begin = len(self._needs)
        self._needs += map(self._need, work.needs)
        return (
            work.begin,
            work.length,
            work.offset,
            work.nbytes,
            FIRST_HOP if work.arrived < 0 else work.arrived,
            begin,
            len(self._needs),
            work.region,
            work.decodes,
            work.divides,
        )

    def _need(self, need: Need) -> tuple[int, int]:
        return self._tracks[need.event, need.peer], need.number


def _tracks(queues: Sequence[Sequence[object]]) -> list[tuple[int, int]]:
    """Return where each queue begins and ends in a table of all."""
    bounds = [0, *itertools.accumulate(map(len, queues))]
    return list(itertools.pairwise(bounds))


_flat_plans: dict[int, _FlatPlan] = {}  # by the id of the plan; the oldest first


def _laid_out(plan: RankPlan) -> _FlatPlan:
    flat = _flat_plans.get(id(plan))
    if flat is None:
        if len(_flat_plans) >= _KEPT_PLANS:
            del _flat_plans[next(iter(_flat_plans))]
        flat = _flat_plans[id(plan)] = _FlatPlan(plan)
    return flat
