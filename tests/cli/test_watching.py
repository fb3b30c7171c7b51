"""`pmesh status` and `pmesh down`, against an agent that answers."""

import json
import time
from pathlib import Path

import pytest

from pmesh.cli.app import run
from pmesh.client.home import home_directory, socket_path
from tests.cli.fake_agent import PICTURE, agent_at, answer_well


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PMESH_HOME", str(tmp_path))
    return socket_path(home_directory())


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between two pictures; they take no time."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def test_status_shows_the_ring(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with agent_at(socket, answer_well):
        assert run(["status"]) == 0
    assert "● mac-1 ★" in capsys.readouterr().out


def test_status_json_is_the_documented_picture(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent_at(socket, answer_well):
        assert run(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["node"]["id"] == PICTURE.node.id


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_watching_goes_on_until_the_agent_has_gone(
    socket: Path, slept: list[float], form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with agent_at(socket, answer_well, answer_well):
        assert run(["status", "--watch", *form]) == 1
    assert slept == [1.0, 1.0]
    shown = capsys.readouterr()
    assert shown.err.startswith("AgentNotRunning: ")
    assert "mac-1" in shown.out


def test_watching_on_a_terminal_draws_over_what_stands_there(
    socket: Path,
    slept: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with agent_at(socket, answer_well, answer_well):
        assert run(["status", "--watch"]) == 1
    assert len(slept) == 2
    shown = capsys.readouterr().out
    assert shown.count("View 7") == 2
    assert "\x1b[?1049h" in shown, "on the alternate screen"


def test_watching_ends_by_ctrl_c(
    socket: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press_ctrl_c(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", press_ctrl_c)
    with agent_at(socket, answer_well):
        assert run(["status", "--watch"]) == 130
    assert not capsys.readouterr().err


def test_down_says_who_has_left(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with agent_at(socket, answer_well):
        assert run(["down"]) == 0
    assert f"pid {2**22 + 1}" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["down"]])
def test_without_an_agent_the_socket_and_the_command_are_named(
    socket: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"AgentNotRunning: no agent listens at {socket}")
    assert "'pmesh up'" in error
    assert error.count("\n") == 1
