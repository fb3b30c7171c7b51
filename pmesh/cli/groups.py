"""A process and all that it has started, none of which outlives this process."""

import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, Self

import trio

# It reads the process group, and an empty line once that is over. Its input ends when 'pmesh run'
# has ended, however that was: nobody can be asked to clean up after a SIGKILL of himself.
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
        """Its exit code, once it has ended; a signal's number, negative."""
        ...

    def send_signal(self, number: int) -> None:
        """Pass a signal on, to it and to what it has started."""
        ...


@asynccontextmanager
async def start_group(command: Sequence[str]) -> AsyncGenerator[Child]:
    """Start the command in a process group of its own, none of which outlives a failure.

    In a session of its own too: Ctrl-C would reach it twice otherwise, from the terminal and from
    us.

    Raises:
        OSError: it can't be started.
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
    """A process that ends a process group when this process has ended without doing so."""

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
        with self._pipe, contextlib.suppress(BrokenPipeError):  # somebody has ended it
            self._pipe.write(b"\n")
        self._process.wait()

    def watch_this_process(self) -> None:
        """Called in the new process before it becomes the command: nobody can be too quick."""
        self._pipe.write(b"%d\n" % os.getpid())  # pragma: no cover - of a process that is replaced


class _Group:
    """A `Child` that is a real one."""

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
