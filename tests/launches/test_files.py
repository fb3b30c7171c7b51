"""Contents by their hashes, and copies made of them, on a real disk."""

import errno
import hashlib
import os
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pmesh.errors import UsageError
from pmesh.home_paths import open_directory
from pmesh.ids import path_name
from pmesh.launches.agent import copies as copying
from pmesh.launches.agent import files
from pmesh.launches.agent.copies import Copies, check_room, copy_path, missing_of
from pmesh.launches.agent.files import ContentsReceiver, FileStore
from pmesh.launches.rules.pulling import Slice
from pmesh.launches.wire.messages import TreeName
from pmesh.launches.wire.tree import (
    Content,
    DirectoryEntry,
    Entry,
    FileEntry,
    LinkEntry,
    content_of,
    flaw_of,
)
from tests.worlds.faults import Faults, Real

TREE = TreeName(bytes(32), 1)
ID = path_name("0123456789ab")


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "home")


def stored_files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "home" / "sync" / "files").rglob("*") if path.is_file()]


# --- the store


def test_equal_files_are_stored_once_and_come_back(tmp_path: Path, store: FileStore) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"the same" * 1000)
    one, other = (store.add_file(tmp_path / name) for name in ("a", "b"))
    assert one == other == content_of(b"the same" * 1000)
    assert len(stored_files(tmp_path)) == 1
    assert store.read([Slice(one, 4, 8), Slice(one, 0, 3)]) == b"samethe " + b"the"
    with open_directory(tmp_path) as here:
        store.copy_out(one, "c", within=here, executable=True)
    assert (tmp_path / "c").read_bytes() == b"the same" * 1000
    assert os.access(tmp_path / "c", os.X_OK)


def test_an_empty_file_needs_no_content(tmp_path: Path, store: FileStore) -> None:
    (tmp_path / "empty").touch()
    content = store.add_file(tmp_path / "empty")
    assert stored_files(tmp_path) == []
    with open_directory(tmp_path) as here:
        store.copy_out(content, "copy", within=here, executable=False)
    assert (tmp_path / "copy").read_bytes() == b""


def test_a_file_that_changes_while_it_is_read_is_read_again(
    tmp_path: Path, store: FileStore, faults: Faults
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    changes = [b"two\n"]

    def keep_and_change(keep: Real, new: files.NewContent) -> object:
        if changes:
            with path.open("ab") as file:
                file.write(changes.pop())
        return keep(new)

    faults.around(files.NewContent, "keep", keep_and_change)
    assert store.add_file(path) == content_of(b"one\ntwo\n")
    changes += [b"."] * 99
    path.write_bytes(b"new\n")
    with pytest.raises(UsageError, match="it changes while it is read"):
        store.add_file(path)


def test_what_is_no_file_is_refused(tmp_path: Path, store: FileStore) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no file any more"):
        store.add_file(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic"):
        store.add_file(tmp_path / "link")


def test_a_content_that_was_damaged_is_found_out_and_removed(
    tmp_path: Path, store: FileStore
) -> None:
    content = store.add_bytes(b"right")
    for damage in (b"wrong", b"r"):
        store.path_of(content).write_bytes(damage)
        with pytest.raises(OSError, match="damaged"):
            store.read_whole(content)
        assert not store.has(content)
        store.add_bytes(b"right")
    store.path_of(content).write_bytes(b"wrong")
    with open_directory(tmp_path) as here, pytest.raises(OSError, match="damaged"):
        store.copy_out(content, "copy", within=here, executable=False)
    assert not store.has(content)
    assert store.read_whole(store.add_bytes(b"right")) == b"right"


def test_what_was_not_used_for_longest_is_removed_beyond_a_bound(
    tmp_path: Path, store: FileStore, faults: Faults
) -> None:
    faults.limit(files, "KEPT_BYTES", 20)
    contents = [store.add_bytes(b"content %d." % n) for n in range(5)]  # 10 bytes
    old = os.stat(store.path_of(contents[0])).st_mtime - 2 * files.YOUNG_S  # noqa: PTH116
    for n, content in enumerate(contents[:4]):
        os.utime(store.path_of(content), (old + n, old + n))
    begun = tmp_path / "home" / "sync" / "files" / "new-killed"
    begun.touch()
    os.utime(begun, (old, old))
    store.prune({contents[0].sha256})
    assert [store.has(content) for content in contents] == [True, False, False, False, True]
    assert not begun.exists()
    store.prune()
    assert store.has(contents[4])  # it is young


def test_a_file_that_others_have_left_there_is_removed_as_any(
    store: FileStore, faults: Faults
) -> None:
    faults.limit(files, "KEPT_BYTES", 1)
    left = store.path_of(store.add_bytes(b"content")).with_name(".DS_Store")  # as a Mac's Finder
    left.touch()
    os.utime(left, (0, 0))
    store.prune()
    assert not left.exists()


def test_contents_that_arrive_are_checked(tmp_path: Path, store: FileStore) -> None:
    one, two = content_of(b"one"), content_of(b"twotwo")
    receiver = ContentsReceiver(store)
    receiver.write([Slice(one, 0, 3), Slice(two, 0, 3)], b"onetwo")
    receiver.write([Slice(two, 3, 3)], b"two")
    assert store.has(one)
    assert store.read_whole(two) == b"twotwo"
    false = Content(hashlib.sha256(b"true").digest(), 4)
    with pytest.raises(UsageError, match="not what was announced"):
        receiver.write([Slice(false, 0, 4)], b"lies")
    receiver.close()
    receiver.close()
    assert len(stored_files(tmp_path)) == 2


# --- copies


def entries_of(store: FileStore) -> Sequence[Entry]:
    content = store.add_bytes(b"print(1)\n")
    return [
        LinkEntry("latest", "pkg/run.py"),
        FileEntry("pkg/run.py", *content, executable=True),
        FileEntry("pkg/__init__.py", content_of(b"").sha256, 0),
        DirectoryEntry("out"),
    ]


def test_a_copy_has_files_links_and_empty_directories(tmp_path: Path, store: FileStore) -> None:
    path = copy_path(tmp_path / "home", ID, TREE)
    Copies(tmp_path / "home", store).make(path, entries_of(store))
    assert (path / "latest").read_text() == "print(1)\n"
    assert os.access(path / "pkg" / "run.py", os.X_OK)
    assert not os.access(path / "pkg" / "__init__.py", os.X_OK)
    assert list((path / "out").iterdir()) == []
    (path / "pkg" / "run.py").write_text("changed")
    assert store.read_whole(content_of(b"print(1)\n")) == b"print(1)\n"


def test_names_that_a_disk_does_not_tell_apart_are_refused_and_nothing_stays(
    tmp_path: Path, store: FileStore
) -> None:
    """As Foo.py and foo.py on a Mac; here the same name twice."""
    content = store.add_bytes(b"x")
    twice = [FileEntry("a/foo.py", *content)] * 2
    path = copy_path(tmp_path / "home", ID, TREE)
    with pytest.raises(UsageError, match=r"does not tell 'a/foo\.py' from another name"):
        Copies(tmp_path / "home", store).make(path, twice)
    assert list(path.parent.iterdir()) == []


def on_a_disk_that_ignores_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """As APFS and exFAT do; here all names become lower-case."""
    for name, at in (("open", 0), ("mkdir", 0), ("stat", 0), ("symlink", 1)):
        real = getattr(os, name)

        def folded(*args: Any, real: Any = real, at: int = at, **more: Any) -> Any:  # noqa: ANN401 - as the original
            path = os.fspath(args[at])
            path = path.casefold() if isinstance(path, str) else path
            return real(*args[:at], path, *args[at + 1 :], **more)

        monkeypatch.setattr(os, name, folded)


def test_no_copy_goes_through_a_link_on_a_disk_that_ignores_case(
    tmp_path: Path, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its names nothing lies below the link; through it, a link would lead out of the copy."""
    entries = [LinkEntry("a/lib", ".."), LinkEntry("a/LIB/out", "../../elsewhere")]
    assert flaw_of(entries) == ""
    path = copy_path(tmp_path / "home", ID, TREE)
    Copies(tmp_path / "home", store).make(path, entries)  # this disk tells them apart
    shutil.rmtree(path)

    on_a_disk_that_ignores_case(monkeypatch)
    with pytest.raises(UsageError, match="its disk does not tell 'a/LIB/out' from another"):
        Copies(tmp_path / "home", store).make(path, entries)
    assert list(path.parent.iterdir()) == []


def test_names_that_differ_by_case_are_copied_where_the_disk_tells_them_apart(
    tmp_path: Path, store: FileStore
) -> None:
    content = store.add_bytes(b"x")
    names = {"README", "readme", "Lib/x", "lib/X", "e\u0301", "\u00e9"}
    path = copy_path(tmp_path / "home", ID, TREE)
    Copies(tmp_path / "home", store).make(path, [FileEntry(name, *content) for name in names])
    assert {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} == names


def test_a_directory_may_be_as_deep_as_a_path_is_long(tmp_path: Path, store: FileStore) -> None:
    """One descriptor is open at a time, whatever the depth."""
    deep = "/".join("d" * 400)
    path = copy_path(tmp_path / "home", ID, TREE)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        Copies(tmp_path / "home", store).make(path, [DirectoryEntry(deep)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (path / deep).is_dir()


def test_a_disk_that_becomes_full_is_named_and_nothing_stays(
    tmp_path: Path, store: FileStore, faults: Faults
) -> None:
    entries = entries_of(store)
    faults.fail(store, "copy_out", OSError(errno.ENOSPC, "No space left on device"))
    path = copy_path(tmp_path / "home", ID, TREE)
    with pytest.raises(UsageError, match="its disk is full"):
        Copies(tmp_path / "home", store).make(path, entries)
    assert list(path.parent.iterdir()) == []


def test_without_room_for_all_files_nothing_is_asked_for(
    tmp_path: Path, store: FileStore, faults: Faults
) -> None:
    entries = entries_of(store)
    assert missing_of(store, entries) == {}
    missing = Content(bytes(32), 3 << 20)
    entries = [*entries, FileEntry("big", *missing)]
    assert missing_of(store, entries) == {1: missing}
    check_room(tmp_path, entries, [missing])
    faults.instead(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    with pytest.raises(UsageError, match="its disk has 5 MiB left, and the files need 7 MiB"):
        check_room(tmp_path, entries, [missing])


def test_the_latest_copies_are_kept_and_those_in_use(
    tmp_path: Path, store: FileStore, faults: Faults
) -> None:
    faults.limit(copying, "KEPT", 2)
    home = tmp_path / "home"
    made = Copies(home, store)
    paths = [copy_path(home, path_name(f"{n:012x}"), TREE) for n in range(5)]
    for n, path in enumerate(paths):
        made.make(path, entries_of(store))
        os.utime(path, (n, n))
    begun = paths[0].parent / ".new-killed"
    begun.mkdir()
    made.prune({f"{1:012x}"})
    assert [path.exists() for path in paths] == [False, True, False, True, True]
    made.clean()
    assert not begun.exists()
