"""`pmesh run`: restarts a command that crashes, so that its machine comes back.

No process that the command started outlives this one.
"""

import contextlib
import errno
import functools
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol, Self

import trio

from pmesh.cli.terminal import complain, ending_signals
from pmesh.errors import ConfigError, UsageError

# It reads the process group, then an empty line once the group has ended. Its input closes when
# 'pmesh run' ends, even by SIGKILL, after which 'pmesh run' can't clean up by itself.
_GUARD = """
while read -r line; do group=$line; done
[ -n "$group" ] || exit 0
kill -s TERM -- "-$group"
left=10
while [ $left -gt 0 ] && kill -s 0 -- "-$group"; do left=$((left - 1)); sleep 1; done
kill -s KILL -- "-$group"
"""


class Child(Protocol):
    """One run of the command."""

    async def wait(self) -> int:
        """Wait for the end and return the exit code, or minus the number of a signal."""
        ...

    def send_signal(self, number: int) -> None:
        """Send a signal to the command and to every process that it started."""
        ...


@asynccontextmanager
async def start_group(command: Sequence[str]) -> AsyncGenerator[Child]:
    """Start the command in its own process group, and kill the group if the command fails.

    It has its own session too: otherwise Ctrl-C would reach it twice, from the terminal and us.

    Raises:
        OSError: The command can't be started.
    """
    with _Guard() as guard:
        process = await trio.lowlevel.open_process(
            command, start_new_session=True, preexec_fn=guard.watch_this_process
        )
        try:
            yield _Group(process)
        finally:
            if process.returncode != 0:
                _signal_group(process.pid, signal.SIGKILL)
            with trio.CancelScope(shield=True):
                await process.wait()


class _Guard:
    """A process that ends the process group if this process dies first."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(  # noqa: S603 - our own script
            ["/bin/sh", "-c", _GUARD],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None  # noqa: S101 - it was started with a pipe
        self._pipe = self._process.stdin
        return self

    def __exit__(self, *_: object) -> None:
        with self._pipe, contextlib.suppress(BrokenPipeError):  # the guard was killed
            self._pipe.write(b"\n")
        self._process.wait()

    def watch_this_process(self) -> None:
        """Called in the new process before it becomes the command, so that there is no race."""
        self._pipe.write(b"%d\n" % os.getpid())  # pragma: no cover - in a process that is replaced


class _Group:
    def __init__(self, process: trio.Process) -> None:
        self._process = process

    async def wait(self) -> int:
        return await self._process.wait()

    def send_signal(self, number: int) -> None:
        if self._process.returncode is None:
            _signal_group(self._process.pid, number)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: only zombies are left
        os.killpg(group, number)


FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0  # a machine that has recovered should come back soon
STEADY_S = 60.0  # a command that ran this long had started well: its failure is a new one

# The machine is short of a resource, perhaps because of the crash itself.
_PASSING_ERRORS = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


def wait_before_start(previous_s: float, *, ran_s: float) -> float:
    """Return the seconds to wait before a failed command is restarted.

    Args:
        previous_s: The wait before this run; 0 before the first.
        ran_s: How long it ran.

    >>> wait_before_start(0, ran_s=0.1)
    1.0
    >>> wait_before_start(16, ran_s=59), wait_before_start(16, ran_s=60)
    (30.0, 1.0)
    """
    if previous_s == 0 or ran_s >= STEADY_S:
        return FIRST_WAIT_S
    return min(2 * previous_s, LONGEST_WAIT_S)


Starter = Callable[[], AbstractAsyncContextManager[Child]]


def run_command(command: Sequence[str], *, restarts: int) -> int:
    """Run the command until it succeeds or a signal ends it, and return the exit code.

    Args:
        command: The program and its arguments.
        restarts: How many times in a row it is restarted; a run of 60 s begins a new count.

    Raises:
        ConfigError: There is no command, or `restarts` is negative.
        UsageError: The command can't be started.
    """
    if not command:
        raise ConfigError("there is no command; type for example: pmesh run python train.py")
    if restarts < 0:
        raise ConfigError(f"--restarts must be at least 0, not {restarts}")
    start = functools.partial(start_group, command)
    return trio.run(keep_running, start, _name_of(command), restarts)


async def keep_running(start: Starter, name: str, restarts: int) -> int:
    """Restart the command until it succeeds, a signal comes, or it fails too often."""
    runner = Runner(start, name, restarts)
    async with trio.open_nursery() as nursery:
        await nursery.start(runner.pass_signals_on)
        code = await runner.run()
        nursery.cancel_scope.cancel()
    return code


class Runner:
    """Runs the command again and again."""

    def __init__(self, start: Starter, name: str, restarts: int) -> None:
        self._start = start
        self._name = name
        self._restarts = restarts
        self._child: Child | None = None
        self._signalled = trio.Event()
        self._signal = 0

    async def pass_signals_on(
        self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Pass on every signal: a command may end at the first, or only prepare to end."""
        with trio.open_signal_receiver(*ending_signals()) as signals:
            task_status.started()
            async for number in signals:
                self._signal = self._signal or number
                self._signalled.set()
                if self._child is not None:
                    self._child.send_signal(number)

    async def run(self) -> int:
        """Return 0 if the command succeeded, else the exit code of the signal or of the command."""
        wait_s, failures = 0.0, 0
        while True:
            began = trio.current_time()
            code, ending = await self._run_once(first=wait_s == 0)
            if code == 0:
                return 0
            if not self._signalled.is_set():
                ran_s = trio.current_time() - began
                failures = 1 if ran_s >= STEADY_S else failures + 1
                if failures > self._restarts:
                    complain(f"{self._name} {ending}{self._why_not_again()}")
                    return code if code > 0 else 128 - code
                wait_s = wait_before_start(wait_s, ran_s=ran_s)
                complain(f"{self._name} {ending}; starting it again in {wait_s:g} s")
                with trio.move_on_after(wait_s):
                    await self._signalled.wait()
            if self._signalled.is_set():
                return 128 + self._signal  # as in shells

    def _why_not_again(self) -> str:
        if not self._restarts:
            return "; --restarts 0 does not start it again"
        return (
            f", and failed {self._restarts + 1} times in a row, each time in less than "
            f"{STEADY_S:g} s; not starting it again: see its last lines above, or give --restarts"
        )

    async def _run_once(self, *, first: bool) -> tuple[int, str]:
        try:
            async with self._start() as self._child:
                if self._signalled.is_set():
                    self._child.send_signal(self._signal)  # it came while the command was started
                code = await self._child.wait()
        except OSError as e:
            if first or e.errno not in _PASSING_ERRORS:
                what = str(e.filename or self._name)
                raise UsageError(
                    f"can't start {what!r}: {e.strerror}; the words after 'pmesh run' must be "
                    "a command that runs by itself"
                ) from e
            return 1, f"could not be started: {e.strerror}"
        finally:
            self._child = None
        return code, _describe_end(code)


def _name_of(command: Sequence[str]) -> str:
    """Return the name that a person would use: that of the Python script, if there is one."""
    script = next((word for word in command if word.endswith(".py")), command[0])
    return Path(script).name


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"ended by signal {-code}"
