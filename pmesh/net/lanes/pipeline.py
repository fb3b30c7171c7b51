"""Crews: the parts of one op, each at work on a lane of its own.

A part is written once, as steps that say what they wait for. The parts of a small op wait as tasks
of the event loop. Those of a large one work in threads: system calls, the cryptography and numpy
give up Python's lock, so one part receives while another sends, a wait costs one call of the system
instead of a round through the event loop, and heartbeats are not held up. What computes besides, as
compression does, is soon too long for the event loop.
"""

import select
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import trio

from pmesh.errors import LaneBroken
from pmesh.net.lanes.lane import CallsDiffer, Lane, Steps, Wait

THREADS_FROM_BYTES = 16 * 1024 * 1024  # below, to start them costs more than they save
COMPUTING_THREADS_FROM_BYTES = 128 * 1024


class Stage(NamedTuple):
    """What one member of a pipeline does."""

    steps: Steps
    lane: Lane | None = None
    """Whose waits the steps yield, all of one direction; None if only for PROGRESS or a TURN."""


class Pipeline:
    """Runs the parts of one op, side by side."""

    def __init__(self) -> None:
        self._waiting = trio.lowlevel.ParkingLot()
        self._threads: _Threads | None = None

    def note_progress(self) -> None:
        """A part, which calls this, has got further: whoever waits for PROGRESS looks again."""
        if self._threads is None:
            self._waiting.unpark_all()
        else:
            self._threads.note_progress()

    async def run(
        self, parts: Sequence[Stage], *, moving_bytes: int, computing: bool = False
    ) -> None:
        """Run them all to their ends; the first that fails ends the others.

        When this returns, raises or is cancelled, no part is at work any more (V3).

        Args:
            parts: no two on the same lane.
            moving_bytes: how much they send and receive together, roughly: many bytes take threads.
            computing: whether they do more with them than to add.

        Raises:
            CallsDiffer: as the part that failed.
            LaneBroken: likewise; or a lane was closed meanwhile.
        """
        threads_from = COMPUTING_THREADS_FROM_BYTES if computing else THREADS_FROM_BYTES
        if moving_bytes < threads_from:
            await self._run_in_tasks(parts)
            return
        try:
            self._threads = _Threads(parts)
        except OSError:  # no descriptor is left
            await self._run_in_tasks(parts)
            return
        try:
            await self._threads.run()
        finally:
            self._threads = None

    async def _run_in_tasks(self, parts: Sequence[Stage]) -> None:
        if len(parts) == 1:
            await self._follow(parts[0])
            return
        failures: list[LaneBroken | CallsDiffer] = []

        async def follow(part: Stage) -> None:
            try:
                await self._follow(part)
            except (LaneBroken, CallsDiffer) as e:  # one plain error, where a nursery makes a group
                failures.append(e)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for part in parts:
                nursery.start_soon(follow, part)
        if failures:
            raise failures[0]

    async def _follow(self, part: Stage) -> None:
        for wait in part.steps:
            if wait is Wait.PROGRESS:
                await self._waiting.park()
            elif part.lane is None:
                await trio.lowlevel.checkpoint()
            else:
                await part.lane.wait_for(wait)


class _Threads:
    """A thread for each part, and the one task that waits for them all.

    To cancel it stops them: each ends at its next wait, in which the lanes are whole (V7).
    """

    def __init__(self, parts: Sequence[Stage]) -> None:
        self._parts = parts
        self._lanes = [part.lane for part in parts if part.lane is not None]
        self._progress = threading.Condition()
        self._steps_seen = 0
        self._at_work = len(parts)
        self._failures: list[BaseException] = []
        self._stopped = False
        self._stops, self._stop_sign = socket.socketpair()  # for `poll`, which macOS has too

    async def run(self) -> None:
        """Returns when the last thread has ended, also if it is cancelled."""
        token, task = trio.lowlevel.current_trio_token(), trio.lowlevel.current_task()

        def wake() -> None:
            token.run_sync_soon(trio.lowlevel.reschedule, task)

        def cancel(_: object) -> trio.lowlevel.Abort:
            self._stop()
            return trio.lowlevel.Abort.FAILED  # not before they have ended

        try:
            for lane in self._lanes:
                lane.lend(self._stop)
            for part in self._parts:
                try:
                    trio.lowlevel.start_thread_soon(partial(self._work, part, wake), _nothing)
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
        """From any of the threads."""
        with self._progress:
            self._steps_seen += 1
            self._progress.notify_all()

    def _stop(self) -> None:
        """From any thread, as often as one likes."""
        with self._progress:
            if not self._stopped:
                self._stopped = True
                self._stop_sign.send(b"!")
                self._progress.notify_all()

    # --- in a thread

    def _work(self, part: Stage, wake: Callable[[], None]) -> None:
        try:
            self._follow(part)
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

    def _follow(self, part: Stage) -> None:
        network = select.poll()
        network.register(self._stops, select.POLLIN)
        if part.lane is not None:
            part.lane.register(network)
        while not self._stopped:
            seen = self._steps_seen  # before the part looks how far the others are
            match next(part.steps, None):
                case None:
                    return
                case Wait.READABLE | Wait.WRITABLE:
                    network.poll()
                case Wait.PROGRESS:
                    self._await_progress(beyond=seen)
                case Wait.CLOSED:
                    self._await_stop()
                case Wait.TURN:
                    pass

    def _await_progress(self, *, beyond: int) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._stopped or self._steps_seen != beyond)

    def _await_stop(self) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._stopped)


def _nothing(_: object) -> None:
    """What a thread returns."""
