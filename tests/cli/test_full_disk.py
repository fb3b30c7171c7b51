"""A disk without room: one sentence, and no key that was there is lost. A real one, and a faked."""

import errno
import io
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pmesh.agent.home import hold_home, load_mesh_key, load_node_key, store_mesh_key
from pmesh.agent.mesh import keyring
from pmesh.agent.mesh.keyring import latest_key
from pmesh.cli.app import run
from pmesh.cli.up import start_detached
from pmesh.core.identity.keys import MeshKey, mesh_key_text
from pmesh.errors import KeyFileError
from pmesh.terminal.lines import dropping_lines
from tests.cli.homes import store_rotation, use_agent, use_home
from tests.worlds.faults import Faults
from tests.worlds.system import type_in

OLD = MeshKey(bytes(range(32)))
NEW = MeshKey(bytes(range(32, 64)))
SEED = bytes(range(64, 96))
NO_ROOM = "No space left on device; free some space, then run it again\n"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MOST_FREE = 6  # files, and pages: more than a command needs


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that does not exist yet; its agent ends at once."""

    async def run_agent(*arguments: object) -> None:
        announce = arguments[-1]
        assert callable(announce)
        announce("mac-1 is up")

    use_home(tmp_path / "home", monkeypatch)
    use_agent(run_agent, monkeypatch)
    return tmp_path / "home"


def use(home: Path) -> None:
    """Make it as it is after the first start."""
    home.mkdir(mode=0o700)
    store_mesh_key(home, OLD)
    load_node_key(home, entropy=SEED)
    with hold_home(home):
        pass


def assert_the_keys_are_whole(home: Path, *mesh_keys: MeshKey) -> None:
    assert load_mesh_key(home) in mesh_keys
    assert load_node_key(home, entropy=bytes(32)).seed == SEED
    assert not list(home.glob(".*"))  # no temporary file takes room for ever


def call(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    type_in(monkeypatch, mesh_key_text(NEW))
    return run(command.split())


class SmallFileSystem:
    """A file system of its own, with room for so many pages and files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def leave(self, *, pages: int, files: int) -> None:
        """Fill it, but for these."""
        self._filler.mkdir()
        with (self._filler / "pages").open("wb", buffering=0) as file:
            taken = 0
            try:
                while True:
                    taken += file.write(bytes(PAGE_BYTES))
            except OSError:
                file.truncate(taken - pages * PAGE_BYTES)
        names = [self._filler / str(number) for number in range(100)]
        made = 0
        try:
            while True:
                names[made].touch()
                made += 1
        except OSError:
            for name in names[made - files : made]:
                name.unlink()

    def free(self) -> None:
        shutil.rmtree(self._filler)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallFileSystem]:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a small file system is made by root, on Linux")
    path = tmp_path / "disk"
    path.mkdir()
    options = f"size={16 * PAGE_BYTES},nr_inodes=32,mode=700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode()}")
    yield SmallFileSystem(path)
    subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("command", ["key new", "key set", "up"])
def test_wherever_a_real_disk_is_full_a_first_command_says_so_and_works_once_it_is_not(
    disk: SmallFileSystem,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = disk.path / "home"
    monkeypatch.setenv("PMESH_HOME", str(home))
    codes = set()
    for pages in range(MOST_FREE):
        for files in range(MOST_FREE):
            disk.leave(pages=pages, files=files)

            code = call(command, monkeypatch)

            codes.add(code > 0)
            said = capsys.readouterr().err
            assert not code or (said.count("\n") == 1 and said.endswith(NO_ROOM)), said
            assert not code or f" {home}" in said
            disk.free()
            has_key = home.exists() and load_mesh_key(home) is not None
            assert has_key or code
            if command != "key new" or not has_key:
                assert call(command, monkeypatch) == 0
            shutil.rmtree(home)
            capsys.readouterr()
    assert codes == {False, True}


@pytest.mark.parametrize("command", ["key set", "up"])
def test_wherever_a_real_disk_is_full_no_key_is_lost(
    disk: SmallFileSystem,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = disk.path / "home"
    monkeypatch.setenv("PMESH_HOME", str(home))
    codes = set()
    for pages in range(MOST_FREE):
        for files in range(MOST_FREE):
            use(home)
            disk.leave(pages=pages, files=files)

            code = call(command, monkeypatch)

            codes.add(code > 0)
            said = capsys.readouterr().err
            assert said.count("\n") == (code > 0), said
            assert not code or said.endswith(NO_ROOM)
            assert_the_keys_are_whole(home, OLD if code or command == "up" else NEW)
            disk.free()
            shutil.rmtree(home)
    assert codes == {False, True}


@pytest.mark.parametrize("call_", ["open", "fsync"])
@pytest.mark.parametrize("command", ["key set", "key new"])
def test_a_new_key_that_finds_no_room_leaves_the_one_that_came_while_there_was_none(
    *,
    home: Path,
    call_: str,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The disk became full as the agent took a rotation: `mesh_key` has the key before."""
    latest = MeshKey(b"r" * 32)
    use(home)
    with faults.fail(keyring, "store_mesh_key", KeyFileError("no room")):
        store_rotation(home, OLD, latest)
    if command == "key new":
        (home / "mesh_key").rename(home / "mesh_key.old")
    broken = fail_for(".mesh_key.", os.open) if call_ == "open" else no_room
    with faults.instead(os, call_, broken):
        assert call(command, monkeypatch) == 1
    assert capsys.readouterr().err == f"KeyFileError: can't write {home}/mesh_key: {NO_ROOM}"
    if command == "key new":
        (home / "mesh_key.old").rename(home / "mesh_key")

    assert run(["key", "show"]) == 0

    assert capsys.readouterr().out == f"{mesh_key_text(latest)}\n"
    assert_the_keys_are_whole(home, OLD)
    assert call("key set", monkeypatch) == 0
    assert latest_key(home, NEW) == load_mesh_key(home) == NEW


def test_a_log_for_which_a_real_disk_has_no_room_is_a_sentence(
    disk: SmallFileSystem, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = disk.path / "home"
    monkeypatch.setenv("PMESH_HOME", str(home))
    use(home)
    disk.leave(pages=1, files=0)

    assert run(["up", "--detach"]) == 2

    assert capsys.readouterr().err == f"ConfigError: can't write {home}/agent.log: {NO_ROOM}"
    assert_the_keys_are_whole(home, OLD)


def no_room(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_for(name: str, real: Callable[..., int]) -> Callable[..., int]:
    """`os.open`, for which there is no room to make files of that name."""

    def open_(path: str | Path, *arguments: object, **named: object) -> int:
        return no_room() if name in Path(path).name else real(path, *arguments, **named)

    return open_


@pytest.mark.parametrize(
    ("call_", "name", "command", "says"),
    [
        ("mkdir", "", "key new", "can't use {home} as home: "),
        ("mkdir", "", "up", "can't use {home} as home: "),
        ("write", "", "up", "can't write {home}/agent.lock: "),
        ("truncate", "", "up", "can't write {home}/agent.lock: "),
        ("open", "agent.lock", "up", "can't write {home}/agent.lock: "),
        ("open", ".mesh_key", "key set", "can't write {home}/mesh_key: "),
        ("fsync", "", "key set", "can't write {home}/mesh_key: "),
        ("rename", "", "key set", "can't write {home}/mesh_key: "),
        (
            "open",
            "home",
            "key set",
            "can't write {home}/mesh_key: ",
        ),  # of the directory, to flush it
        ("open", ".node_key", "up", "can't write {home}/node_key: "),
        ("open", "agent.log", "up --detach", "can't write {home}/agent.log: "),
    ],
)
def test_whatever_system_call_finds_no_room_a_sentence_says_where_and_no_key_is_lost(
    *,
    home: Path,
    call_: str,
    name: str,
    command: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = call_ == "mkdir" or name == ".node_key"
    if not first:
        use(home)
    with faults.instead(os, call_, fail_for(name, os.open) if call_ == "open" else no_room):
        code = call(command, monkeypatch)

    shown = capsys.readouterr()
    assert code == (1 if "_key: " in says else 2)
    assert shown.err.split(": ", 1)[1] == says.format(home=home) + NO_ROOM
    if not first:
        assert_the_keys_are_whole(home, NEW if name == "home" else OLD)
    assert call("up", monkeypatch) == 0


def test_a_file_that_may_not_grow_is_not_put_in_the_place_of_a_key(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(home)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))  # more than nothing, less than a key
    try:
        code = call("key set", monkeypatch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1
    assert capsys.readouterr().err.endswith("mesh_key: File too large\n")
    assert_the_keys_are_whole(home, OLD)


def test_a_lock_is_given_back_also_where_its_pid_cannot_be_taken_out(
    home: Path, faults: Faults
) -> None:
    use(home)
    with hold_home(home):
        full = faults.instead(os, "truncate", no_room)
    full.end()
    with hold_home(home):
        pass


class Full(io.StringIO):
    """The output of a program on a disk without room."""

    def write(self, _text: str) -> int:
        return no_room()


def test_an_agent_outlives_a_full_disk_under_its_output(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(home)
    monkeypatch.setattr("sys.stdout", Full())
    assert run(["up"]) == 0


def test_the_log_drops_what_a_full_disk_does_not_take_and_goes_on() -> None:
    flushed: list[str] = []

    class FullAtFlush(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())
            no_room()

    lines = dropping_lines(FullAtFlush())
    lines.write("one")
    lines.flush()
    lines.write(" two")
    lines.flush()
    assert flushed == ["one", "one two"]
    assert not lines.isatty()
    dropping_lines(Full()).write("three")


def test_output_for_which_there_is_no_room_is_a_sentence() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("only Linux has a device that is always full")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pmesh.cli", "version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, f"UsageError: can't write the output: {NO_ROOM}")


def test_an_agent_that_could_not_even_say_why_it_ended_is_said_to_have_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "agent.log"
    silent = [sys.executable, "-c", "import os; os._exit(3)"]
    code = start_detached(silent, environment=os.environ, home=tmp_path)
    assert code == 3
    assert capsys.readouterr().err == (
        f"the agent ended and could not log why in {log}; 'pmesh up' shows it\n"
    )
