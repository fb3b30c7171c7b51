"""What a user reads of an agent that does not answer, or is gone: its state, its log, the cure."""

import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import pmesh
from pmesh.client.control import ask_status, stop_agent
from pmesh.client.session import connection, session
from pmesh.home_paths import LOCK_NAME, LOG_NAME
from simulation.wire import AnyRequest
from tests.worlds.fake_status_agent import agent_at
from tests.worlds.faults import Faults, Real
from tests.worlds.scripted_agent import ScriptedAgent, Step, TrainerSocket, joins, op_done, replies

PATIENCE_S = 20.0
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


def be_impatient(faults: Faults) -> None:
    """A call expects a word of its agent every hundredth of a second from now on."""
    faults.limit(connection, "FIRST_ANSWER_S", 0.01)
    for name in ("FIRST_ANSWER_S", "ANSWER_S"):
        faults.limit(session, name, 0.01)


@pytest.fixture
def looks(faults: Faults) -> threading.Semaphore:
    """Released each time that a call has found its agent silent, and looks at the process."""

    def look(found: Real, pid: int) -> object:
        looked.release()
        return found(pid)

    looked = threading.Semaphore(0)
    faults.around(psutil, "Process", look)
    return looked


def after_more(looks: threading.Semaphore, then: Step) -> Step:
    """A step that is taken once the call has looked and logged what it finds, perhaps again."""

    def step(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        while looks.acquire(blocking=False):
            pass  # one that has begun before may have come too early
        for _ in range(4):
            assert looks.acquire(timeout=PATIENCE_S)
        then(trainer, request)

    return step


def test_connect_warns_once_of_a_silent_agent_and_waits_on(
    tmp_path: Path,
    state: str,
    looks: threading.Semaphore,
    caplog: pytest.LogCaptureFixture,
    faults: Faults,
) -> None:
    be_impatient(faults)
    with (
        ScriptedAgent(tmp_path, after_more(looks, joins)),
        pmesh.connect("job", home=tmp_path) as mesh,
    ):
        assert mesh.rank == 0

    assert caplog.messages == [f"the agent at {tmp_path}/agent.sock does not answer: {state}"]


def test_a_call_warns_once_of_an_agent_that_falls_silent_and_waits_on(
    tmp_path: Path,
    state: str,
    looks: threading.Semaphore,
    caplog: pytest.LogCaptureFixture,
    faults: Faults,
) -> None:
    answers = after_more(looks, replies(op_done(0)))
    with ScriptedAgent(tmp_path, joins, answers), pmesh.connect("job", home=tmp_path) as mesh:
        be_impatient(faults)  # now: on a busy machine `connect` itself would warn of `joins`
        mesh.barrier()

    assert caplog.messages == [f"the agent at {tmp_path}/agent.sock does not answer: {state}"]


def test_a_call_that_waits_for_others_warns_only_once_the_agent_is_stopped(
    tmp_path: Path,
    process: subprocess.Popen[bytes],
    looks: threading.Semaphore,
    caplog: pytest.LogCaptureFixture,
    faults: Faults,
) -> None:
    def stops_late(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        assert caplog.messages == []
        stops(process)
        after_more(looks, replies(op_done(0)))(trainer, request)

    faults.limit(connection, "FIRST_ANSWER_S", 0.01)
    faults.limit(session, "ANSWER_S", math.inf)
    with (
        ScriptedAgent(tmp_path, joins, after_more(looks, stops_late)),
        pmesh.connect("job", home=tmp_path) as mesh,
    ):
        mesh.barrier()

    (warning,) = caplog.messages
    assert warning.endswith(f"(pid {process.pid}) is stopped; run 'kill -CONT {process.pid}'")


def test_a_call_gives_up_on_an_agent_that_stays_silent(
    tmp_path: Path, state: str, faults: Faults
) -> None:
    faults.limit(connection, "FIRST_ANSWER_S", 0.01)
    faults.limit(connection, "SILENCE_S", 0.03)
    with (
        ScriptedAgent(tmp_path, joins, replies(), replies()),
        pytest.raises(pmesh.AgentStopped) as caught,
        pmesh.connect("job", home=tmp_path) as mesh,
    ):
        mesh.barrier()

    assert str(caught.value) == (
        f"the agent at {tmp_path}/agent.sock has not answered for 0.03 s: {state}"
    )


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
