"""Contents of files that `pmesh run --sync` sends, on this machine's disk, by their SHA-256.

`pmesh run` on the starter and the agents all use it; its functions block.
"""

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import BinaryIO, Final, Self

from pmesh.errors import UsageError
from pmesh.launches.rules.pulling import Slice
from pmesh.launches.wire.tree import Content

SYNC_NAME: Final = "sync"
KEPT_BYTES = 1024**3  # ten directories of the default limit: a second run sends only what changed
YOUNG_S = 3600.0  # `pmesh run` stores a directory before its agent knows of the launch
MOST_READS = 3  # of a file that changes meanwhile
_BLOCK_BYTES = 1024 * 1024


class FileStore:
    """The contents, each in a file that has its hash as its name."""

    def __init__(self, home: Path) -> None:
        self._directory = home / SYNC_NAME / "files"

    def path_of(self, content: Content) -> Path:
        """Return where a content is, or would be."""
        text = content.sha256.hex()
        return self._directory / text[:2] / text[2:]

    def has(self, content: Content) -> bool:
        """Return True if it is there; it then counts as used now."""
        path = self.path_of(content)
        try:
            if path.stat().st_size != content.nbytes:
                return False
            os.utime(path)
        except OSError:
            return False
        return True

    def add_file(self, path: Path | str, *, within: int | None = None) -> Content:
        """Store what a file holds.

        Args:
            path: The path of the file.
            within: A descriptor of the directory at which a relative path begins.

        Raises:
            OSError: It can't be read, or the disk is full.
            UsageError: It is no file any more, or changes whenever it is read.
        """
        # O_NONBLOCK: a pipe that has taken its place won't block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        for _ in range(MOST_READS):
            with open(os.open(path, flags, dir_fd=within), "rb") as file:  # noqa: PTH123 - a descriptor
                before = os.fstat(file.fileno())
                if not stat.S_ISREG(before.st_mode):
                    raise UsageError("it is no file any more")
                content = self._add(file)
                after = os.fstat(file.fileno())
            if (content.nbytes, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
                return content
        raise UsageError("it changes while it is read")

    def _add(self, file: BinaryIO) -> Content:
        content = _read(file, _no_more)
        if content.nbytes and not self.has(content):
            file.seek(0)
            with self.new() as new:
                _read(file, new.write)
                content = new.keep()
        return content

    def add_bytes(self, data: bytes) -> Content:
        """Store these bytes. Raises OSError."""
        content = Content(hashlib.sha256(data).digest(), len(data))
        if not self.has(content):
            with self.new() as new:
                new.write(data)
                new.keep()
        return content

    def new(self) -> "NewContent":
        """Return a content to be written. Raises OSError."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return NewContent(self, self._directory)

    def read(self, slices: Iterable[Slice]) -> bytes:
        """Return the bytes of slices. Raises OSError if a content is not there any more."""
        pieces: list[bytes] = []
        for content, start, nbytes in slices:
            with self.path_of(content).open("rb") as file:
                file.seek(start)
                data = file.read(nbytes)
            if len(data) < nbytes:
                raise self._damaged(content)
            pieces.append(data)
        return b"".join(pieces)

    def read_whole(self, content: Content) -> bytes:
        """Return a content, checked. Raises OSError."""
        data = self.read([Slice(content, 0, content.nbytes)])
        if hashlib.sha256(data).digest() != content.sha256:
            raise self._damaged(content)
        return data

    def copy_out(self, content: Content, name: str, *, within: int, executable: bool) -> None:
        """Write a new file with this content, checked. Raises OSError, also if the file exists.

        Args:
            content: The file's content.
            name: The file's name.
            within: A descriptor of its directory.
            executable: Whether the user may run it.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        mode = 0o755 if executable else 0o644
        descriptor = os.open(name, flags, mode, dir_fd=within)
        with open(descriptor, "wb") as writer:  # noqa: PTH123 - a descriptor
            if not content.nbytes:
                return
            with self.path_of(content).open("rb") as reader:
                copied = _read(reader, writer.write)
        if copied != content:
            raise self._damaged(content)

    def prune(self, needed: AbstractSet[bytes] = frozenset()) -> None:
        """Remove the contents that were not used for longest, beyond `KEPT_BYTES`.

        Args:
            needed: The hashes of those that must stay.
        """
        old, names = time.time() - YOUNG_S, {each.hex() for each in needed}
        found: list[tuple[float, int, Path]] = []
        for path in self._directory.glob("*/*"):
            with contextlib.suppress(OSError):
                about = path.stat()
                found.append((about.st_mtime, about.st_size, path))
        excess = sum(nbytes for _, nbytes, _ in found) - KEPT_BYTES
        for used, nbytes, path in sorted(found):
            if excess <= 0 or used >= old:
                break
            if path.parent.name + path.name not in names:  # as also .DS_Store of a Mac's Finder
                path.unlink(missing_ok=True)
                excess -= nbytes
        for path in self._directory.glob("new-*"):  # of a process that was killed
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < old:
                    path.unlink()

    def _damaged(self, content: Content) -> OSError:
        """Remove a content that a power failure, or somebody, has changed."""
        self.path_of(content).unlink(missing_ok=True)
        return OSError(0, "a stored file was damaged, and is removed; start the command again")


class NewContent:
    """A content that is being written. Use it in a `with` block; `keep` gives it its name."""

    def __init__(self, store: FileStore, directory: Path) -> None:
        self._store = store
        descriptor, name = tempfile.mkstemp(dir=directory, prefix="new-")
        self._file = open(descriptor, "wb")  # noqa: PTH123, SIM115 - a descriptor; closed below
        self._path = Path(name)
        self._hashed = hashlib.sha256()
        self._nbytes = 0

    @property
    def content(self) -> Content:
        """The content that was written so far."""
        return Content(self._hashed.digest(), self._nbytes)

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hashed.update(data)
        self._nbytes += len(data)

    def keep(self) -> Content:
        """Store it under its hash. Raises OSError."""
        self._file.close()
        target = self._store.path_of(self.content)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        self._path.rename(target)
        return self.content

    def close(self) -> None:
        """Remove it, unless it was kept."""
        with contextlib.suppress(OSError):  # a full disk, again
            self._file.close()
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ContentsReceiver:
    """Stores contents that come in slices, one after the other."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._new: NewContent | None = None

    def write(self, slices: Iterable[Slice], data: bytes) -> None:
        """Write some more, the bytes of these slices.

        Raises:
            OSError: The disk is full.
            UsageError: A content has another hash than was announced.
        """
        begin = 0
        for content, start, nbytes in slices:
            if self._new is None:
                self._new = self._store.new()
            self._new.write(data[begin : begin + nbytes])
            begin += nbytes
            if start + nbytes == content.nbytes:
                if self._new.content != content:
                    raise UsageError("a file that was sent is not what was announced")
                self._new.keep()
                self._new = None

    def close(self) -> None:
        """Remove a content that has not come whole."""
        if self._new is not None:
            self._new.close()
            self._new = None


def _read(file: BinaryIO, take: Callable[[bytes], object]) -> Content:
    """Pass a file's bytes to `take`, and return its content."""
    hashed, nbytes = hashlib.sha256(), 0
    while block := file.read(_BLOCK_BYTES):
        hashed.update(block)
        take(block)
        nbytes += len(block)
    return Content(hashed.digest(), nbytes)


def _no_more(_: bytes) -> None: ...
