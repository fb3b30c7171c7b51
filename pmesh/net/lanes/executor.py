"""Runs the plan of any collective (`pmesh.core.ops.plan`), over lanes to and from any ranks.

The native library does so where it can (`pmesh.net.lanes.native`); the rest of this module does the
same in Python.

Each record is sealed from where its values lie and opened into where they belong. Each lane's
records go in their order, and wait for what the plan says. For large records, a pipeline has a
stage for every lane. Small ones fit the sockets' buffers and go in line, because switching tasks
would cost more than the network.

A stage is written once, as steps that say what they wait for. The stages of a small op wait as
tasks of the event loop. Those of a large one work in threads: system calls, the cryptography and
numpy release Python's lock, so one stage receives while another sends, a wait costs one system call
instead of a round through the event loop, and heartbeats are not held up. Stages that also compute,
as for compression, would soon block the event loop, so they use threads earlier.
"""

import select
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import trio

from pmesh.core.ops.plan import (
    SEGMENT_BYTES,
    CodecWork,
    Copy,
    Need,
    RankPlan,
    Receive,
    Region,
    SendRecord,
    Then,
)
from pmesh.core.ops.reductions import WIRE_DTYPES, accumulate, finish, make_nan_equal
from pmesh.core.wire.records import RecordHeader
from pmesh.errors import LaneBroken
from pmesh.net.lanes import native
from pmesh.net.lanes.folding import SourceFold, folded_first
from pmesh.net.lanes.lane import CallsDiffer, Lane, LaneWait, Steps

THREADS_FROM_BYTES = 16 * 1024 * 1024  # below, to start them costs more than they save
COMPUTING_THREADS_FROM_BYTES = 128 * 1024
FOLDS_BY_PARTS_FROM_BYTES = native.TWO_THREADS_FROM_BYTES
"""Below, a plan is run by the event loop's thread as far as that can, which must not take long."""
LOOK_MS = 2  # between two checks for progress; a socket with data left to send takes longer
_NOTHING = memoryview(bytearray())


def run_plan(
    plan: RankPlan,
    lanes_to: Mapping[int, Lane],
    lanes_from: Mapping[int, Lane],
    header: RecordHeader,
    *,
    source: memoryview,
    result: memoryview,
    dtype: str = "",
    reduction: str = "",
    fold: SourceFold | None = None,
) -> Coroutine[Any, Any, None]:
    """Return what does one rank's part of a collective.

    Cancelling it, or an error, leaves garbage in `result` and the lanes whole for a later roster.

    Args:
        plan: what to do.
        lanes_to: at least one for each of `plan.peers_to`.
        lanes_from: at least one for each of `plan.peers_from`.
        header: the header of every record of this op, except its size and its segment.
        source: bytes, never written (I8); may be read-only. As many as the plan's maker says.
        result: writable bytes, which don't overlap `source`; as many as the plan's maker says.
        dtype: one of WIRE_DTYPES if the plan reduces, else empty.
        reduction: as `check_reduction` allows; only for plans that reduce.
        fold: what makes the source, if it is not there yet. The library makes the parts of a large
            one as it comes to them, so that the first record leaves early; else the whole comes
            first.

    Raises:
        CallsDiffer: a rank that sends to this one called something else.
        LaneBroken: one of the lanes is gone.
        ValueError: the plan needs a lane that there isn't.
    """
    regions = _regions_of(plan, source, result)
    lanes = lanes_of(plan, lanes_to, lanes_from)
    library = native.library_for(plan, lanes, dtype, reduction)
    by_parts = 0
    if library is None:
        run = partial(run_in_python, plan, lanes_to, lanes_from, header, regions)
    else:
        if fold is not None and plan.moving_bytes >= FOLDS_BY_PARTS_FROM_BYTES:
            by_parts = fold.by_parts()
        run = partial(native.run, library, plan, lanes, header, regions, fold=by_parts)
    running = partial(run, dtype=dtype, reduction=reduction)
    return running() if fold is None or by_parts else folded_first(fold, running)


def begin_plan(
    plan: RankPlan,
    lanes: Sequence[Lane],
    header: RecordHeader,
    *,
    source: memoryview,
    result: memoryview,
    dtype: str,
    reduction: str,
) -> native.LibraryThreads | None:
    """Begin a plan, if the native library can run it: over lanes as `native.begin` takes them.

    For the other arguments see `run_plan`.
    """
    library = native.library_for(plan, lanes, dtype, reduction)
    if library is None:
        return None
    regions = _regions_of(plan, source, result)
    return native.begin(library, plan, lanes, header, regions, dtype=dtype, reduction=reduction)


def _regions_of(
    plan: RankPlan, source: memoryview, result: memoryview
) -> tuple[memoryview, memoryview, memoryview]:
    nbytes = plan.scratch_bytes
    return source, result, np.empty(nbytes, np.uint8).data if nbytes else _NOTHING


def run_in_python(
    plan: RankPlan,
    lanes_to: Mapping[int, Lane],
    lanes_from: Mapping[int, Lane],
    header: RecordHeader,
    regions: Sequence[memoryview],
    *,
    dtype: str,
    reduction: str,
) -> Coroutine[Any, Any, None]:
    """Return what does it without the native library; for the arguments see `run_plan`."""
    landed = _adding(plan, regions, dtype, reduction) if dtype else _keep
    return execute(plan, lanes_to, lanes_from, header, regions, landed=landed)


def lanes_of(
    plan: RankPlan, lanes_to: Mapping[int, Lane], lanes_from: Mapping[int, Lane]
) -> list[Lane]:
    """Return the lanes of a plan: those from others, then those to others.

    Raises ValueError if one is missing.
    """
    if not (lanes_to.keys() >= plan.sends.keys() and lanes_from.keys() >= plan.receives.keys()):
        raise ValueError("a plan among several ranks needs its lanes")
    return [*map(lanes_from.__getitem__, plan.receives), *map(lanes_to.__getitem__, plan.sends)]


def _keep(_: Receive | CodecWork) -> None:
    """Leave a record, or a work, as it is."""


def execute(
    plan: RankPlan,
    lanes_to: Mapping[int, Lane],
    lanes_from: Mapping[int, Lane],
    header: RecordHeader,
    regions: Sequence[memoryview],
    *,
    landed: Callable[[Receive], None] = _keep,
    work: Callable[[CodecWork], None] = _keep,
) -> Coroutine[Any, Any, None]:
    """Return what runs a plan, as that of `run_plan` does, with these regions and functions.

    Both return the coroutine of `_Execution`: each wait would enter theirs again, too.

    Args:
        plan: what to do.
        lanes_to: see `run_plan`.
        lanes_from: see `run_plan`.
        header: see `run_plan`.
        regions: the source, the result, and the scratch, of `plan.scratch_bytes`.
        landed: called when a record has landed.
        work: does one work of the plan.
    """
    return _Execution(
        plan, lanes_to, lanes_from, header, regions=regions, landed=landed, work=work
    ).run()


def _adding(
    plan: RankPlan, regions: Sequence[memoryview], dtype: str, reduction: str
) -> Callable[[Receive], None]:
    """Return what adds the values of a record that has landed."""
    wire = WIRE_DTYPES[dtype]
    values, itemsize = list(map(partial(np.frombuffer, dtype=wire), regions)), wire.itemsize
    source, sums, _ = values
    adds_source = Then.ADD_SOURCE

    def landed(receive: Receive) -> None:
        if not (receive.then and receive.nbytes):
            return
        count = receive.nbytes // itemsize
        here, there = receive.offset // itemsize, receive.other // itemsize
        arrived = values[receive.region][here : here + count]
        if receive.then == adds_source:
            into, other = arrived, source[there : there + count]
        else:
            into, other = sums[there : there + count], arrived
        accumulate(reduction, into, other)
        if receive.finishes:
            finish(reduction, into, plan.size)
            if plan.added_twice:  # I3: the other ranks add for themselves
                make_nan_equal(into)

    return landed


@dataclass(slots=True)
class _Queue:
    """A queue of works, and how many are done."""

    works: Sequence[CodecWork]
    done: int = 0


_T = TypeVar("_T", SendRecord, Receive)


@dataclass(slots=True)
class _Track(Generic[_T]):
    """One lane, the records that it carries, and how many are done."""

    lane: Lane
    records: Sequence[_T]
    done: int = 0

    @property
    def is_over(self) -> bool:
        return self.done == len(self.records)


class _Execution:
    """The run of one plan."""

    def __init__(
        self,
        plan: RankPlan,
        lanes_to: Mapping[int, Lane],
        lanes_from: Mapping[int, Lane],
        header: RecordHeader,
        *,
        regions: Sequence[memoryview],
        landed: Callable[[Receive], None],
        work: Callable[[CodecWork], None],
    ) -> None:
        lanes_of(plan, lanes_to, lanes_from)
        self._plan = plan
        self._to: dict[int, _Track[SendRecord]] = {}
        for peer, sends in plan.sends.items():
            self._to[peer] = _Track(lanes_to[peer], sends)
        self._from: dict[int, _Track[Receive]] = {}
        for peer, receives in plan.receives.items():
            self._from[peer] = _Track(lanes_from[peer], receives)
        self._header = header
        self._regions = regions
        self._landed = landed
        self._work = work
        self._queues = list(map(_Queue, plan.works))
        self._progress = (self._from, self._to, self._queues)  # by `Event`

    async def run(self) -> None:
        """Run a small plan in line, and any other in a pipeline.

        In line, it receives in the plan's order, and sends before each receive all that may be
        sent. If a record doesn't fit its socket's buffer, every rank might wait for another to
        receive, so the rest needs a pipeline.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._plan.small:
            await self._run_pipeline(self._plan.copies)
            return
        for copy in self._plan.copies:
            self._copy(copy, 0, copy.nbytes)
        for peer in self._plan.in_line:
            if not self._post_all():
                break
            track = self._from[peer]
            for wait in self._receive_one(track):
                await track.lane.wait_for(wait)
        else:
            if self._post_all():
                if not self._from:  # else other tasks have run while it received
                    await trio.lowlevel.checkpoint()
                return
        await self._run_pipeline(())

    async def _run_pipeline(self, copies: Sequence[Copy]) -> None:
        pipe = StageRunner()
        workers = self._queues[:1], self._queues[1:]
        stages = [OpStage(self._copy_all(copies))] if copies else []
        stages += [OpStage(self._work_off(queues, pipe)) for queues in workers if queues]
        stages += [OpStage(self._send_all(track, pipe), track.lane) for track in self._to.values()]
        stages += [
            OpStage(self._receive_all(track, pipe), track.lane)
            for track in self._from.values()
            if not track.is_over
        ]
        await pipe.run(stages, moving_bytes=self._plan.moving_bytes, computing=bool(self._queues))

    def _post_all(self) -> bool:
        """Compute and send all that may be; return False if a socket's buffer is full."""
        while self._queues and self._work_some(self._queues):
            pass
        for track in self._to.values():
            lane, sends = track.lane, track.records
            while track.done < len(sends):
                needs = sends[track.done].needs
                if needs and not self._has(needs):
                    break
                if not lane.idle:
                    return False
                whole = lane.post(*self._next_record(track))
                track.done += 1
                if not whole:
                    return False
        while self._queues and self._work_some(self._queues):
            pass
        return True

    def _work_off(self, queues: Sequence[_Queue], pipe: "StageRunner") -> Steps:
        while any(queue.done < len(queue.works) for queue in queues):
            if self._work_some(queues):
                pipe.note_progress()
                yield LaneWait.TURN
            else:
                yield LaneWait.PROGRESS

    def _work_some(self, queues: Sequence[_Queue]) -> int:
        """Do one work of each queue, if it may begin; return how many were done."""
        count = 0
        for queue in queues:
            if queue.done < len(queue.works) and self._has(queue.works[queue.done].needs):
                self._work(queue.works[queue.done])
                queue.done += 1
                count += 1
        return count

    def _copy_all(self, copies: Sequence[Copy]) -> Steps:
        for copy in copies:
            for begin in range(0, copy.nbytes, SEGMENT_BYTES):
                self._copy(copy, begin, min(begin + SEGMENT_BYTES, copy.nbytes))
                yield LaneWait.TURN

    def _copy(self, copy: Copy, begin: int, end: int) -> None:
        source, result = self._regions[Region.SOURCE], self._regions[Region.RESULT]
        result[copy.result + begin : copy.result + end] = source[
            copy.source + begin : copy.source + end
        ]

    def _send_all(self, track: _Track[SendRecord], pipe: "StageRunner") -> Steps:
        lane = track.lane
        yield from lane.flushes()
        while not track.is_over:
            while not self._has(track.records[track.done].needs):
                yield LaneWait.PROGRESS if lane.idle else LaneWait.PROGRESS_OR_NETWORK
            yield from lane.sends(*self._next_record(track))
            track.done += 1
            pipe.note_progress()
        yield from lane.flushes()

    def _next_record(
        self, track: _Track[SendRecord] | _Track[Receive]
    ) -> tuple[RecordHeader, memoryview]:
        record, segment = track.records[track.done], track.done
        place = self._regions[record.region][record.offset : record.offset + record.nbytes]
        _, roster, op, _, fingerprint, completed = self._header
        return RecordHeader(record.nbytes, roster, op, segment, fingerprint, completed), place

    def _receive_all(self, track: _Track[Receive], pipe: "StageRunner") -> Steps:
        while not track.is_over:
            yield from self._receive_one(track)
            pipe.note_progress()

    def _receive_one(self, track: _Track[Receive]) -> Steps:
        receive = track.records[track.done]
        while receive.needs and not self._has(receive.needs):
            yield LaneWait.PROGRESS
        yield from track.lane.receives(*self._next_record(track))
        self._landed(receive)
        track.done += 1

    def _has(self, needs: Sequence[Need]) -> bool:
        for need in needs:  # noqa: SIM110 - all() takes twice the time, for each record
            if self._progress[need.event][need.peer].done < need.number:
                return False
        return True


# --- the stages of one op, side by side


class OpStage(NamedTuple):
    """One stage of a pipeline."""

    steps: Steps
    lane: Lane | None = None
    """The lane for which the steps wait, in one direction; None if they never wait for a lane."""


class StageRunner:
    """Runs the stages of one op, side by side."""

    def __init__(self) -> None:
        self._waiting = trio.lowlevel.ParkingLot()
        self._threads: _Threads | None = None

    def note_progress(self) -> None:
        """Make stages that wait for PROGRESS check again; a stage that gets further calls this."""
        if self._threads is None:
            self._waiting.unpark_all()
        else:
            self._threads.note_progress()

    async def run(
        self, stages: Sequence[OpStage], *, moving_bytes: int, computing: bool = False
    ) -> None:
        """Run all stages to their ends; the first that fails ends the others.

        When this returns, raises or is cancelled, no stage is at work any more (V3).

        Args:
            stages: no two on the same lane.
            moving_bytes: about how much they send and receive together: many bytes take threads.
            computing: whether they compute more than sums.

        Raises:
            CallsDiffer: the first stage that failed raised it.
            LaneBroken: the first stage that failed raised it; or a lane was closed meanwhile.
        """
        threads_from = COMPUTING_THREADS_FROM_BYTES if computing else THREADS_FROM_BYTES
        if moving_bytes < threads_from:
            await self._run_in_tasks(stages)
            return
        try:
            self._threads = _Threads(stages)
        except OSError:  # no descriptor is left
            await self._run_in_tasks(stages)
            return
        try:
            await self._threads.run()
        finally:
            self._threads = None

    async def _run_in_tasks(self, stages: Sequence[OpStage]) -> None:
        if len(stages) == 1:
            await self._follow(stages[0])
            return
        failures: list[LaneBroken | CallsDiffer] = []

        async def follow(stage: OpStage) -> None:
            try:
                await self._follow(stage)
            except (LaneBroken, CallsDiffer) as e:  # a plain error; a nursery would raise a group
                failures.append(e)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for stage in stages:
                nursery.start_soon(follow, stage)
        if failures:
            raise failures[0]

    async def _follow(self, stage: OpStage) -> None:
        for wait in stage.steps:
            # The event loop tends the lane.
            if wait in {LaneWait.PROGRESS, LaneWait.PROGRESS_OR_NETWORK}:
                await self._waiting.park()
            elif stage.lane is None:
                await trio.lowlevel.checkpoint()
            else:
                await stage.lane.wait_for(wait)


class _Threads:
    """A thread for each stage, and one task that waits for all threads.

    If that task is cancelled, each thread ends at its next wait, at which lanes are whole (V7).
    """

    def __init__(self, stages: Sequence[OpStage]) -> None:
        self._stages = stages
        self._lanes = [stage.lane for stage in stages if stage.lane is not None]
        self._progress = threading.Condition()
        self._steps_seen = 0
        self._at_work = len(stages)
        self._failures: list[BaseException] = []
        self._stopped = False
        self._stops, self._stop_sign = socket.socketpair()  # for `poll`, which macOS has too

    async def run(self) -> None:
        """Return when the last thread has ended, also if this task is cancelled."""
        token, task = trio.lowlevel.current_trio_token(), trio.lowlevel.current_task()

        def wake() -> None:
            token.run_sync_soon(trio.lowlevel.reschedule, task)

        def cancel(_: object) -> trio.lowlevel.Abort:
            self._stop()
            return trio.lowlevel.Abort.FAILED  # not before the threads have ended

        try:
            for lane in self._lanes:
                lane.lend(self._stop)
            for stage in self._stages:
                try:
                    trio.lowlevel.start_thread_soon(partial(self._work, stage, wake), _nothing)
                except RuntimeError as e:
                    self._failures.append(LaneBroken(f"the data connections have no thread: {e}"))
                    self._leave(wake)
            await trio.lowlevel.wait_task_rescheduled(cancel)
        finally:
            for lane in self._lanes:
                lane.take_back()
            self._stops.close()
            self._stop_sign.close()
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._failures:
            raise self._failures[0]
        if self._stopped:
            for lane in self._lanes:
                lane.check_open()

    def note_progress(self) -> None:
        """Make waiting stages check again; any of the threads may call this."""
        with self._progress:
            self._steps_seen += 1
            self._progress.notify_all()

    def _stop(self) -> None:
        """Stop all threads; any thread may call this, as often as it likes."""
        with self._progress:
            if not self._stopped:
                self._stopped = True
                self._stop_sign.send(b"!")
                self._progress.notify_all()

    # --- in a thread

    def _work(self, stage: OpStage, wake: Callable[[], None]) -> None:
        try:
            self._follow(stage)
        except BaseException as e:  # noqa: BLE001 - the task raises it
            self._failures.append(e)
        self._leave(wake)

    def _leave(self, wake: Callable[[], None]) -> None:
        if self._failures:
            self._stop()
        with self._progress:
            self._at_work -= 1
            last = not self._at_work
        if last:
            wake()

    def _follow(self, stage: OpStage) -> None:
        network = select.poll()
        network.register(self._stops, select.POLLIN)
        if stage.lane is not None:
            stage.lane.register(network)
        while not self._stopped:
            seen = self._steps_seen  # before the stage checks how far the others are
            match next(stage.steps, None):
                case None:
                    return
                case LaneWait.READABLE | LaneWait.WRITABLE:
                    network.poll()
                case LaneWait.PROGRESS:
                    self._await_progress(beyond=seen)
                case LaneWait.PROGRESS_OR_NETWORK:
                    self._await_either(network, beyond=seen)
                case LaneWait.CLOSED:
                    self._await_stop()
                case LaneWait.TURN:
                    pass

    def _await_progress(self, *, beyond: int) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._stopped or self._steps_seen != beyond)

    def _await_either(self, network: select.poll, *, beyond: int) -> None:
        while not (self._stopped or self._steps_seen != beyond or network.poll(LOOK_MS)):
            pass

    def _await_stop(self) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._stopped)


def _nothing(_: object) -> None:
    """Ignore what a thread returns."""
