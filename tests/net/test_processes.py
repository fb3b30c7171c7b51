"""Whether another process has been stopped: of real ones, and by macOS's words."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator

import psutil
import pytest

from pmesh.net.processes import is_stopped


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
    monkeypatch: pytest.MonkeyPatch, status: str, *, stopped: bool
) -> None:
    monkeypatch.setattr(psutil.Process, "status", lambda _: status)
    assert is_stopped(os.getpid()) is stopped


def test_a_process_that_may_not_be_looked_at_is_not_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(process: psutil.Process) -> str:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "status", refuse)
    assert not is_stopped(os.getpid())
