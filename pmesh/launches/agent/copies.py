"""Copies of the directories that `pmesh run --sync` sends: one for each launch, to run in.

A copy is made once. A rank that is started again finds what it has written there, also after its
agent was restarted.
"""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Collection, Generator, Iterable, Sequence
from pathlib import Path
from typing import Final

from pmesh.agent.home import is_full
from pmesh.errors import UsageError
from pmesh.home_paths import A_DIRECTORY, open_directory, remove_tree
from pmesh.ids import NodeId, PathName, node_text, path_name
from pmesh.launches.agent.files import SYNC_NAME, FileStore
from pmesh.launches.wire.messages import TreeName
from pmesh.launches.wire.tree import Content, Entry, FileEntry, LinkEntry, contents_of

KEPT = 20  # copies of launches, as of their output
_BUILDING: Final = ".new-"
_RECORDS: Final = "starters"  # has a file for each copy: who has started the launch
_TAKEN = (
    errno.EEXIST,
    errno.ENOTDIR,
    errno.ELOOP,
)  # a file or a link already has the name, or one that the disk takes for it


def copy_path(home: Path, launch: PathName, tree: TreeName) -> Path:
    """Return where the copy for a launch is, or would be."""
    return _copies(home) / path_name(f"{launch}-{tree.sha256.hex()[:8]}")


def _copies(home: Path) -> Path:
    return home / SYNC_NAME / "copies"


class Copies:
    """The copies on this machine; its methods block."""

    def __init__(self, home: Path, store: FileStore) -> None:
        self._directory = _copies(home)
        self._store = store

    def make(self, path: Path, entries: Sequence[Entry]) -> None:
        """Make the copy from the store. Raises UsageError if that can't be done here."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            building = Path(tempfile.mkdtemp(dir=path.parent, prefix=_BUILDING))
            try:
                with open_directory(building) as directory:
                    self._fill(directory, entries)
                building.rename(path)
            finally:
                remove_tree(path.parent, building.name)
        except OSError as e:
            raise UsageError(why_no_copy(e)) from e

    def note_starter(self, path: Path, starter: NodeId) -> None:
        """Remember for whom a copy was made: only that node may fetch what is written there."""
        record = _record_of(path)
        record.parent.mkdir(mode=0o700, exist_ok=True)
        record.write_text(node_text(starter), encoding="utf-8")

    def find(self, launch: PathName, starter: NodeId) -> tuple[Path, int] | None:
        """Return the copy of a launch, and when it was whole (its ctime, ns); None without one."""
        for path in self._directory.glob("[!.]*"):
            with contextlib.suppress(OSError):
                record = _record_of(path)
                if path.name.partition("-")[0] == launch and (
                    record.read_text(encoding="utf-8") == node_text(starter)
                ):
                    return path, record.stat().st_ctime_ns
        return None

    def _fill(self, directory: int, entries: Sequence[Entry]) -> None:
        """Write directories and files, and links after them.

        The tree has nothing below a link, but a disk may take `Data` and `data` for one name: so
        each directory is opened, and none that is a link.
        """
        for entry in sorted(entries, key=lambda entry: isinstance(entry, LinkEntry)):
            *above, name = entry.path.split("/")
            try:
                with _directory_in(directory, above) as here:
                    self._write(entry, name, here)
            except OSError as e:
                if e.errno not in _TAKEN:
                    raise
                raise UsageError(
                    f"its disk does not tell {entry.path!r} from another name; rename one of them"
                ) from e

    def _write(self, entry: Entry, name: str, here: int) -> None:
        match entry:
            case FileEntry(_, sha256, nbytes, executable):
                content = Content(sha256, nbytes)
                self._store.copy_out(content, name, within=here, executable=executable)
            case LinkEntry(_, target):
                os.symlink(target, name, dir_fd=here)
            case _:
                os.mkdir(name, dir_fd=here)

    def prune(self, in_use: Collection[str]) -> None:
        """Remove the oldest copies beyond `KEPT`, but for those of launches that are in use."""
        copies = sorted(self._directory.glob("[!.]*"), key=lambda path: path.lstat().st_mtime)
        for path in copies[: max(0, len(copies) - KEPT)]:
            if path.name.partition("-")[0] not in in_use:
                remove_tree(self._directory, path.name)
                _record_of(path).unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove the copies that an agent began before it was killed."""
        for path in self._directory.glob(f"{_BUILDING}*"):
            remove_tree(self._directory, path.name)


def _record_of(copy: Path) -> Path:
    return copy.parent.with_name(_RECORDS) / copy.name


@contextlib.contextmanager
def _directory_in(directory: int, names: Iterable[str]) -> Generator[int]:
    """Yield a directory below an open one, made if there is none; only one at a time is open."""
    here = os.dup(directory)
    try:
        for name in names:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=here)
            above, here = here, os.open(name, A_DIRECTORY, dir_fd=here)
            os.close(above)
        yield here
    finally:
        os.close(here)


def check_room(home: Path, entries: Sequence[Entry], missing: Iterable[Content]) -> None:
    """Raise UsageError if the disk has no room for the missing contents and the copy."""
    copied = sum(entry.nbytes for entry in entries if isinstance(entry, FileEntry))
    needed = copied + sum(content.nbytes for content in missing)
    free = shutil.disk_usage(home).free
    if needed > free:
        raise UsageError(
            f"its disk has {free >> 20} MiB left, and the files need {(needed >> 20) + 1} MiB; "
            "free some space there"
        )


def missing_of(store: FileStore, entries: Sequence[Entry]) -> dict[int, Content]:
    """Return the contents that are not in the store, by their index in the tree."""
    contents = enumerate(contents_of(entries))
    return {index: content for index, content in contents if not store.has(content)}


def why_no_copy(error: OSError) -> str:
    """Return why files can't be written here."""
    if is_full(error):
        return "its disk is full, so it can't take the files; free some space there"
    return f"it can't write the files: {error.strerror or error}"
