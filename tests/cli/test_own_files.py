"""Files of the home that are links, or another user's: refused untouched, with what mends it."""

import errno
import fcntl
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import pytest

from pmesh.agent.home import hold_home, load_mesh_key, load_node_key, store_mesh_key
from pmesh.cli.app import run
from pmesh.core.identity.keys import MeshKey, mesh_key_text
from pmesh.errors import KeyFileError
from tests.cli.homes import use_agent, use_home
from tests.worlds.faults import Faults, Real
from tests.worlds.system import be_user, type_in

KEY = MeshKey(bytes(range(32)))
OTHER = MeshKey(bytes(range(32, 64)))
PRECIOUS = "what a link or another user's file leads to\n"

WHO_OPENS = {
    "agent.lock": ["up", "up --detach"],
    "agent.log": ["up --detach"],
    "node_key": ["up", "up --detach"],
    "mesh_key": ["up", "up --detach", "key show", "key new"],
}
each_file_and_command = pytest.mark.parametrize(
    ("name", "command"), [(name, command) for name, all_ in WHO_OPENS.items() for command in all_]
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with all its files, whose agent ends at once."""

    async def run_agent(*_: object) -> None:
        pass

    home = tmp_path / "home"
    use_home(home, monkeypatch)
    use_agent(run_agent, monkeypatch)
    home.mkdir(mode=0o700)
    store_mesh_key(home, KEY)
    load_node_key(home, entropy=bytes(32))
    with hold_home(home):
        pass
    (home / "agent.log").touch(0o600)
    return home


def refusal(command: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which the command has refused the file."""
    code = run(command.split())
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    error, file, _ = shown.err.split(" ", 2)
    assert file == str(path)
    assert {"ConfigError:": 2, "KeyFileError:": 1}[error] == code
    return shown.err.rstrip()


def mend(message: str) -> None:
    subprocess.run(shlex.split(message.rpartition(": ")[2]), check=True)


@each_file_and_command
@pytest.mark.parametrize("name_of_target", ["target", "absent"])
def test_a_link_is_refused_and_its_target_is_neither_changed_nor_made(
    home: Path, name: str, command: str, name_of_target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = home.parent / "outside"
    outside.mkdir()
    (outside / "target").write_text(PRECIOUS)
    (outside / "target").chmod(0o600)
    (home / name).unlink()
    (home / name).symlink_to(outside / name_of_target)

    message = refusal(command, home / name, capsys)

    assert " is a link; run: mv " in message
    assert [path.name for path in outside.iterdir()] == ["target"]
    assert (outside / "target").read_text() == PRECIOUS
    mend(message)
    assert run(["up"]) == 0


@pytest.mark.parametrize("name", ["agent.lock", "agent.log"])
def test_a_file_with_a_second_name_is_refused_and_not_changed(
    home: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = home.parent / "target"
    target.write_text(PRECIOUS)
    (home / name).unlink()
    (home / name).hardlink_to(target)

    message = refusal("up --detach", home / name, capsys)

    assert " is also a file elsewhere (a hard link); run: mv " in message
    assert target.read_text() == PRECIOUS
    mend(message)
    with hold_home(home):
        pass


@pytest.mark.parametrize("name", ["agent.lock", "agent.log"])
def test_a_pipe_is_refused_at_once(
    home: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / name).unlink()
    os.mkfifo(home / name)

    assert " is not a file; run: mv " in refusal("up --detach", home / name, capsys)


@each_file_and_command
def test_a_file_of_another_user_is_refused_by_root_too(
    home: Path, name: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    before = (home / name).read_bytes()
    os.chown(home / name, 12345, -1)

    message = refusal(command, home / name, capsys)

    assert " belongs to another user; " in message
    assert (home / name).read_bytes() == before
    mend(message)
    assert run(["up"]) == 0


@each_file_and_command
def test_whose_a_file_is_counts_and_not_whether_it_can_be_read(
    home: Path,
    name: str,
    command: str,
    faults: Faults,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = (home / name).stat()

    def fstat(real: Real, descriptor: int) -> object:
        found = real(descriptor)
        if not os.path.samestat(found, given):
            return found
        return os.stat_result((*found[:4], found.st_uid + 1, *found[5:10]))

    faults.around(os, "fstat", fstat)

    assert " belongs to another user; " in refusal(command, home / name, capsys)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_home_that_cant_be_written_is_one_sentence_that_says_what_to_do(
    home: Path, number: int, faults: Faults
) -> None:
    faults.fail(tempfile, "mkstemp", OSError(number, os.strerror(number)))
    with pytest.raises(KeyFileError, match=r"can't write .*; make its directory writable, or set"):
        store_mesh_key(home, MeshKey(bytes(32)))


def test_a_key_that_another_user_keeps_to_himself_is_said_to_be_his(
    home: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / "mesh_key"

    def denied(real: Real, opened: Path, flags: int, mode: int = 0o777) -> object:
        if opened == path:
            be_user(monkeypatch, path.stat().st_uid + 1)
            raise PermissionError(13, "Permission denied", str(path))
        return real(opened, flags, mode)

    faults.around(os, "open", denied)

    assert " belongs to another user; if the key" in refusal("key show", path, capsys)


def test_a_key_file_that_the_user_names_may_be_a_link_to_a_private_file_of_his(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home.parent / "link").symlink_to(home / "mesh_key")
    command = ["up", "--key-file", str(home.parent / "link")]
    assert run(command) == 0

    (home / "mesh_key").chmod(0o640)

    assert run(command) == 1
    assert f"other users can read {home.parent / 'link'}; run: " in capsys.readouterr().err


def test_a_new_key_takes_the_place_of_a_link_and_not_of_its_target(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "mesh_key").rename(home.parent / "target")
    (home / "mesh_key").symlink_to(home.parent / "target")
    before = (home.parent / "target").read_bytes()
    type_in(monkeypatch, mesh_key_text(OTHER))

    assert run(["key", "set"]) == 0

    assert load_mesh_key(home) == OTHER
    assert (home.parent / "target").read_bytes() == before


def test_a_lock_that_the_system_does_not_give_is_a_sentence(
    faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.fail(fcntl, "flock", OSError(errno.ENOLCK, "No locks available"))
    assert run(["up"]) == 2
    assert capsys.readouterr().err.endswith("agent.lock: No locks available\n")
