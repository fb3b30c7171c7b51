"""Processes of this machine that stand still or end: this agent, and the trainers'."""

import errno
import math
import os
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psutil
import trio

_ROUNDING = 1e-6  # of a period: after 3 s, 3 / 0.1 may be a little less than 30

# One clock runs while the machine sleeps, the other stops. CLOCK_MONOTONIC stops on Linux and runs
# on macOS. typeshed knows each name only on its own system.
_ELAPSED: Final[int] = getattr(time, "CLOCK_MONOTONIC" if psutil.MACOS else "CLOCK_BOOTTIME")
_AWAKE: Final[int] = getattr(time, "CLOCK_UPTIME_RAW" if psutil.MACOS else "CLOCK_MONOTONIC")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Two clocks read together, in seconds."""

    elapsed_s: float
    """Runs while the machine sleeps."""
    awake_s: float
    """Stops while the machine sleeps, as trio's clock does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """How long this agent could not receive."""

    late_s: float
    """The machine ran but this agent did not: the loop lag of `pmesh status`."""
    slept_s: float
    """The machine slept."""

    @property
    def total_s(self) -> float:
        return self.late_s + self.slept_s


def read_clocks() -> Clocks:
    return Clocks(elapsed_s=time.clock_gettime(_ELAPSED), awake_s=time.clock_gettime(_AWAKE))


def own_stall(before: Clocks, after: Clocks, *, expected_s: float) -> Stall:
    """Return the stall between two readings that should be `expected_s` apart."""
    awake_s = after.awake_s - before.awake_s
    elapsed_s = after.elapsed_s - before.elapsed_s
    return Stall(late_s=max(0.0, awake_s - expected_s), slept_s=max(0.0, elapsed_s - awake_s))


async def sleep_in_step(period_s: float) -> float:
    """Sleep until the clock is at a multiple of the period; return how long that should take.

    So tasks whose periods are multiples of each other wake the process together.
    """
    now = trio.current_time()
    deadline = (math.floor(now / period_s + _ROUNDING) + 1) * period_s
    await trio.sleep_until(deadline)
    return deadline - now


async def tick(
    judge: Callable[[Stall], None],
    *,
    period_s: Callable[[], float],
    read: Callable[[], Clocks] = read_clocks,
) -> None:
    """Call `judge` every `period_s()` with the stall since the last call, which is usually 0.

    The silence of peers must be judged there and nowhere else: another task would count a stall
    against them before it is known.
    """
    before = read()
    while True:
        expected_s = await sleep_in_step(period_s())
        after = read()
        judge(own_stall(before, after, expected_s=expected_s))
        before = after


def is_stopped(pid: int) -> bool:
    """Return True if a process is stopped, as by SIGSTOP or Ctrl-Z; False if it is gone.

    Linux calls this state T, macOS SSTOP; psutil knows both. A process that computes is not
    stopped. If no file descriptor is left to read the state, the result is False.
    """
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except (psutil.Error, OSError):
        return False


class TrainerProcess:
    """The process at the other end of a session, as the system sees it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stopped_since: float | None = None

    def stopped_for_s(self, now: float) -> float | None:
        """Return the seconds since it was first seen stopped, as by SIGSTOP; None if it may run."""
        if not is_stopped(self._pid):
            self._stopped_since = None
            return None
        if self._stopped_since is None:
            self._stopped_since = now
        return now - self._stopped_since


async def wait_for_exit(pid: int) -> None:
    """Wait without polling until the process has ended and its sockets are closed.

    Raises:
        OSError: No descriptor is left, Linux is older than 5.3, or on macOS another task waits.
    """
    try:
        if sys.platform == "darwin":
            queue = trio.lowlevel.current_kqueue()

            def change_filter(flags: int) -> None:
                event = select.kevent(pid, select.KQ_FILTER_PROC, flags, select.KQ_NOTE_EXIT)
                queue.control([event], 0)

            def give_up(_: object) -> trio.lowlevel.Abort:
                change_filter(select.KQ_EV_DELETE)
                return trio.lowlevel.Abort.SUCCEEDED

            change_filter(select.KQ_EV_ADD | select.KQ_EV_ONESHOT)
            await trio.lowlevel.wait_kevent(pid, select.KQ_FILTER_PROC, give_up)
        else:
            descriptor = os.pidfd_open(pid)
            try:
                await trio.lowlevel.wait_readable(descriptor)
            finally:
                os.close(descriptor)
    except ProcessLookupError:  # it had already ended
        await trio.lowlevel.checkpoint()
    except trio.BusyResourceError as e:
        raise OSError(errno.EBUSY, "another task already waits for this process") from e


class ProcessExits:
    """The ends of programs. A program has many sessions, and one descriptor reports its end."""

    def __init__(self) -> None:
        self._waits: dict[int, trio.Event] = {}

    async def wait(self, pid: int) -> None:
        """As `wait_for_exit`, from any number of tasks: one of them waits for the system."""
        while pid in self._waits:
            await self._waits[pid].wait()
        over = self._waits[pid] = trio.Event()
        try:
            await wait_for_exit(pid)
        finally:
            del self._waits[pid]
            over.set()
