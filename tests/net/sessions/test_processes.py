"""Processes that stop or end, real ones and by macOS's words; and stalls of this agent."""

import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator

import psutil
import pytest
import trio
import trio.testing
from trio.testing import wait_all_tasks_blocked

from pmesh.net.sessions.processes import (
    Clocks,
    ProcessExits,
    Stall,
    is_stopped,
    own_stall,
    read_clocks,
    tick,
    wait_for_exit,
)
from tests.worlds.faults import Faults, Real
from tests.worlds.system import be_on


@pytest.fixture
def process() -> Generator["subprocess.Popen[bytes]"]:
    """Another process, which waits to be told to end."""
    arguments = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


def test_a_process_that_was_stopped_is_and_one_that_waits_or_goes_on_is_not(
    process: "subprocess.Popen[bytes]",
) -> None:
    assert not is_stopped(process.pid)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert is_stopped(process.pid)
    process.send_signal(signal.SIGCONT)
    os.waitpid(process.pid, os.WCONTINUED)
    assert not is_stopped(process.pid)


def test_a_process_that_is_gone_is_not_stopped(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    assert not is_stopped(process.pid)


@pytest.mark.parametrize(
    ("status", "stopped"),
    [
        (psutil.STATUS_STOPPED, True),  # macOS: SSTOP
        (psutil.STATUS_TRACING_STOP, True),
        (psutil.STATUS_RUNNING, False),
        (psutil.STATUS_IDLE, False),
        (psutil.STATUS_ZOMBIE, False),
    ],
)
def test_each_state_that_psutil_knows_is_read_alike_on_every_system(
    faults: Faults, status: str, *, stopped: bool
) -> None:
    faults.instead(psutil.Process, "status", lambda _: status)
    assert is_stopped(os.getpid()) is stopped


def test_a_process_that_may_not_be_looked_at_is_not_stopped(faults: Faults) -> None:
    def refuse(process: psutil.Process) -> str:
        raise psutil.AccessDenied(process.pid)

    faults.instead(psutil.Process, "status", refuse)
    assert not is_stopped(os.getpid())


def test_where_no_descriptor_is_left_nobody_is_taken_to_be_stopped(faults: Faults) -> None:
    faults.fail(psutil.Process, "status", OSError(errno.EMFILE, "Too many open files"))
    assert not is_stopped(os.getpid())


async def test_a_process_is_waited_for_until_it_ends(process: "subprocess.Popen[bytes]") -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_for_exit, process.pid)
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        process.kill()
    process.wait()
    await wait_for_exit(process.pid)  # nobody has this number now


async def test_many_wait_for_a_process_with_one_descriptor(
    process: "subprocess.Popen[bytes]", faults: Faults
) -> None:
    opened = list[int]()

    def open_another(pidfd_open: Real, pid: int) -> object:
        opened.append(pid)
        return pidfd_open(pid)

    faults.around(os, "pidfd_open", open_another)
    exits = ProcessExits()
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as first:
            async with trio.open_nursery() as leaving:
                leaving.start_soon(exits.wait, process.pid)
                await wait_all_tasks_blocked()
                for _ in range(3):
                    nursery.start_soon(exits.wait, process.pid)
                await wait_all_tasks_blocked()
                assert len(opened) == 1
                first.cancel()
        await wait_all_tasks_blocked()
        assert len(opened) == 2  # another takes its place
        assert len(nursery.child_tasks) == 3
        process.kill()


async def test_where_no_descriptor_is_left_nobody_can_wait(faults: Faults) -> None:
    faults.fail(os, "pidfd_open", OSError(errno.EMFILE, "Too many open files"))
    with pytest.raises(OSError, match="Too many"):
        await wait_for_exit(os.getpid())


SYS_EVENT_H = {
    "FILTER_PROC": -5,
    "NOTE_EXIT": 0x80000000,
    "EV_ADD": 0x1,
    "EV_DELETE": 0x2,
    "EV_ONESHOT": 0x10,
}


class Queue:
    """As much of macOS's kqueue as is asked of it."""

    def __init__(self) -> None:
        self.gone = False
        self.told: list[tuple[int, ...]] = []

    def control(self, events: list[tuple[int, ...]], most: int) -> None:
        assert most == 0
        if self.gone:
            raise ProcessLookupError
        self.told += events


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """This is macOS, as far as `wait_for_exit` sees."""
    found, waiting = Queue(), set[tuple[int, int]]()

    async def wait_kevent(
        ident: int, kind: int, abort: Callable[[object], trio.lowlevel.Abort]
    ) -> None:
        if (ident, kind) in waiting:  # as trio says it
            raise trio.BusyResourceError
        waiting.add((ident, kind))
        await trio.lowlevel.wait_task_rescheduled(abort)

    be_on(monkeypatch, "darwin")
    monkeypatch.setattr(trio.lowlevel, "current_kqueue", lambda: found, raising=False)
    monkeypatch.setattr(trio.lowlevel, "wait_kevent", wait_kevent, raising=False)
    monkeypatch.setattr(select, "kevent", lambda *event: event, raising=False)
    for name, value in SYS_EVENT_H.items():
        monkeypatch.setattr(select, f"KQ_{name}", value, raising=False)
    return found


async def test_on_macos_the_kernel_queue_tells(queue: Queue) -> None:
    """`man kqueue`: EVFILT_PROC with NOTE_EXIT, once."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_for_exit, 77)
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        nursery.cancel_scope.cancel()
    once = SYS_EVENT_H["EV_ADD"] | SYS_EVENT_H["EV_ONESHOT"]
    flags = (once, SYS_EVENT_H["EV_DELETE"])
    kind, note = SYS_EVENT_H["FILTER_PROC"], SYS_EVENT_H["NOTE_EXIT"]
    assert queue.told == [(77, kind, flag, note) for flag in flags]


async def test_on_macos_a_process_that_has_ended_before_is_not_waited_for(queue: Queue) -> None:
    """`man kqueue`: ESRCH."""
    queue.gone = True
    await wait_for_exit(77)
    assert not queue.told


async def test_on_macos_one_task_only_can_wait_for_a_process(queue: Queue) -> None:
    """A program with two connections: the second's end is seen by looking."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_for_exit, 77)
        await wait_all_tasks_blocked()
        with pytest.raises(OSError, match="another task"):
            await wait_for_exit(77)
        assert queue.told
        nursery.cancel_scope.cancel()


NOW = Clocks(elapsed_s=5000.0, awake_s=1000.0)


def later(*, awake_s: float, slept_s: float = 0.0) -> Clocks:
    return Clocks(
        elapsed_s=NOW.elapsed_s + awake_s + slept_s,
        awake_s=NOW.awake_s + awake_s,
    )


@pytest.mark.parametrize(
    ("after", "late_s", "slept_s"),
    [
        (later(awake_s=0.1), 0.0, 0.0),
        (later(awake_s=0.05), 0.0, 0.0),
        (later(awake_s=3.1), 3.0, 0.0),
        (later(awake_s=0.1, slept_s=3600.0), 0.0, 3600.0),
        (later(awake_s=0.6, slept_s=60.0), 0.5, 60.0),
    ],
)
def test_a_stall_is_told_from_a_sleep(after: Clocks, late_s: float, slept_s: float) -> None:
    stall = own_stall(NOW, after, expected_s=0.1)
    assert (stall.late_s, stall.slept_s) == pytest.approx((late_s, slept_s))
    assert stall.total_s == pytest.approx(late_s + slept_s)


def test_both_clocks_run_at_the_same_rate_while_nobody_sleeps() -> None:
    before = read_clocks()
    deadline = time.perf_counter() + 0.01
    while time.perf_counter() < deadline:
        pass
    after = read_clocks()
    assert after.awake_s > before.awake_s
    assert own_stall(before, after, expected_s=1.0).slept_s < 0.005


@pytest.mark.parametrize(
    ("system", "elapsed", "awake"),
    [
        (False, "CLOCK_BOOTTIME", "CLOCK_MONOTONIC"),
        (True, "CLOCK_MONOTONIC", "CLOCK_UPTIME_RAW"),
    ],
)
def test_each_system_has_its_names_for_the_two_clocks(
    system: bool,  # noqa: FBT001 - pytest passes it by name
    elapsed: str,
    awake: str,
) -> None:
    # In its own process: the clocks are chosen when the module is imported.
    program = (
        "import psutil, time\n"
        f"psutil.MACOS = {system}\n"
        "for number, name in enumerate(('BOOTTIME', 'MONOTONIC', 'UPTIME_RAW')):\n"
        "    setattr(time, 'CLOCK_' + name, 100 + number)\n"
        "time.clock_gettime = float\n"
        "from pmesh.net.sessions.processes import read_clocks\n"
        f"clocks = read_clocks()\n"
        f"assert clocks.elapsed_s == time.{elapsed}, clocks\n"
        f"assert clocks.awake_s == time.{awake}, clocks\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=dict(os.environ))


async def test_each_tick_tells_what_was_lost_since_the_last(
    autojump_clock: trio.testing.MockClock,
) -> None:
    readings = iter([later(awake_s=0.0), later(awake_s=0.1), later(awake_s=2.7)])
    stalls: list[Stall] = []
    with trio.CancelScope() as scope:

        def judge(stall: Stall) -> None:
            stalls.append(stall)
            if len(stalls) == 2:
                scope.cancel()

        await tick(judge, period_s=lambda: 0.1, read=lambda: next(readings))
    assert [stall.total_s for stall in stalls] == pytest.approx([0.0, 2.5])
    assert autojump_clock.current_time() == pytest.approx(0.2)
