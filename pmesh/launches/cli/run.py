"""`pmesh run`: restarts a command that crashes, so that its machine comes back.

No process that the command started outlives this one.
"""

import errno
import functools
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import trio

from pmesh.errors import ConfigError, UsageError
from pmesh.home_paths import CONNECTS_VARIABLE
from pmesh.launches.agent.groups import Child, start_group
from pmesh.launches.rules.restarts import (
    AT_ONCE_S,
    STEADY_S,
    count_failures,
    describe_end,
    exit_code,
    fails_by_itself,
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
    with _mark_of_connecting() as (environment, has_connected):
        start = functools.partial(start_group, command, environment=environment)
        return trio.run(keep_running, start, _name_of(command), restarts, has_connected)


@contextmanager
def _mark_of_connecting() -> Generator[tuple[dict[str, str], Callable[[], bool]]]:
    """Yield an environment, and whether a program in it has come to call `pmesh.connect`."""
    environment = {k: v for k, v in os.environ.items() if k != CONNECTS_VARIABLE}
    try:
        directory = tempfile.TemporaryDirectory(prefix="pmesh-run-", ignore_cleanup_errors=True)
    except OSError:  # a full disk is no reason not to run: then nobody knows
        yield environment, lambda: True
        return
    with directory as name:
        mark = Path(name, "connects")
        yield {**environment, CONNECTS_VARIABLE: str(mark)}, mark.exists


async def keep_running(
    start: Starter, name: str, restarts: int, has_connected: Callable[[], bool] = lambda: True
) -> int:
    """Restart the command until it succeeds, a signal comes, or it fails too often.

    A command that fails before it `has_connected` would fail again; one that has may have lost its
    peers.
    """
    runner = Runner(start, name, restarts, has_connected)
    async with trio.open_nursery() as nursery:
        await nursery.start(runner.pass_signals_on)
        code = await runner.run()
        nursery.cancel_scope.cancel()
    return code


class _End(NamedTuple):
    """How a run has ended."""

    code: int
    """As in `subprocess`."""
    text: str
    by_itself: bool
    """False if it was signalled from outside, or the machine was short of a resource."""


class Runner:
    """Runs the command again and again."""

    def __init__(
        self, start: Starter, name: str, restarts: int, has_connected: Callable[[], bool]
    ) -> None:
        self._start = start
        self._name = name
        self._restarts = restarts
        self._has_connected = has_connected
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
            end = await self._run_once(first=wait_s == 0)
            if end.code == 0:
                return 0
            if not self._signalled.is_set():
                ran_s = trio.current_time() - began
                failures = count_failures(failures, ran_s=ran_s)
                at_once = end.by_itself and ran_s < AT_ONCE_S and not self._has_connected()
                if at_once or failures > self._restarts:
                    complain(f"{self._name} {end.text}{self._why_not_again(at_once=at_once)}")
                    return exit_code(end.code)
                wait_s = wait_before_start(wait_s, ran_s=ran_s)
                complain(f"{self._name} {end.text}; starting it again in {wait_s:g} s")
                with trio.move_on_after(wait_s):
                    await self._signalled.wait()
            if self._signalled.is_set():
                return 128 + self._signal  # as in shells

    def _why_not_again(self, *, at_once: bool) -> str:
        if not self._restarts:
            return "; --restarts 0 does not start it again"
        if at_once:
            return (
                f" in its first {AT_ONCE_S:g} s, before it looked for an agent: it is not started "
                "again; mend what the lines above say"
            )
        return (
            f", and failed {self._restarts + 1} times in a row, each time in less than "
            f"{STEADY_S:g} s; not starting it again: see its last lines above, or give --restarts"
        )

    async def _run_once(self, *, first: bool) -> _End:
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
            return _End(1, f"could not be started: {e.strerror}", by_itself=False)
        finally:
            self._child = None
        return _End(code, describe_end(code), by_itself=fails_by_itself(code))


def _name_of(command: Sequence[str]) -> str:
    """Return the name that a person would use: that of the Python script, if there is one."""
    script = next((word for word in command if word.endswith(".py")), command[0])
    return Path(script).name
