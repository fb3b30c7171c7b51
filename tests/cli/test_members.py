"""`pmesh members` and `remove`, against an agent that answers."""

import json
import socket as sockets
from pathlib import Path

import pytest

from pmesh.cli.app import run
from pmesh.core.wire.framing import frame
from pmesh.core.wire.session import encode
from pmesh.home_paths import home_directory, socket_path
from pmesh.members.wire import KeyRotated, MachineTold, MemberRow, MemberRows
from simulation.wire import AnyReply
from tests.worlds.fake_status_agent import IDS, Answer, agent_at

ROWS = (
    MemberRow(
        id=IDS[0], name="mac-1", state="here", version="0.1.0", first_seen=0, last_seen=0, me=True
    ),
    MemberRow(
        id=IDS[1], name="mac-2", state="away", version="", first_seen=86400 * 365, last_seen=1e9
    ),
    MemberRow(
        id=IDS[2],
        name="studio",
        state="removed",
        version="0.1.0",
        first_seen=86400 * 365,
        last_seen=1e9,
        removed_by="mac-1",
    ),
)


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PMESH_HOME", str(tmp_path))
    monkeypatch.setenv("TZ", "UTC")
    return socket_path(home_directory())


def answering(reply: AnyReply) -> Answer:
    def answer(connection: sockets.socket) -> None:
        connection.recv(4096)
        connection.sendall(frame(encode(reply)))

    return answer


def test_each_machine_has_a_line(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with agent_at(socket, answering(MemberRows(ROWS))):
        assert run(["members"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["mac-1", "aaaaaaaa", "0.1.0", "now", "this", "machine"]
    assert lines[2][:2] == ["mac-2", "bbbbbbbb"]
    assert lines[2][2].startswith("1971-01-0")
    assert lines[2][-1] == "away"
    assert lines[3][-3:] == ["removed", "by", "mac-1"]


def test_json_is_one_line(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with agent_at(socket, answering(MemberRows(ROWS))):
        assert run(["members", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report["schema"] == 1
    assert [member["state"] for member in report["members"]] == ["here", "away", "removed"]
    assert report["members"][2]["removed_by"] == "mac-1"


def test_a_removal_says_who_knows_of_it_and_what_it_does_not_protect_against(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = MachineTold("studio", told=("mac-2",), away=("mac-3", "mac-4"))
    with agent_at(socket, answering(told)):
        assert run(["remove", "studio"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "studio is shut out of the mesh",
        "told now: mac-2",
        "told when they are back: mac-3, mac-4",
    ]
    assert err == (
        "studio still holds the mesh key, with which it could come back as another machine; "
        "if it was stolen, type: pmesh key rotate\n"
    )


def test_a_removal_that_is_not_on_the_disk_says_so(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = MachineTold("studio", told=(), away=(), unwritten="can't write members: disk is full")
    with agent_at(socket, answering(told)):
        assert run(["remove", "--undo", "studio"]) == 0
    assert capsys.readouterr().err == (
        "this machine can't write members: disk is full; it tries again, and forgets what you have "
        "typed if its agent ends before that\n"
    )


@pytest.mark.parametrize("given", [False, True])
def test_a_new_key_says_who_has_it_and_who_gets_it(
    socket: Path,
    capsys: pytest.CaptureFixture[str],
    given: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    rotated = KeyRotated(told=("mac-2",), away=("mac-3",), removed=("studio",), given=given)
    with agent_at(socket, answering(rotated)):
        assert run(["key", "rotate", "--without", "studio"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "The mesh has a new key, and this machine uses it. Jobs go on.",
        "have it now: mac-2",
        "get it when they are back: mac-3",
        "get none, as they were removed: studio",
    ]
    assert ("PMESH_KEY" in err) == given


def test_of_hundreds_of_machines_that_are_away_some_are_named_and_the_rest_counted(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A member that made up machines is one reason to ask for a new key."""
    away = tuple(f"mac-{number}" for number in range(300))
    rotated = KeyRotated(told=(), away=away, removed=(), given=False)
    with agent_at(socket, answering(rotated)):
        assert run(["key", "rotate"]) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert line.startswith("get it when they are back: mac-0, mac-1, ")
    assert line.endswith(", mac-15, and 284 more: 'pmesh members' lists all")


def test_an_undone_removal_says_so(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with agent_at(socket, answering(MachineTold("studio", told=(), away=()))):
        assert run(["remove", "--undo", "studio"]) == 0
    assert capsys.readouterr() == ("studio may be a member again\n", "")
