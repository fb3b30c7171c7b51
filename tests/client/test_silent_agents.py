"""What a user reads of an agent that does not answer, or is gone: its state, its log, the cure."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pmesh
from pmesh.client.control import ask_status, stop_agent
from pmesh.client.link import connection
from pmesh.core.wire.local import Request
from pmesh.paths import LOCK_NAME, LOG_NAME
from tests.worlds.fake_status_agent import agent_at
from tests.worlds.scripted_agent import ScriptedAgent, Trainer, joins

PROGRAM = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The one that the lock of the home in `tmp_path` names."""
    with subprocess.Popen(PROGRAM, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        (tmp_path / LOCK_NAME).write_text(f"{running.pid}\n")
        yield running
        running.kill()


def goes_on(process: subprocess.Popen[bytes]) -> str:
    return f"its process (pid {process.pid}) runs; run 'kill -9 {process.pid}; pmesh up'"


def stops(process: subprocess.Popen[bytes]) -> str:
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    return f"its process (pid {process.pid}) is stopped; run 'kill -CONT {process.pid}'"


def ends(process: subprocess.Popen[bytes]) -> str:
    process.kill()
    process.wait()
    return "its process is not running; start another with 'pmesh up'"


@pytest.fixture(params=[goes_on, stops, ends])
def state(request: pytest.FixtureRequest, process: subprocess.Popen[bytes]) -> str:
    """What the process does, and how that is told."""
    happens: Callable[[subprocess.Popen[bytes]], str] = request.param
    return happens(process)


def test_connect_warns_of_a_silent_agent_and_waits_on(
    tmp_path: Path,
    state: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def joins_late(trainer: Trainer, request: Request | None) -> None:
        while not caplog.messages:
            threading.Event().wait(0.001)
        joins(trainer, request)

    monkeypatch.setattr(connection, "FIRST_ANSWER_S", 0.01)
    with ScriptedAgent(tmp_path, joins_late), pmesh.connect("job", home=tmp_path) as mesh:
        assert mesh.rank == 0

    assert caplog.messages == [f"the agent at {tmp_path}/agent.sock does not answer: {state}"]


@pytest.mark.parametrize("ask", [ask_status, stop_agent])
def test_a_command_that_gets_no_answer_says_what_helps(
    tmp_path: Path, state: str, ask: Callable[..., object]
) -> None:
    with (
        agent_at(tmp_path / "agent.sock", stay_silent),
        pytest.raises(pmesh.AgentStopped) as caught,
    ):
        ask(tmp_path, timeout_s=0.01)

    assert str(caught.value) == (
        f"the agent at {tmp_path}/agent.sock has not answered for 0.01 s: {state}"
    )


def stay_silent(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def test_an_agent_that_has_ended_is_replaced_by_pmesh_up(tmp_path: Path) -> None:
    (tmp_path / LOG_NAME).touch()
    with ScriptedAgent(tmp_path, joins) as scripted:
        mesh = pmesh.connect("job", home=tmp_path)
        scripted.wait_until_closed()
        with pytest.raises(pmesh.AgentStopped) as caught:
            mesh.barrier()
        mesh.close()

    assert str(caught.value) == (
        f"the agent at {tmp_path}/agent.sock has ended; its log is {tmp_path}/agent.log; "
        "start another with 'pmesh up'"
    )
