"""Runs plans in the native library (native/executor.c), whose threads need no interpreter.

`pmesh.net.lanes.executor` runs the same plans in Python, with the same results, bytes on the wire
and errors. It serves where there is no library, and for what the library does not do: products of
complex numbers.
"""

import ctypes
import itertools
import os
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import trio

from pmesh import native
from pmesh.compression.codecs import Codec, codec_of
from pmesh.compression.compiled import kernels
from pmesh.core.ops.plan import CodecWork, Need, PlanEvent, RankPlan, Receive, SendRecord
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
    OpStruct,
    PlanStruct,
    RunState,
    RunStatus,
    address_of,
)
from pmesh.net.lanes.lane import CallsDiffer, Lane, LaneWait

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
WAITS_MS: Final = 1
"""The event loop's thread waits so long for what the others of a small op have still to send."""
_WAITS_TO_BYTES: Final = 256 * 1024  # sent and received; more may take longer on a busy machine
_MOST_SKIPPED: Final = 64


class Patience:
    """Whether the event loop's thread waits for the others of an op, and serves nobody meanwhile.

    It saves a fifth of a small op's time if the others come at once. If they were late several
    times, the ops of the next times do not wait.
    """

    def __init__(self) -> None:
        self._late, self._skips = 0, 0

    def waits(self) -> bool:
        """Return whether the next op waits."""
        self._skips -= 1
        return self._skips < 0

    def note(self, *, late: bool) -> None:
        """Note whether an op has waited in vain."""
        self._late = min(2 * self._late + 1, _MOST_SKIPPED) if late else 0
        self._skips = self._late


def library_for(
    plan: RankPlan,
    lanes: Sequence[Lane],
    dtype: str = "",
    reduction: str = "",
    codec: Codec | None = None,
) -> ctypes.CDLL | None:
    """Return the library if it can run this plan over these lanes; see `begin`."""
    library = native.library()
    if library is None or len(_busy) >= MOST_RUNNERS:
        return None
    if plan.works and (codec not in NUMBERS_OF_CODECS or kernels() is None):
        return None
    for lane in lanes:
        if not lane.runs_in_library:
            return None
    if dtype and not _adds(library, dtype, reduction):
        return None
    return library


@lru_cache(maxsize=128)
def _adds(library: ctypes.CDLL, dtype: str, reduction: str) -> bool:
    return bool(library.pmesh_itemsize(_DTYPES[dtype], _REDUCTIONS[reduction]))


def begin(
    library: ctypes.CDLL,
    plan: RankPlan,
    lanes: Sequence[Lane],
    header: RecordHeader,
    regions: Sequence[memoryview],
    *,
    dtype: str = "",
    reduction: str = "",
    coding: Coding | None = None,
    fold: int = 0,
) -> "LibraryThreads":
    """Begin a plan, and do what can be done at once.

    Args:
        library: as `library_for` has returned it.
        plan: what to do.
        lanes: one for each rank in `plan.receives`, then one for each in `plan.sends`.
        header: the header of every record, except its size and its segment.
        regions: the source, the result and the scratch.
        dtype: one of WIRE_DTYPES if the plan reduces, else empty.
        reduction: one of REDUCTIONS; only for plans that reduce.
        coding: how a codec does the works; only for plans that have any. It must live as long as
            the op.
        fold: the address of the `struct pmesh_combining` that makes the source, part by part as the
            plan reads it; 0 if the source is there. It must live as long as the op.

    Raises:
        LaneBroken: one of the lanes is closed.
    """
    runner = _idle.pop() if _idle else LibraryThreads(library)
    _busy.add(runner)
    try:
        values = (_DTYPES[dtype], _REDUCTIONS[reduction]) if dtype else (-1, -1)
        runner.begin(plan, lanes, header, regions, values=values, coding=coding, fold=fold)
    except BaseException:
        runner.rest()
        raise
    return runner


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
    fold: int = 0,
) -> None:
    """Run a plan to its end, as `pmesh.net.lanes.executor.run_plan` does.

    For the arguments see `begin`, for the errors `Runner.finish`.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    runner = begin(
        *(library, plan, lanes, header, regions),
        dtype=dtype,
        reduction=reduction,
        coding=coding,
        fold=fold,
    )
    await runner.finish()


class LibraryThreads:
    """Two threads of the library, which run one op at a time. They begin when they are needed."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._runner = ctypes.c_void_p(library.pmesh_runner_new())
        if not self._runner:
            raise LaneBroken("the data connections have no pipe: the system has no room for it")
        self._ended: int = library.pmesh_runner_fd(self._runner)
        self._op = OpStruct(seal=aead.SEAL_ADDRESS, open=aead.OPEN_ADDRESS, aead=aead.LIBRARY)
        self._lanes: Sequence[Lane] = ()
        self._states = array("Q")
        self._flat: _FlatPlan | None = None
        self._regions: Sequence[memoryview] = ()
        """With the plan, the memory that the library uses while an op runs, so that it stays."""
        self._state = int(RunState.OVER)

    def stop(self) -> None:
        """Make the threads end soon; a lane that is closed calls this from the event loop."""
        self._library.pmesh_stop(self._runner)

    def rest(self) -> None:
        """Be free for another op; if many others rest already, end."""
        self._lanes, self._flat, self._regions = (), None, ()
        _busy.remove(self)
        if len(_idle) < _KEPT_RUNNERS:
            _idle.append(self)
        else:
            self._library.pmesh_runner_free(self._runner)

    def begin(
        self,
        plan: RankPlan,
        lanes: Sequence[Lane],
        header: RecordHeader,
        regions: Sequence[memoryview],
        *,
        values: tuple[int, int],
        coding: Coding | None,
        fold: int,
    ) -> None:
        """Begin an op; for the arguments see the function `begin`."""
        op, flat = self._op, _laid_out(plan)
        op.plan, (op.dtype, op.reduction) = flat.address, values
        op.coding = None if coding is None else ctypes.addressof(coding)
        op.fold = fold or None
        _, op.roster, op.number, _, op.fingerprint, op.completed = header
        for place, region in enumerate(regions):
            op.regions[place], op.region_bytes[place] = address_of(region), len(region)
        for lane in lanes:  # before any is shared
            lane.check_open()
        self._states = array("Q", [lane.share_state() for lane in lanes])
        op.lanes, _ = self._states.buffer_info()
        self._lanes, self._flat, self._regions = lanes, flat, regions
        self._state = self._library.pmesh_begin(self._runner, ctypes.byref(op))

    def ends_at_once(self, patience: Patience) -> bool:
        """Return True if the op is done: then it needs no `finish`. Wait for the others a little.

        Nothing else happens in the event loop meanwhile: no view comes between. It does not wait
        for ranks of this agent, which need the event loop.
        """
        flat = self._flat
        waits = self._state == RunState.AWAITS and flat is not None and flat.is_short
        for lane in self._lanes:
            waits = waits and lane.leads_away
        if waits and patience.waits():
            self._state = self._library.pmesh_wait(self._runner, WAITS_MS)
            patience.note(late=self._state != RunState.OVER)
        if self._state != RunState.OVER or self._library.pmesh_end(self._runner) != RunStatus.DONE:
            return False
        self._take_back()
        return True

    async def finish(self) -> None:
        """Run the op to its end. No thread works on it any more when this ends, however (V3).

        Raises:
            CallsDiffer: a rank that sends to this one called something else.
            LaneBroken: one of the lanes is gone.
        """
        lanes = self._lanes
        try:
            status = await self._finish()
        finally:
            self._take_back()
        if status != RunStatus.DONE:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise self._failure(status, lanes)

    def _take_back(self) -> None:
        for lane in self._lanes:
            lane.take_back()
        self.rest()

    async def _finish(self) -> int:
        library, runner, lanes, state = self._library, self._runner, self._lanes, self._state
        try:
            if state == RunState.OVER:
                await trio.lowlevel.checkpoint()
            elif state == RunState.AWAITS and self._flat is not None and self._flat.awaits_here:
                await lanes[0].wait_for(LaneWait.READABLE)
                for lane in lanes:
                    lane.check_open()
                state = library.pmesh_advance(runner)
            if state != RunState.OVER:
                for lane in lanes:
                    lane.lend(self.stop)
                if state == RunState.RUNS or library.pmesh_hand_over(runner):
                    await trio.lowlevel.wait_readable(self._ended)
        except BaseException:
            self.stop()
            raise
        finally:
            status: int = library.pmesh_end(runner)
        return status

    def _failure(self, status: int, lanes: Sequence[Lane]) -> Exception:
        match status:
            case RunStatus.INVALID:
                return ValueError("the plan does not fit its memory")
            case RunStatus.NO_THREAD:
                return LaneBroken("the data connections have no thread: the system has no room")
            case RunStatus.STOPPED:
                closed = next(lane for lane in lanes if lane.is_closed)
                return closed.broken(closed.why_closed)
            case _:
                return _failure_of(lanes[self._op.track], status, self._op.detail)


class PreparedOp:
    """An op as the library reads it, and what stays in memory for it."""

    def __init__(
        self,
        plan: RankPlan,
        lanes: Sequence[Lane],
        header: RecordHeader,
        regions: Sequence[memoryview],
        *,
        values: tuple[int, int],
    ) -> None:
        """For the arguments see the function `begin`."""
        self.lanes, self.regions, self.flat = lanes, regions, _laid_out(plan)
        self.states = array("Q", [ctypes.addressof(lane.state) for lane in lanes])
        self.struct = op = OpStruct(
            seal=aead.SEAL_ADDRESS, open=aead.OPEN_ADDRESS, aead=aead.LIBRARY
        )
        op.plan, (op.dtype, op.reduction) = self.flat.address, values
        op.lanes, _ = self.states.buffer_info()
        op.roster, op.fingerprint = header.roster, header.fingerprint
        for place, region in enumerate(regions):
            op.regions[place], op.region_bytes[place] = address_of(region), len(region)

    @property
    def address(self) -> int:
        """Where the library finds it."""
        return ctypes.addressof(self.struct)


class KeptThreads(LibraryThreads):
    """Threads for the ops that the library begins by itself (`pmesh.net.lanes.persistent`)."""

    @property
    def address(self) -> int:
        """Where the library finds its runner."""
        return self._runner.value or 0

    def take_over(self, op: PreparedOp, state: int) -> None:
        """Go on with an op that has begun: `finish` or `abandon` follows."""
        self._op, self._states, self._state = op.struct, op.states, state
        self._lanes, self._flat, self._regions = op.lanes, op.flat, op.regions

    def abandon(self) -> None:
        """Stop the op, wherever it is; its lanes are whole afterwards."""
        self.stop()
        self._library.pmesh_end(self._runner)
        self._take_back()

    def rest(self) -> None:
        """Be free for the next op of the same session."""
        self._lanes, self._flat, self._regions = (), None, ()

    def free(self) -> None:
        """End; no op runs."""
        self._library.pmesh_runner_free(self._runner)


def values_of(dtype: str, reduction: str) -> tuple[int, int]:
    """Return the numbers of a dtype and a reduction in the library; of "" and "" those of none."""
    return (_DTYPES[dtype], _REDUCTIONS[reduction]) if dtype else (-1, -1)


_idle: list[LibraryThreads] = []
_busy: set[LibraryThreads] = set()


def _failure_of(lane: Lane, status: int, detail: int) -> PmeshError:
    match status:
        case RunStatus.DIFFERS:
            return CallsDiffer(detail, lane.peer)
        case RunStatus.ENDED:
            return lane.broken("ended")
        case RunStatus.OUT_OF_PLACE:
            return lane.broken("brought a record out of its place")
        case RunStatus.TOO_LARGE:
            return lane.broken(f"broke: {too_large(detail)}")
        case RunStatus.FORGED:
            return lane.broken("broke: a record fails authentication")
        case _:
            return lane.broken(f"broke: {os.strerror(detail)}")


# --- a plan, laid out flat


class _FlatPlan:
    """A plan as the library reads it, and the memory in which it lies."""

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan
        """Kept, so that no other plan gets its id."""
        peers = [(PlanEvent.LANDED, peer) for peer in plan.receives]
        peers += [(PlanEvent.SENT, peer) for peer in plan.sends]
        peers += [(PlanEvent.COMPUTED, queue) for queue in range(len(plan.works))]
        self._tracks = {at: number for number, at in enumerate(peers)}
        self._needs = list[tuple[int, int]]()
        queues: list[tuple[SendRecord | Receive, ...]] = [
            *plan.receives.values(),
            *plan.sends.values(),
        ]
        records = [self._record(record) for queue in queues for record in queue]
        works = [self._work(work) for queue in plan.works for work in queue]
        self._tables = (
            np.array(records, RECORD),
            np.array(self._needs, NEED),
            np.array(list(plan.copies), COPY),
            np.array(works, WORK),
            np.array([*_tracks(queues), *_tracks(plan.works)], TRACK),
        )
        self._struct = PlanStruct(
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
        self.is_short = plan.moving_bytes <= _WAITS_TO_BYTES
        self.awaits_here = [len(queue) for queue in plan.receives.values()] in ([1], [2])
        """Whether so little is awaited that the event loop wakes up sooner than a thread and the
        event loop."""

    def _record(self, record: SendRecord | Receive) -> tuple[int, ...]:
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

    def _work(self, work: CodecWork) -> tuple[int, ...]:
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
