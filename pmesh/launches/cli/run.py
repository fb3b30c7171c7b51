"""`pmesh run`: restarts a command that crashes, so that its machine comes back.

No process that the command started outlives this one.
"""

import errno
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import trio

from pmesh.errors import ConfigError, UsageError
from pmesh.launches.agent.groups import Child, start_group
from pmesh.launches.rules.restarts import (
    STEADY_S,
    count_failures,
    describe_end,
    exit_code,
    wait_before_start,
)
from pmesh.terminal.lines import complain, ending_signals

# The machine is short of a resource, perhaps because of the crash itself.
_PASSING_ERRORS = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


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
                failures = count_failures(failures, ran_s=ran_s)
                if failures > self._restarts:
                    complain(f"{self._name} {ending}{self._why_not_again()}")
                    return exit_code(code)
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
        return code, describe_end(code)


def _name_of(command: Sequence[str]) -> str:
    """Return the name that a person would use: that of the Python script, if there is one."""
    script = next((word for word in command if word.endswith(".py")), command[0])
    return Path(script).name
