"""`pmesh run`: when a command is started again, and when not. Time is a clock that jumps."""

import errno
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.cli.app import run
from pmesh.errors import UsageError
from pmesh.launches.agent.groups import Child
from pmesh.launches.cli.run import keep_running
from pmesh.launches.rules import restarts
from pmesh.launches.rules.restarts import LONGEST_WAIT_S, STEADY_S, wait_before_start
from tests.worlds.faults import Faults

TERM = signal.SIGTERM
INT = signal.SIGINT
KILLED = -signal.SIGKILL


class FakeRun:
    """A run that takes its time and ends; a signal ends it, if it is to."""

    def __init__(self, ran_s: float, code: int, *, heeds: tuple[int, ...] = (INT, TERM)) -> None:
        self._ran_s = ran_s
        self._code = code
        self._heeds = heeds
        self._over = trio.Event()
        self.came: list[int] = []

    async def wait(self) -> int:
        with trio.move_on_after(self._ran_s):
            await self._over.wait()
        return self._code

    def send_signal(self, number: int) -> None:
        self.came.append(number)
        if number in self._heeds:
            self._code = self._code if self._code == 0 else -number
            self._over.set()


class FakeCommand:
    """Runs or errors, one after the other, and when each began."""

    def __init__(
        self,
        clock: MockClock,
        *runs: FakeRun | OSError,
        starting: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._runs = list(runs)
        self._starting = starting
        self._zero = clock.current_time()
        self.began: list[float] = []
        self.ended = 0

    @property
    def elapsed_s(self) -> float:
        return self._clock.current_time() - self._zero

    @asynccontextmanager
    async def start(self) -> AsyncGenerator[Child]:
        self.began.append(self.elapsed_s)
        self._starting()
        await wait_all_tasks_blocked()  # so that a signal is heard before the process is there
        one = self._runs.pop(0)
        if isinstance(one, OSError):
            raise one
        yield one
        self.ended += 1


def from_outside(number: int, *, after_s: float) -> Callable[[], Awaitable[None]]:
    """A task that sends this process a signal."""

    async def send() -> None:
        await trio.sleep(after_s)
        signal.raise_signal(number)

    return send


@given(st.lists(st.floats(0, STEADY_S, exclude_max=True), min_size=1, max_size=12))
def test_waits_double_up_to_the_longest_while_a_command_keeps_crashing(runs: list[float]) -> None:
    wait_s, waits = 0.0, list[float]()
    for ran_s in runs:
        wait_s = wait_before_start(wait_s, ran_s=ran_s)
        waits.append(wait_s)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, *[LONGEST_WAIT_S] * 12][: len(runs)]


@given(st.floats(0, LONGEST_WAIT_S), st.floats(STEADY_S, 1e6))
def test_the_wait_after_a_long_run_is_short_again(previous_s: float, ran_s: float) -> None:
    assert wait_before_start(previous_s, ran_s=ran_s) == 1.0


async def test_a_command_that_crashes_is_started_again_until_it_ends_well(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = FakeRun(5, KILLED), FakeRun(0.5, 1), FakeRun(100, -40), FakeRun(7, 0)
    command = FakeCommand(autojump_clock, *runs)
    assert await keep_running(command.start, "train.py", 10) == 0
    assert command.began == [0, 5 + 1, 6.5 + 2, 108.5 + 1]
    assert command.ended == 4
    assert capsys.readouterr().err.splitlines() == [
        "train.py ended by SIGKILL; starting it again in 1 s",
        "train.py ended with exit code 1; starting it again in 2 s",
        "train.py ended by signal 40; starting it again in 1 s",
    ]


async def test_a_command_that_ends_well_at_once_is_run_once(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await keep_running(FakeCommand(autojump_clock, FakeRun(1, 0)).start, "train.py", 10) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("number", [INT, TERM, signal.SIGHUP])
async def test_a_signal_is_passed_on_and_ends_it(
    autojump_clock: MockClock, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    one = FakeRun(1000, 1, heeds=(number,))
    command = FakeCommand(autojump_clock, one)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(from_outside(number, after_s=3))
        assert await keep_running(command.start, "train.py", 10) == 128 + number
    assert command.elapsed_s == 3
    assert one.came == [number]
    assert not capsys.readouterr().err


async def test_every_signal_reaches_a_command_and_the_first_one_counts(
    autojump_clock: MockClock,
) -> None:
    one = FakeRun(1000, 1, heeds=(TERM,))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(from_outside(INT, after_s=1))
        nursery.start_soon(from_outside(INT, after_s=2))
        nursery.start_soon(from_outside(TERM, after_s=3))
        assert await keep_running(FakeCommand(autojump_clock, one).start, "train.py", 10) == 130
    assert one.came == [INT, INT, TERM]


async def test_a_command_that_ends_well_after_a_signal_has_ended_well(
    autojump_clock: MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(from_outside(TERM, after_s=1))
        assert (
            await keep_running(FakeCommand(autojump_clock, FakeRun(1000, 0)).start, "line.py", 10)
            == 0
        )


async def test_a_signal_between_two_runs_ends_it_at_once(autojump_clock: MockClock) -> None:
    command = FakeCommand(autojump_clock, FakeRun(1, 1), FakeRun(1, 1), FakeRun(1, 1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(from_outside(TERM, after_s=3.5))  # the second wait is from 3 to 5
        assert await keep_running(command.start, "train.py", 10) == 143
    assert command.elapsed_s == 3.5
    assert command.ended == 2


async def test_a_signal_while_the_command_is_being_started_reaches_it(
    autojump_clock: MockClock,
) -> None:
    one = FakeRun(1000, 1)
    command = FakeCommand(autojump_clock, one, starting=lambda: signal.raise_signal(TERM))
    assert await keep_running(command.start, "train.py", 10) == 143
    assert one.came == [TERM]


async def test_what_can_not_be_started_is_an_error_at_once(autojump_clock: MockClock) -> None:
    for number in (errno.ENOENT, errno.EACCES, errno.ENOMEM):
        command = FakeCommand(autojump_clock, OSError(number, "reason"))
        with pytest.RaisesGroup(
            pytest.RaisesExc(UsageError, match="can't start 'trian.py': reason;")
        ):
            await keep_running(command.start, "trian.py", 10)


async def test_what_can_not_be_started_again_for_lack_of_memory_is_tried_again(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    command = FakeCommand(
        autojump_clock, FakeRun(1, 1), OSError(errno.ENOMEM, "no memory"), FakeRun(1, 0)
    )
    assert await keep_running(command.start, "train.py", 10) == 0
    assert command.began == [0, 2, 4]
    assert capsys.readouterr().err.splitlines()[1] == (
        "train.py could not be started: no memory; starting it again in 2 s"
    )
    command = FakeCommand(autojump_clock, FakeRun(1, 1), OSError(errno.ENOENT, "it is gone"))
    with pytest.RaisesGroup(pytest.RaisesExc(UsageError, match="it is gone")):
        await keep_running(command.start, "train.py", 10)


async def test_a_command_that_keeps_failing_is_given_up(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    command = FakeCommand(autojump_clock, *[FakeRun(0.5, 3) for _ in range(4)])
    assert await keep_running(command.start, "train.py", 3) == 3
    assert command.ended == 4
    assert capsys.readouterr().err.splitlines()[-1] == (
        "train.py ended with exit code 3, and failed 4 times in a row, each time in less than "
        "60 s; not starting it again: see its last lines above, or give --restarts"
    )


async def test_a_run_of_a_minute_begins_a_new_count(autojump_clock: MockClock) -> None:
    runs = [FakeRun(0.5, 1), FakeRun(STEADY_S, 1), FakeRun(0.5, 1), FakeRun(0.5, KILLED)]
    command = FakeCommand(autojump_clock, *runs)
    assert await keep_running(command.start, "train.py", 2) == 137
    assert command.ended == 4


async def test_without_restarts_a_failure_is_the_end(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    command = FakeCommand(autojump_clock, FakeRun(0.5, 1))
    assert await keep_running(command.start, "train.py", 0) == 1
    assert "--restarts 0 does not start it again" in capsys.readouterr().err


def test_restarts_are_counted_from_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--restarts", "-1", "true"]) == 2
    assert "--restarts must be at least 0, not -1" in capsys.readouterr().err


def test_the_first_word_that_is_no_option_begins_the_command(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["sh", "-c", 'printf "%s," "$@"', "sh", "--help", "--restarts", "x"]
    for own in ([], ["--restarts", "0"], ["--restarts=0"]):
        assert run(["run", *own, *words]) == 0
        assert capfd.readouterr().out == "--help,--restarts,x,"
    assert run(["run", "--help"]) == 0
    assert "--restarts" in capfd.readouterr().out


def test_the_command_line_runs_a_command_with_its_own_options(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["sh", "-c", 'printf "%s," "$@"', "sh", "--help", "-x", "", "--", "--json"]
    assert run(["run", "--", *words]) == 0
    assert capfd.readouterr().out == "--help,-x,,--,--json,"


def test_a_command_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--", "/no/such/trainer", "x.py"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "UsageError: can't start '/no/such/trainer': No such file or directory; "
    )
    assert error.count("\n") == 1


def test_no_command_is_a_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: there is no command; type for example: pmesh run python train.py\n"
    )


async def test_a_command_that_fails_at_once_before_it_connects_is_not_started_again(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    command = FakeCommand(autojump_clock, FakeRun(0.5, KILLED), FakeRun(0.5, 1))
    assert await keep_running(command.start, "bad.py", 10, lambda: False) == 1
    assert command.ended == 2  # it may have been killed for lack of memory: that passes
    assert capsys.readouterr().err.splitlines()[-1] == (
        "bad.py ended with exit code 1 in its first 20 s, before it looked for an agent: it is "
        "not started again; mend what the lines above say"
    )


async def test_a_command_that_fails_late_or_for_lack_of_memory_is_started_again(
    autojump_clock: MockClock,
) -> None:
    runs = FakeRun(20, 1), OSError(errno.ENOMEM, "no memory"), FakeRun(1, 0)
    command = FakeCommand(autojump_clock, *runs)
    assert await keep_running(command.start, "train.py", 10, lambda: False) == 0


def test_what_fails_before_it_connects_runs_once_and_what_finds_no_agent_is_run_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], faults: Faults
) -> None:
    faults.limit(restarts, "FIRST_WAIT_S", 0.0)
    connect = f"import pmesh; pmesh.connect('line', home={str(tmp_path)!r})"
    for script, starts in (
        ("1 +", 0),
        ("print('starts'); x", 1),
        ("import pmesh; print('starts'); pmesh.connect()", 1),
        (f"print('starts'); {connect}", 2),
    ):
        words = [sys.executable, "-c", script]
        assert run(["run", "--restarts", "1", "--", *words]) == 1
        out, err = capfd.readouterr()
        assert out.splitlines() == ["starts"] * starts
        assert ("before it looked for an agent" in err) == (starts < 2)
