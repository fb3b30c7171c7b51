"""`pmesh ping`, against an agent that answers."""

import json
import socket as sockets
from pathlib import Path

import pytest

from pmesh.cli.app import run
from pmesh.core.wire.control import Pinged, Stopping
from pmesh.core.wire.framing import frame
from pmesh.core.wire.session import encode
from tests.worlds.fake_status_agent import WAYS, agent_at, answer_well


def test_each_way_has_a_line_and_the_last_says_which_is_used(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = "941 Mbit/s measured, 1000 Mbit/s nominal"
    with agent_at(socket, answer_well):
        assert run(["ping", "mac-2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{'en5 → en0':20}  10.0.0.2:24160        wired          0.31 ms  {speeds}",
        "en1 → en�1            10.1.0.2:24160        wifi         no answer in 3 s",
        f"{'bridge0':42}  thunderbolt  mac-2 has no address in 10.9.0.0/16",
        "en5 → en0 is used: wired is better than wifi",
    ]


def test_json_is_one_line(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with agent_at(socket, answer_well):
        assert run(["ping", "mac-2", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert (report["schema"], report["name"]) == (1, "mac-2")
    assert [way["rtt_ms"] for way in report["ways"]] == [0.314, None, None]
    assert report["used"] == {
        "interface": "en5",
        "remote": "en0",
        "why": "wired is better than wifi",
    }


def test_the_exit_code_says_that_no_way_answers(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(connection: sockets.socket) -> None:
        connection.recv(4096)
        connection.sendall(frame(encode(WAYS[1])) + frame(encode(Pinged())))

    with agent_at(socket, answer):
        assert run(["ping", "mac-2"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "no way to mac-2 is used"


def test_an_unknown_name_is_an_error_with_the_names_that_there_are(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent_at(socket, answer_well):
        assert run(["ping", "x"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "UsageError: no other machine is called 'x'; there are mac-2\n"
    assert not shown.out


def test_another_answer_is_named(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(connection: sockets.socket) -> None:
        connection.recv(4096)
        connection.sendall(frame(encode(Stopping(pid=1))))

    with agent_at(socket, answer):
        assert run(["ping", "mac-2"]) == 1
    assert "sent what no agent sends (Stopping)" in capsys.readouterr().err
