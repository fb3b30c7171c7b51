"""One question to the agent, one answer, or an error that says what to do."""

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pmesh.agent.events import decode_events
from pmesh.agent.schema import decode_status
from pmesh.cli.app import run
from pmesh.client.connect import connect
from pmesh.client.control import ask_events, ask_status, stop_agent
from pmesh.core.wire.control import StatusReply, Stopping
from pmesh.core.wire.framing import frame
from pmesh.core.wire.session import encode
from pmesh.core.wire.trainer import Leave
from pmesh.errors import AgentNotRunning, AgentStopped, ProtocolError
from pmesh.testing import agent_in_a_thread
from tests.worlds.fake_status_agent import agent_at, answer_well, answer_with, make_chronicle

Ask = Callable[[Path], object]


@pytest.fixture(params=[ask_status, ask_events, stop_agent])
def ask(request: pytest.FixtureRequest) -> Ask:
    question: Ask = request.param
    return question


def hang_up(connection: socket.socket) -> None:
    connection.recv(4096)


def reset(connection: socket.socket) -> None:
    connection.recv(1)  # closing with the rest unread is a reset


def test_an_answer_in_many_pieces_is_read_whole(tmp_path: Path) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        for byte in frame(encode(StatusReply(b"{}"))):
            connection.send(bytes([byte]))

    with agent_at(tmp_path / "agent.sock", answer):
        assert ask_status(tmp_path) == b"{}"


def test_the_status_of_an_agent_shows_the_step_that_a_script_has_reached(tmp_path: Path) -> None:
    with agent_in_a_thread(tmp_path), connect("digits", 1, home=tmp_path) as mesh:
        assert decode_status(ask_status(tmp_path)).jobs[0].step == 0
        for _ in range(3):
            mesh.sync({"w": 1.0})
        (job,) = decode_status(ask_status(tmp_path)).jobs
        assert (job.step, [rank.step for rank in job.ranks]) == (mesh.step, [3])


@pytest.mark.parametrize(("after", "told"), [(-1, [0, 1]), (0, [1]), (1, [])])
def test_events_are_asked_from_a_number_on(tmp_path: Path, after: int, told: list[int]) -> None:
    event_log = make_chronicle()
    event_log.note("peer joined", "mac-2 joined")
    with agent_at(tmp_path / "agent.sock", answer_with(event_log)):
        page = decode_events(ask_events(tmp_path, after))
    assert [event.number for event in page.events] == told


def test_stopping_returns_when_the_agent_has_left(tmp_path: Path) -> None:
    with agent_at(tmp_path / "agent.sock", answer_well):
        assert stop_agent(tmp_path) == 2**22 + 1


def test_stopping_also_ends_by_a_reset(tmp_path: Path) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(1)  # closing with the rest unread is a reset
        connection.sendall(frame(encode(Stopping(pid=7))))

    with agent_at(tmp_path / "agent.sock", answer):
        assert stop_agent(tmp_path) == 7


def test_no_socket_names_the_path_and_the_command(tmp_path: Path, ask: Ask) -> None:
    with pytest.raises(AgentNotRunning, match=r"no agent listens at .*/agent\.sock .*'pmesh up'"):
        ask(tmp_path)


def test_the_socket_of_a_killed_agent_is_no_agent(tmp_path: Path, ask: Ask) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent.sock"))
    with pytest.raises(AgentNotRunning, match="refused"):
        ask(tmp_path)


def test_an_agent_that_hangs_up_is_named(tmp_path: Path, ask: Ask) -> None:
    with (
        agent_at(tmp_path / "agent.sock", hang_up),
        pytest.raises(AgentStopped, match="has ended"),
    ):
        ask(tmp_path)


def test_an_agent_that_resets_is_named(tmp_path: Path, ask: Ask) -> None:
    with (
        agent_at(tmp_path / "agent.sock", reset),
        pytest.raises(AgentStopped, match="has ended"),
    ):
        ask(tmp_path)


def test_a_silent_agent_is_not_waited_for_longer_than_told(tmp_path: Path) -> None:
    def stay_silent(connection: socket.socket) -> None:
        while connection.recv(4096):
            pass

    with (
        agent_at(tmp_path / "agent.sock", stay_silent),
        pytest.raises(AgentStopped, match=r"for 0\.01 s"),
    ):
        ask_status(tmp_path, timeout_s=0.01)


def test_an_agent_that_promises_to_stop_and_does_not_is_named(tmp_path: Path) -> None:
    def promise(connection: socket.socket) -> None:
        connection.sendall(frame(encode(Stopping(pid=7))))
        while connection.recv(4096):
            pass

    with (
        agent_at(tmp_path / "agent.sock", promise),
        pytest.raises(AgentStopped, match=r"for 0\.01 s"),
    ):
        stop_agent(tmp_path, timeout_s=0.01)


@pytest.mark.parametrize(
    "reply",
    [frame(encode(Leave())), frame(b"\xc1"), b"\xff\xff\xff\xff", frame(encode(Stopping(pid=1)))],
)
def test_an_answer_to_another_question_is_a_protocol_error(tmp_path: Path, reply: bytes) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(reply)

    with agent_at(tmp_path / "agent.sock", answer), pytest.raises(ProtocolError):
        ask_status(tmp_path)


def test_a_status_is_no_answer_to_a_stop(tmp_path: Path) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(frame(encode(StatusReply(b""))))

    with (
        agent_at(tmp_path / "agent.sock", answer),
        pytest.raises(ProtocolError, match="not Stopping"),
    ):
        stop_agent(tmp_path)


@pytest.mark.parametrize("name", ["a\udcff", "a" * 300, "two\nlines"])
@pytest.mark.parametrize("command", ["ping", "forget", "remove", "logs", "stop", "fetch"])
def test_a_name_that_no_agent_reads_is_refused_before_it_is_sent(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--home", str(tmp_path), name]) == 1
    said = capsys.readouterr().err
    reason = "the agent takes no such" if name.isascii() else "'a.udcff' is not valid UTF-8"
    assert re.match(f"UsageError: {reason}.*\n$", said)


def test_a_number_that_no_agent_reads_is_refused_before_it_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fetch", "x", "--limit", "99999999999GiB", "--home", str(tmp_path)]) == 1
    mpi = ["run", "--on", "all", "--engine", "mpi", "--count=-1", "--home", str(tmp_path)]
    assert run(mpi) == 1
    assert capsys.readouterr().err.count("UsageError: the agent takes no such value: ") == 2
