"""What `pmesh run` has started does not outlive it. Real processes, waited for by their pipes."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import trio

from pmesh.launches.agent.groups import start_group

RUN = [sys.executable, "-m", "pmesh.cli", "run", "--"]
FAMILY = "sleep 1000 & echo here; wait"  # the shell and what it has started

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `pmesh run` with a shell script; its output ends with the last of all processes."""
    with contextlib.ExitStack() as started:

        def start_script(script: str) -> "subprocess.Popen[str]":
            process = subprocess.Popen(
                [*RUN, "sh", "-c", script],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield start_script


def await_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_and_all_that_it_started(
    start: Start, number: signal.Signals, code: int
) -> None:
    process = start(FAMILY)
    assert await_line(process) == "here\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)  # the end of the pipe: nobody has it open any more
    assert (out, err, process.returncode) == ("", "", code)


def test_killed_it_takes_the_command_along(start: Start) -> None:
    process = start(FAMILY)
    assert await_line(process) == "here\n"
    process.kill()
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == ("", -signal.SIGKILL)


def test_what_a_command_that_ended_well_has_left_behind_is_its_own_affair(
    start: Start, tmp_path: Path
) -> None:
    door = tmp_path / "door"
    os.mkfifo(door)
    process = start(f'(read line < {door}; echo "$line") & exit 0')
    assert process.wait(timeout=30) == 0
    door.write_text("stayed\n")
    out, err = process.communicate(timeout=30)
    assert (out, err) == ("stayed\n", "")


async def test_what_a_crashed_command_has_left_behind_is_ended(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out")
    script = f"exec > {tmp_path / 'out'}; sleep 1000 & echo here; kill -KILL $$"
    async with start_group(["sh", "-c", script]) as child:
        pipe = await trio.open_file(tmp_path / "out")
        assert await child.wait() == -signal.SIGKILL
        child.send_signal(signal.SIGTERM)  # to nobody: it has ended
    async with pipe:
        assert await pipe.read() == "here\n"


async def test_a_group_is_ended_when_its_block_is_left_by_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out")
    group = start_group(["sh", "-c", f"exec > {tmp_path / 'out'}; {FAMILY}"])
    await group.__aenter__()
    async with await trio.open_file(tmp_path / "out") as pipe:
        assert await pipe.readline() == "here\n"
        assert not await group.__aexit__(ZeroDivisionError, ZeroDivisionError(), None)
        assert await pipe.read() == ""


async def test_a_command_whose_guard_has_been_killed_runs_to_its_end() -> None:
    before = set(psutil.Process().children())
    async with start_group(["sleep", "1000"]) as child:
        begun = set(psutil.Process().children()) - before
        (guard,) = [each for each in begun if each.cmdline()[0] == "/bin/sh"]
        guard.kill()
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == -signal.SIGTERM
