"""Processes in groups of their own, which end with all that they have started.

No process of a group outlives the one that started it, unless it has begun a session of its own.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol, Self

import psutil
import trio

from pmesh.launches.rules.part import LOST_GRACE_S

# It reads the process group, then an empty line once the group has ended. Its input closes when
# this process ends, even by SIGKILL, after which it can't clean up by itself.
_GUARD = """
while read -r line; do group=$line; done
[ -n "$group" ] || exit 0
kill -s TERM -- "-$group"
left=$1
while [ $left -gt 0 ] && kill -s 0 -- "-$group"; do left=$((left - 1)); sleep 1; done
kill -s KILL -- "-$group"
pkill -KILL -s "$group"  # children in groups of their own; not every macOS can choose by session
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
async def start_group(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> AsyncGenerator[Child]:
    """Start the command in its own process group, and kill the group if the command fails.

    It has its own session too: otherwise Ctrl-C would reach it twice, from the terminal and us.

    Args:
        command: The program and its arguments.
        environment: All of its variables; None for those of this process.

    Raises:
        OSError: The command can't be started.
    """
    with _Guard(patience_s=10) as guard:
        process = await trio.lowlevel.open_process(
            command,
            env=environment,
            start_new_session=True,
            preexec_fn=guard.watch_this_process,
        )
        try:
            yield _Group(process)
        finally:
            if process.returncode != 0:
                _signal_group(process.pid, signal.SIGKILL)
            with trio.CancelScope(shield=True):
                await process.wait()


class PipedChild(Protocol):
    """One run of a command whose streams are pipes."""

    stdout: trio.abc.ReceiveStream
    stderr: trio.abc.ReceiveStream
    stdin: trio.abc.SendStream | None
    session: int
    """The id of the command's session: what it starts is in it, too."""

    async def wait(self) -> int:
        """Wait for the end and return the exit code, or minus the number of a signal."""
        ...

    def send_signal(self, number: int) -> None:
        """Send a signal to the command and to every process that it started."""
        ...


@asynccontextmanager
async def start_piped_group(
    command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], reads: bool
) -> AsyncGenerator[PipedChild]:
    """As `start_group`, with pipes; its session is killed in any case once the command has ended.

    Args:
        command: The program, as an absolute path, and its arguments.
        cwd: The working directory.
        environment: All of its variables.
        reads: False for an empty standard input.

    Raises:
        OSError: The command can't be started.
    """
    with _Guard(patience_s=LOST_GRACE_S) as guard:
        process = await trio.lowlevel.open_process(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE if reads else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=guard.watch_this_process,
        )
        child = _PipedGroup(process)
        try:
            yield child
        finally:
            _kill_session(process.pid)
            with trio.CancelScope(shield=True):
                await process.wait()
                for stream in (child.stdin, child.stdout, child.stderr):
                    if stream is not None:
                        await trio.aclose_forcefully(stream)


class _Guard:
    """A process that ends the process group if this process dies first.

    It sends SIGTERM, and SIGKILL after `patience_s`.
    """

    def __init__(self, *, patience_s: int) -> None:
        self._patience_s = patience_s

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(  # noqa: S603 - our own script
            ["/bin/sh", "-c", _GUARD, "guard", str(self._patience_s)],
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


class _PipedGroup(_Group):
    def __init__(self, process: trio.Process) -> None:
        super().__init__(process)
        assert process.stdout is not None  # noqa: S101 - it was started with pipes
        assert process.stderr is not None  # noqa: S101 - likewise
        self.stdin = process.stdin
        self.session = process.pid
        self.stdout: trio.abc.ReceiveStream = process.stdout
        self.stderr: trio.abc.ReceiveStream = process.stderr

    async def wait(self) -> int:
        """Wait for the end; what the command has left behind in its session is killed then."""
        code = await super().wait()
        _kill_session(self._process.pid)
        return code


def _kill_session(session: int) -> None:
    """Kill a group, and what its processes have put into groups of their own, as `timeout` does."""
    _signal_group(session, signal.SIGKILL)
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: only zombies are left
        os.killpg(group, number)
