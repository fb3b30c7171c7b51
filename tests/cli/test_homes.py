"""Every command refuses a home that is not under its user's control, and says what mends it."""

import shlex
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import pmesh
from pmesh.agent.home import load_mesh_key, store_mesh_key
from pmesh.cli import up
from pmesh.cli.app import run
from pmesh.core.identity.keys import MeshKey, mesh_key_text
from pmesh.errors import ConfigError
from tests.cli.homes import use_agent, use_home
from tests.worlds.system import be_user, type_in

KEY = MeshKey(bytes(range(32)))
KEEPS_KEYS = ["up", "up --detach", "key new", "key show", "key set", "join 7-guitar-lemon"]
ASKS_THE_AGENT = [
    "status",
    "status --watch",
    "events",
    "events --follow",
    "bench",
    "down",
    "invite",
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "my home"
    use_home(home, monkeypatch)
    type_in(monkeypatch, mesh_key_text(KEY))
    use_agent(None, monkeypatch)
    monkeypatch.setattr(up, "start_detached", None)
    home.mkdir(mode=0o700)
    return home


def refusal(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which the command, or a script, has refused its home."""
    if command == "connect":
        with pytest.raises(ConfigError) as caught:
            pmesh.connect("job")
        return str(caught.value)
    assert run(command.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("ConfigError: ")
    assert shown.err.count("\n") == 1
    return shown.err.rstrip()


def mend(message: str) -> None:
    subprocess.run(shlex.split(message.rpartition("run: ")[2]), check=True)


@pytest.mark.parametrize("command", [*KEEPS_KEYS, *ASKS_THE_AGENT, "connect"])
@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_home_that_others_can_write_to_is_refused_until_its_command_has_mended_it(
    home: Path, command: str, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    home.chmod(mode)

    message = refusal(command, capsys)

    assert f"other users can change the files in {home};" in message
    assert not list(home.iterdir())
    mend(message)
    assert run(["key", "set"]) == 0


@pytest.mark.parametrize("command", KEEPS_KEYS)
def test_a_home_that_others_can_enter_is_refused_where_keys_are_used(
    home: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    home.chmod(0o711)

    message = refusal(command, capsys)

    assert f"{home} holds keys, and other users can enter it" in message
    mend(message)
    assert run(["key", "set"]) == 0


@pytest.mark.parametrize("command", [*KEEPS_KEYS, *ASKS_THE_AGENT, "connect"])
def test_a_home_of_another_user_is_refused(
    home: Path,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    be_user(monkeypatch, home.stat().st_uid + 1)

    assert f"{home} belongs to another user" in refusal(command, capsys)
    assert not list(home.iterdir())


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that all users can reach and write to, with a home in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        Path(top).chmod(0o755)
        shared = Path(top).resolve() / "shared"
        (shared / "home").mkdir(parents=True)
        (shared / "home").chmod(0o700)
        shared.chmod(0o777)
        monkeypatch.setenv("PMESH_HOME", str(shared / "home"))
        yield shared


@pytest.mark.parametrize("command", [*KEEPS_KEYS, *ASKS_THE_AGENT, "connect"])
def test_a_home_that_others_can_replace_is_refused_until_its_command_has_mended_it(
    shared: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(command, capsys)

    assert f"any user can rename files in {shared}, and so replace {shared}/home" in message
    mend(message)
    assert run(["key", "set"]) == 0


def test_what_others_cannot_reach_they_cannot_replace(shared: Path) -> None:
    shared.parent.chmod(0o700)
    assert run(["key", "set"]) == 0


def test_a_home_that_does_not_exist_is_no_reason_to_refuse(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.rmdir()
    assert run(["status"]) == run(["key", "show"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [error.partition(": ")[0] for error in errors] == ["AgentNotRunning", "KeyFileError"]
    assert not home.exists()


@pytest.mark.parametrize("command", ["up --detach", *ASKS_THE_AGENT, "connect"])
def test_a_socket_that_is_a_link_is_refused_until_its_command_has_mended_it(
    home: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store_mesh_key(home, KEY)
    with socket.socket(socket.AF_UNIX) as somebody:
        somebody.bind(str(home.parent / "s"))
        somebody.listen()
        (home / "agent.sock").symlink_to(home.parent / "s")

        message = refusal(command, capsys)

    assert f"{home}/agent.sock is not a socket of yours" in message
    mend(message)
    assert run(["status"]) == 1
    assert capsys.readouterr().err.startswith("AgentNotRunning")
    assert load_mesh_key(home) == KEY
