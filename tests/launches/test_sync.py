"""What `pmesh run --sync` sends of a directory, and what it refuses to send."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pmesh.core.identity.keys import MeshKey, mesh_key_text
from pmesh.errors import ConfigError
from pmesh.launches.agent.files import FileStore
from pmesh.launches.cli import sync
from pmesh.launches.cli.launch import RunOptions, launch_of
from pmesh.launches.cli.sync import SendingShown, entries_in, with_tree
from pmesh.launches.wire.messages import FilesSent, Launch
from pmesh.launches.wire.tree import (
    Content,
    DirectoryEntry,
    Entry,
    FileEntry,
    LinkEntry,
    content_of,
    decode_tree_untrusted,
)
from tests.worlds.faults import Faults
from tests.worlds.system import be_a_terminal

MANY = 10**9
HERE = {"PATH": os.environ["PATH"]}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that no repository holds."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    path = tmp_path / "project"
    path.mkdir()
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def git(root: Path, *words: str) -> None:
    done = subprocess.run(["git", "-C", root, *words], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def write(root: Path, *paths: str, text: str = "x") -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def sent(root: Path, home: Path, most_bytes: int = MANY) -> dict[str, Entry]:
    return {entry.path: entry for entry in entries_in(root, home, most_bytes=most_bytes)}


# --- which files


def test_of_a_checkout_all_is_sent_but_what_git_ignores(root: Path, home: Path) -> None:
    git(root, "init", "-q")
    write(root, "train.py", "deep/new.py", "data/set.bin", "a\nb.py", "gone.py", "ä.py")
    write(root, ".gitignore", text="data/\n")
    write(root, "venv/pyvenv.cfg", "venv/lib/x.py", "deep/__pycache__/new.pyc")
    git(root, "add", "train.py", "gone.py")
    (root / "gone.py").unlink()
    assert sorted(sent(root, home)) == [".gitignore", "a\nb.py", "deep/new.py", "train.py", "ä.py"]


def test_a_part_of_a_checkout_can_be_sent_alone(root: Path, home: Path) -> None:
    git(root, "init", "-q")
    write(root, "here/train.py", "there/other.py")
    assert list(sent(root / "here", home)) == ["train.py"]


def test_checkouts_within_a_checkout_are_sent_as_they_say_themselves(
    root: Path, home: Path
) -> None:
    for path in (root, root / "vendor" / "lib"):
        path.mkdir(parents=True, exist_ok=True)
        git(path, "init", "-q")
    write(root, "train.py", "vendor/lib/code.py", "vendor/lib/junk")
    write(root / "vendor" / "lib", ".gitignore", text="junk\n")
    assert sorted(sent(root, home)) == ["train.py", "vendor/lib/.gitignore", "vendor/lib/code.py"]


def test_elsewhere_all_is_sent_but_what_is_of_no_use_there(root: Path, home: Path) -> None:
    write(root, "train.py", "pkg/a.py", "pkg/__pycache__/a.pyc", "venv/pyvenv.cfg", "venv/bin/x")
    write(root, ".env", ".git-not/x")
    (root / "out" / "deep").mkdir(parents=True)
    (root / "latest").symlink_to("pkg")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "s"))
    (root / "train.py").chmod(0o755)
    found = sent(root, home)
    assert sorted(found) == [".env", ".git-not/x", "latest", "out/deep", "pkg/a.py", "train.py"]
    assert found["latest"] == LinkEntry("latest", "pkg")
    assert found["out/deep"] == DirectoryEntry("out/deep")
    assert found["train.py"] == FileEntry("train.py", bytes(32), 1, executable=True)


@pytest.mark.parametrize("uses_git", [True, False])
def test_the_agent_s_home_is_never_sent(root: Path, *, uses_git: bool) -> None:
    write(root, "train.py", ".pmesh/mesh_key")
    if uses_git:
        git(root, "init", "-q")
    assert list(sent(root, root / ".pmesh")) == ["train.py"]


@pytest.mark.parametrize("uses_git", [True, False])
def test_the_home_is_never_sent_whatever_the_path_of_the_directory(
    root: Path, tmp_path: Path, *, uses_git: bool
) -> None:
    """As macOS's /tmp, which is a link, and a /home that lies elsewhere."""
    write(root, "train.py", "deep/agent/config.toml")
    (tmp_path / "link").symlink_to(root)
    if uses_git:
        git(root, "init", "-q")
    assert list(sent(tmp_path / "link", root / "deep" / "agent")) == ["train.py"]
    assert list(sent(root, tmp_path / "link" / "deep" / "agent")) == ["train.py"]


@pytest.mark.parametrize("uses_git", [True, False])
@pytest.mark.parametrize("name", ["node_key", "mesh_key", "agent.lock"])
def test_a_home_of_another_agent_is_not_sent_either(
    root: Path, home: Path, capsys: pytest.CaptureFixture[str], name: str, *, uses_git: bool
) -> None:
    write(root, "train.py", f"deep/second/{name}", "deep/second/sync/x", "deep/second/y")
    if uses_git:
        git(root, "init", "-q")
    assert list(sent(root, home)) == ["train.py"]
    assert capsys.readouterr().err == (
        "--sync does not send deep/second: it is the home of an agent, with keys\n"
    )


def test_nothing_is_sent_from_within_a_home(root: Path, home: Path, tmp_path: Path) -> None:
    write(home, "node_key", "sync/copies/x/train.py")
    (tmp_path / "link").symlink_to(home)
    for inside in (home, home / "sync" / "copies" / "x", tmp_path / "link" / "sync"):
        with pytest.raises(ConfigError, match="it is in the home of an agent, which has keys"):
            sent(inside, home)
    with pytest.raises(ConfigError, match="it is in the home of an agent, which has keys"):
        sent(home, root)


def test_a_mesh_key_is_not_sent_wherever_it_is(root: Path, home: Path) -> None:
    write(root, "train.py", "pmesh-notes.txt", text="pmesh-is-here")
    (root / "not-text").write_bytes(b"\xff")
    assert len(sent(root, home)) == 3
    write(root, "keys/shared", text=f"{mesh_key_text(MeshKey(bytes(range(32))))}\n")
    with pytest.raises(ConfigError, match="'keys/shared' is a mesh key, which --sync never sends"):
        sent(root, home)


def test_no_file_is_sent_that_lies_behind_a_link(root: Path, home: Path, tmp_path: Path) -> None:
    """git lists what was there before the link took its place."""
    write(root, "train.py", "data/secret", text="ours")
    git(root, "init", "-q")
    git(root, "add", ".")
    (root / "data").rename(tmp_path / "elsewhere")
    (root / "data").symlink_to(tmp_path / "elsewhere")
    write(root, ".gitignore", text="data\n")
    assert sorted(sent(root, home)) == [".gitignore", "train.py"]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """One that leaves a trace, `ran`."""
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    path.chmod(0o755)
    return path


def test_git_runs_no_monitor_of_a_checkout(root: Path, home: Path, program: Path) -> None:
    """One within this one may be somebody else's."""
    write(root, "train.py", "vendor/x")
    for path in (root, root / "vendor"):
        git(path, "init", "-q")
        git(path, "config", "core.fsmonitor", str(program))
    assert sorted(sent(root, home)) == ["train.py", "vendor/x"]
    assert not program.with_name("ran").exists()


def test_git_fetches_nothing_for_a_checkout(root: Path, home: Path, program: Path) -> None:
    """It would, where one says that it is not whole, and run what its configuration names."""
    write(root, "train.py", "vendor/x", "vendor/deep/y")
    theirs = root / "vendor"
    for path in (root, theirs):
        git(path, "init", "-q")
    git(theirs, "update-index", "--add", "--cacheinfo", f"100644,{'5' * 40},.gitignore")
    git(theirs, "update-index", "--skip-worktree", ".gitignore")
    for setting, value in (
        ("core.repositoryFormatVersion", "1"),
        ("extensions.partialClone", "origin"),
        ("remote.origin.url", f"ext::{program}"),
        ("protocol.ext.allow", "always"),
    ):
        git(theirs, "config", setting, value)
    with pytest.raises(ConfigError, match=r"git can't list the files to send: .* not allowed"):
        sent(root, home)
    assert not program.with_name("ran").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: (root / "data").symlink_to("/mnt/data"), "'data' is a link to '/mnt/data'"),
        (lambda root: (root / "up").symlink_to("../x"), "outside of the directory"),
        (lambda root: (root / os.fsdecode(b"\xff.py")).touch(), "is not valid UTF-8"),
    ],
)
def test_what_others_could_not_have_is_named(
    root: Path, home: Path, make: Callable[[Path], None], message: str
) -> None:
    write(root, "train.py")
    make(root)
    with pytest.raises(ConfigError, match=message) as error:
        sent(root, home)
    assert str(error.value).endswith("rename it, or move it out of the directory")
    git(root, "init", "-q")
    with pytest.raises(ConfigError, match=message) as error:
        sent(root, home)
    assert str(error.value).endswith("rename it, or list it in .gitignore")


def test_too_much_is_refused_and_the_largest_are_named(root: Path, home: Path) -> None:
    write(root, "a.py", text="x" * 100)
    write(root, "data/huge.bin", text="x" * 5000)
    write(root, "data/large.bin", text="x" * 2000)
    assert sent(root, home, 7100)
    with pytest.raises(ConfigError) as error:
        sent(root, home, 7099)
    assert str(error.value) == (
        "the files to send have 6.9 KiB, more than --sync-limit 6.9 KiB; the largest: "
        "'data/huge.bin' 4.9 KiB, 'data/large.bin' 2.0 KiB, 'a.py' 100 B. Data sets are not to be "
        "sent: type 'git init', list them in .gitignore and copy them to each machine, or give "
        "--sync-limit 1MiB"
    )
    git(root, "init", "-q")
    with pytest.raises(ConfigError, match=r"list data sets in \.gitignore and copy"):
        sent(root, home, 100)


def test_too_many_files_are_refused(root: Path, home: Path, faults: Faults) -> None:
    faults.limit(sync, "MAX_ENTRIES", 2)
    write(root, "a", "b", "c")
    with pytest.raises(ConfigError, match="there are 3 files to send, more than 2"):
        sent(root, home)
    faults.limit(sync, "MAX_TREE_BYTES", 20)
    write(root, "a", "b")
    (root / "c").unlink()
    with pytest.raises(ConfigError, match="the names of all files"):
        with_tree(request(root), home, root, most_bytes=MANY)


def test_nothing_to_send_is_an_error(root: Path, home: Path) -> None:
    with pytest.raises(ConfigError, match="it is empty"):
        sent(root, home)
    with pytest.raises(ConfigError, match="there is no directory"):
        sent(root / "nowhere", home)
    git(root, "init", "-q")
    write(root, "x")
    (root / ".git" / "info").mkdir(exist_ok=True)
    (root / ".git" / "info" / "exclude").write_text("*\n")
    with pytest.raises(ConfigError, match="git ignores all that is in it"):
        sent(root, home)


@pytest.fixture
def open_root() -> Iterator[Path]:
    """Not below pytest's own directory, which is closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


NOBODY = 65534
AS_NOBODY = f"""
import os, sys
from pathlib import Path
from pmesh.launches.agent.files import FileStore
from pmesh.launches.cli.sync import entries_in, store_tree
from pmesh.errors import ConfigError

root = Path(sys.argv[1])
os.setegid({NOBODY}), os.seteuid({NOBODY})
try:
    store_tree(FileStore(root / "home"), root, entries_in(root, root / "home", most_bytes=10**9))
except ConfigError as e:
    print(e)
os.seteuid(0)
"""


def nobody_says(root: Path) -> str:
    """What a user without rights gets told: root may read everything."""
    return subprocess.run(
        [sys.executable, "-c", AS_NOBODY, root],
        env=os.environ | {"HOME": str(root)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
@pytest.mark.parametrize("uses_git", [True, False])
def test_what_can_not_be_read_is_named(open_root: Path, *, uses_git: bool) -> None:
    root = open_root
    write(root, "train.py", "closed/x.py", "secret")
    (root / "home").mkdir(mode=0o777)
    (root / "home").chmod(0o777)
    if uses_git:
        git(root, "init", "-q")
        for path in (root, root / ".git", *root.glob(".git/**/*")):
            os.chown(path, NOBODY, NOBODY)
    (root / "closed").chmod(0o700)
    assert "closed" in nobody_says(root)
    (root / "closed").chmod(0o755)
    (root / "secret").chmod(0o600)
    assert nobody_says(root) == "--sync can't send 'secret': Permission denied\n"


def test_without_git_a_checkout_is_not_guessed_at(
    root: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root, "train.py")
    monkeypatch.setenv("PATH", "/nowhere")
    assert list(sent(root, home)) == ["train.py"]
    (root / ".git").mkdir()
    with pytest.raises(ConfigError, match="install git"):
        sent(root, home)


def test_what_git_can_not_say_is_an_error(root: Path, home: Path) -> None:
    git(root, "init", "-q")
    write(root, "train.py")
    (root / ".git" / "config").write_text("[core")
    with pytest.raises(ConfigError, match="git can't list the files to send"):
        sent(root, home)


# --- what is stored


def request(root: Path, *words: str) -> Launch:
    return launch_of(words or ("true",), RunOptions(cwd=root, sync=True), HERE)


def test_the_directory_is_stored_as_it_is_now(root: Path, home: Path) -> None:
    write(root, "train.py", text="print(1)")
    (root / "l").symlink_to("train.py")
    tree = with_tree(request(root, "train.py"), home, root, most_bytes=MANY).command.tree
    assert tree is not None
    write(root, "train.py", text="print(2)")
    store = FileStore(home)
    entries = decode_tree_untrusted(store.read_whole(Content(tree.sha256, tree.nbytes)))
    content = content_of(b"print(1)")
    assert entries == (LinkEntry("l", "train.py"), FileEntry("train.py", *content))
    assert store.read_whole(content) == b"print(1)"


def test_what_a_command_names_is_found_in_the_directory_whatever_its_path(
    root: Path, home: Path, tmp_path: Path
) -> None:
    write(root, "v1/train.py", "run.sh")
    (root / "run.sh").chmod(0o755)
    (root / "current").symlink_to("v1")
    (tmp_path / "link").symlink_to(root)
    assert with_tree(request(root, "true", "current/train.py"), home, root, most_bytes=MANY)
    options = RunOptions(cwd=tmp_path / "link", sync=True)
    command = launch_of([str(root / "run.sh")], options, HERE).command
    assert command.words == ("./run.sh",)
    with pytest.raises(ConfigError, match=r"name it 'v1/train\.py'"):
        launch_of(["true", str(root / "v1" / "train.py")], options, HERE)


def test_a_script_that_git_ignores_is_named(root: Path, home: Path) -> None:
    git(root, "init", "-q")
    write(root, "train.py", "other.py")
    write(root, ".gitignore", text="train.py\n")
    assert with_tree(request(root, "other.py"), home, root, most_bytes=MANY)
    with pytest.raises(ConfigError, match=r"train\.py is not sent, as git ignores it"):
        with_tree(request(root, "train.py"), home, root, most_bytes=MANY)


def exchange(path: Path, for_what: str) -> None:
    path.unlink()
    if for_what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "'x' was removed meanwhile"),
        (lambda path: exchange(path, "pipe"), "'x' can't be sent: it is no file any more"),
        (lambda path: exchange(path, "link"), "can't send 'x'"),
    ],
)
def test_a_file_that_is_exchanged_meanwhile_is_named(
    root: Path, home: Path, change: Callable[[Path], object], message: str
) -> None:
    write(root, "x")
    entries = entries_in(root, home, most_bytes=MANY)
    change(root / "x")
    with pytest.raises(ConfigError, match=message):
        sync.store_tree(FileStore(home), root, entries)


def test_a_disk_without_room_for_the_list_is_named(root: Path, home: Path, faults: Faults) -> None:
    write(root, "x")
    faults.fail(FileStore, "add_bytes", OSError(28, "No space left on device"))
    with pytest.raises(ConfigError, match="can't store the list of files: No space left"):
        with_tree(request(root), home, root, most_bytes=MANY)


def test_bars_are_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    shown = SendingShown()
    shown.show([FilesSent("mac-2", 5, 10)])
    shown.show([FilesSent("mac-2", 10, 10)])
    shown.close()
    assert capsys.readouterr().err == ""


def test_bars_name_the_machines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_a_terminal(monkeypatch, "stderr")
    monkeypatch.setenv("TERM", "xterm")
    shown = SendingShown()
    shown.show([FilesSent("mac-2", 5 << 20, 10 << 20), FilesSent("[/bold] mac", 5, 10)])
    shown.close()
    err = capsys.readouterr().err
    assert "files for mac-2" in err
    assert "files for [/bold] mac" in err
