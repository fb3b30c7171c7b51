"""Key files: private, whole, and refused otherwise with the command that mends them.

The home directory and its lock: rows of the failure table.
"""

import errno
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pmesh.agent.home import (
    hold_home,
    load_mesh_key,
    load_node_key,
    open_home,
    read_mesh_key,
    store_mesh_key,
)
from pmesh.core.identity.keys import MeshKey
from pmesh.errors import AgentAlreadyRunning, ConfigError, KeyFileError
from pmesh.home_paths import LOCK_NAME, MESH_KEY_NAME, NODE_KEY_NAME
from tests.worlds.faults import Faults
from tests.worlds.system import be_user


def test_a_home_is_made_for_its_user_alone(tmp_path: Path) -> None:
    home = open_home(tmp_path / "new" / "home")
    assert home.stat().st_mode & 0o777 == 0o700
    assert open_home(home) == home


def test_a_home_that_others_can_enter_is_refused_with_the_command(tmp_path: Path) -> None:
    home = tmp_path / "my home"
    home.mkdir()
    home.chmod(0o750)
    with pytest.raises(ConfigError, match=r"run: chmod 700 '.*my home'$"):
        open_home(home)
    home.chmod(0o700)
    assert open_home(home) == home


def test_a_home_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_user(monkeypatch, tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="another user"):
        open_home(tmp_path)


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ConfigError, match="--home"):
        open_home(path)


def test_a_second_agent_is_refused_by_the_pid_of_the_first(tmp_path: Path) -> None:
    second = (
        "import sys, pathlib; from pmesh.agent.home import hold_home\n"
        "with hold_home(pathlib.Path(sys.argv[1])): pass"
    )
    command = [sys.executable, "-c", second, str(tmp_path)]
    with hold_home(tmp_path):
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"AgentAlreadyRunning: an agent already runs in {tmp_path}: pid {os.getpid()};" in (
        refused.stderr
    )
    assert subprocess.run(command, check=False).returncode == 0


def test_a_second_agent_is_refused_while_the_first_has_not_written_its_pid(tmp_path: Path) -> None:
    with hold_home(tmp_path):
        (tmp_path / LOCK_NAME).write_text("")
        with pytest.raises(AgentAlreadyRunning, match="just starting"), hold_home(tmp_path):
            pass


def test_the_lock_of_a_killed_agent_is_free(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("12345\n")
    with hold_home(tmp_path):
        assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
    assert not (tmp_path / LOCK_NAME).read_text()


def test_a_lock_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).mkdir()
    with (
        pytest.raises(ConfigError, match=f"{LOCK_NAME} is not a file; run: mv "),
        hold_home(tmp_path),
    ):
        pass


SEED = bytes(range(32))
OTHER = bytes(32)
KEY = MeshKey(bytes(range(32, 64)))


def test_a_node_key_is_made_once_and_private(tmp_path: Path) -> None:
    made = load_node_key(tmp_path, entropy=SEED)
    path = tmp_path / NODE_KEY_NAME
    assert path.read_bytes() == SEED
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_node_key(tmp_path, entropy=OTHER).node == made.node
    assert os.listdir(tmp_path) == [NODE_KEY_NAME]  # noqa: PTH208 - no temporary file is left


def test_a_mesh_key_survives_its_file(tmp_path: Path) -> None:
    assert load_mesh_key(tmp_path) is None
    store_mesh_key(tmp_path, MeshKey(SEED))
    store_mesh_key(tmp_path, KEY)
    assert load_mesh_key(tmp_path) == KEY
    assert read_mesh_key(tmp_path / MESH_KEY_NAME) == KEY
    assert (tmp_path / MESH_KEY_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_readable_by_others_is_refused_and_the_command_mends_it(
    tmp_path: Path, mode: int
) -> None:
    load_node_key(tmp_path, entropy=SEED)
    (tmp_path / NODE_KEY_NAME).chmod(mode)
    with pytest.raises(KeyFileError, match="other users can read") as caught:
        load_node_key(tmp_path, entropy=SEED)
    subprocess.run(shlex.split(str(caught.value).partition("run: ")[2]), check=True)
    assert load_node_key(tmp_path, entropy=OTHER).seed == SEED


@pytest.mark.parametrize("content", [b"", SEED[:31], SEED + b"\n"])
def test_a_truncated_node_key_is_refused_and_the_command_mends_it(
    tmp_path: Path, content: bytes
) -> None:
    load_node_key(tmp_path, entropy=SEED)
    (tmp_path / NODE_KEY_NAME).write_bytes(content)
    with pytest.raises(KeyFileError, match=f"holds {len(content)} bytes") as caught:
        load_node_key(tmp_path, entropy=SEED)
    subprocess.run(shlex.split(str(caught.value).partition("run: ")[2]), check=True)
    assert load_node_key(tmp_path, entropy=OTHER).seed == OTHER


@pytest.mark.parametrize("content", [b"", b"pmesh-", b"\xff\xfe", b"a" * 10_000])
def test_what_is_not_a_mesh_key_is_refused(tmp_path: Path, content: bytes) -> None:
    store_mesh_key(tmp_path, KEY)
    (tmp_path / MESH_KEY_NAME).write_bytes(content)
    with pytest.raises(KeyFileError, match=r"holds no mesh key .*; run: mv .* 'pmesh key set'"):
        load_mesh_key(tmp_path)


def test_a_key_file_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MESH_KEY_NAME, 0o600)  # a plain open would wait for a writer
    with pytest.raises(KeyFileError, match="not a file"):
        load_mesh_key(tmp_path)


def test_a_directory_in_place_of_a_key_file_is_refused_and_closed(tmp_path: Path) -> None:
    (tmp_path / MESH_KEY_NAME).mkdir(mode=0o700)
    lowest = os.open(tmp_path, os.O_RDONLY)
    os.close(lowest)
    with pytest.raises(KeyFileError, match=r"mesh_key is not a file; run: mv"):
        load_mesh_key(tmp_path)
    again = os.open(tmp_path, os.O_RDONLY)
    os.close(again)
    assert again == lowest


def test_a_directory_that_the_user_names_as_key_file_stays_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="is a directory; name the file in it"):
        read_mesh_key(tmp_path)


def test_a_key_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=f"no key file {tmp_path}/absent"):
        read_mesh_key(tmp_path / "absent")


def test_a_key_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unreadable:  # for root too
        unreadable.bind(str(tmp_path / NODE_KEY_NAME))
        with pytest.raises(KeyFileError, match="can't read"):
            load_node_key(tmp_path, entropy=SEED)


def test_a_home_without_room_leaves_no_half_key(tmp_path: Path, faults: Faults) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), descriptor)

    faults.instead(os, "fsync", fail)
    with pytest.raises(KeyFileError, match="No space left"):
        load_node_key(tmp_path, entropy=SEED)
    assert not list(tmp_path.iterdir())


def test_a_home_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"can't write .*gone/mesh_key: No such file"):
        store_mesh_key(tmp_path / "gone", KEY)
