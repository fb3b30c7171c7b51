"""Write and read the files of checkpoints; a kill at any byte leaves the save before intact."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from pmesh.client.checkpoints.layout import (
    Contents,
    Manifest,
    SaveKey,
    decode_manifest_untrusted,
    manifest_name,
    own_name,
    part_name,
    safetensors_header,
)
from pmesh.core.ops.reductions import Values
from pmesh.errors import ProtocolError, UsageError
from pmesh.home_paths import open_directory, remove_tree

PIECE_BYTES = 1024 * 1024  # so small that the thread rests often and no step waits long for a core
_FOLDER = re.compile(r"save-([0-9]{1,20})-step-(-?[0-9]{1,20})-")  # see `SaveKey.folder`
_TOO_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """How bytes are written to a file; tests pass another `write`."""

    write: Callable[[int, memoryview], int] = os.write
    pace: Callable[[], None] = lambda: None
    """Called after each piece."""


class DamagedError(Exception):
    """A file differs from its manifest; the message names the file."""


def write_save(
    folder: Path, manifest: Manifest, arrays: Sequence[Values], own: Sequence[Values], disk: Disk
) -> Manifest:
    """Write a rank's share of a save, the manifest last; return the manifest with its digests.

    Args:
        folder: the folder of all saves.
        manifest: names the save and, as keys of `digests`, the parts to write.
        arrays: flat uint8, by the numbers in the contents; those of other parts are not read.
        own: the arrays that only this rank has.
        disk: writes the bytes.

    Raises:
        UsageError: the disk is full, read-only, or gone; nothing of the save counts.
    """
    name = manifest.key.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open_directory(folder) as parent, _new_directory(name, parent) as save:
            whole = _write_share(save, manifest, arrays, own, disk)
            os.fsync(parent)
    except OSError as e:
        cure = "free some space" if e.errno in _TOO_FULL else "make it writable"
        raise UsageError(
            f"can't save step {manifest.step} in {folder / name}: {e.strerror}; {cure}, or give "
            "Checkpoints a folder on another disk; earlier saves are as they were"
        ) from e
    return whole


@contextlib.contextmanager
def _new_directory(name: str, parent: int) -> Generator["_Directory"]:
    """Open a directory, and create it if there is none; on an error remove what was created.

    Otherwise each attempt would fill the disk a bit more. Files of other ranks stay.
    """
    is_ours = False
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
        is_ours = True
    with open_directory(name, within=parent) as descriptor:
        directory = _Directory(descriptor)
        try:
            yield directory
        except OSError:
            directory.remove_created()
            if is_ours:
                with contextlib.suppress(OSError):  # others have written to it
                    os.rmdir(name, dir_fd=parent)
            raise


class _Directory:
    """An open directory, and the names of the files that were created in it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._created: list[str] = []

    def write(self, name: str, chunks: Iterable[Values], disk: Disk) -> str:
        """Write a file under another name, flush, then rename it; return the digest."""
        here = self._descriptor
        new = f".{name}.{secrets.token_hex(4)}.new"
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=here)
        try:
            try:
                digest = _write_chunks(file, chunks, disk)
                _flush(file)
            finally:
                os.close(file)
            is_new = name not in os.listdir(here)  # noqa: PTH208 - a descriptor
            os.replace(new, name, src_dir_fd=here, dst_dir_fd=here)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=here)
            raise
        if is_new:  # else another rank has written the same part, to a folder that they share
            self._created.append(name)
        os.fsync(here)
        return digest

    def remove_created(self) -> None:
        for name in reversed(self._created):  # the manifest first, as it names the parts
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._descriptor)


def _write_share(
    save: _Directory,
    manifest: Manifest,
    arrays: Sequence[Values],
    own: Sequence[Values],
    disk: Disk,
) -> Manifest:
    contents, size = manifest.contents, len(manifest.names)
    metadata = {"pmesh_step": str(manifest.step)}
    digests = {
        part: save.write(part_name(part, size), _chunks(contents, part, arrays, metadata), disk)
        for part in manifest.digests
    }
    digest = ""
    if manifest.own is not None:
        chunks = _chunks(manifest.own, 0, own, metadata)
        digest = save.write(own_name(manifest.rank, size), chunks, disk)
    whole = msgspec.structs.replace(manifest, digests=digests, own_digest=digest)
    text = np.frombuffer(msgspec.json.encode(whole), np.uint8)
    save.write(manifest_name(manifest.rank, size), [text], disk)
    return whole


def _chunks(
    contents: Contents, part: int, arrays: Sequence[Values], metadata: dict[str, str]
) -> Iterator[Values]:
    """Yield the bytes of a part's file."""
    order = contents.order(part)
    header = safetensors_header([contents.arrays[i] for i in order], metadata)
    yield np.frombuffer(header, np.uint8)
    yield from (arrays[i] for i in order)


def _write_chunks(file: int, chunks: Iterable[Values], disk: Disk) -> str:
    hasher = xxhash.xxh3_128()
    for chunk in chunks:
        for start in range(0, chunk.size, PIECE_BYTES):
            piece = chunk.data[start : start + PIECE_BYTES]
            hasher.update(piece)
            while piece:
                piece = piece[disk.write(file, piece) :]
            disk.pace()
    return hasher.hexdigest()


def _flush(file: int) -> None:
    """Flush to the disk itself: on macOS fsync only hands the bytes to the drive's cache."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        with contextlib.suppress(OSError):  # a network drive does not support it
            fcntl.fcntl(file, full)
            return
    os.fsync(file)


def export_file(
    path: Path, contents: Contents, arrays: Sequence[Values], metadata: dict[str, str]
) -> None:
    """Write all arrays into one safetensors file. Raises UsageError if that fails."""
    whole = msgspec.structs.replace(contents, cuts=(0, len(contents.arrays)))
    try:
        with open_directory(path.parent) as parent:
            _Directory(parent).write(path.name, _chunks(whole, 0, arrays, metadata), Disk())
    except OSError as e:
        raise UsageError(f"can't write {path}: {e.strerror}; choose another file") from e


def manifests_in(folder: Path) -> tuple[list[Manifest], list[str]]:
    """Return the manifests of all saves in the folder, and why others can't be used.

    Raises:
        UsageError: the folder can't be read.
    """
    manifests: list[Manifest] = []
    wrong: list[str] = []
    try:
        found = sorted(folder.glob("save-*/rank-*.json")) if folder.exists() else []
        if folder.exists():
            next(folder.iterdir(), None)  # raises for a folder that can't be read; glob does not
    except OSError as e:
        raise UsageError(f"can't read the checkpoints in {folder}: {e.strerror}") from e
    for path in found:
        try:
            manifest = decode_manifest_untrusted(path.read_bytes())
        except (OSError, ProtocolError) as e:
            wrong.append(f"{path} is damaged: {e}")
            continue
        size = len(manifest.names)
        there = {
            part: digest
            for part, digest in manifest.digests.items()
            if (path.parent / part_name(part, size)).exists()
        }
        manifests.append(msgspec.structs.replace(manifest, digests=there))
    return manifests, wrong


def read_part(folder: Path, manifest: Manifest, part: int) -> dict[int, Values]:
    """Return the arrays of a part, flat uint8, by their numbers. Raises DamagedError."""
    path = folder / manifest.key.folder / part_name(part, len(manifest.names))
    return _read_arrays(path, manifest.contents, part, manifest.digests[part])


def read_own(folder: Path, manifest: Manifest) -> list[Values]:
    """Return the arrays that only the manifest's rank has. Raises DamagedError."""
    assert manifest.own is not None  # noqa: S101 - the caller has checked
    path = folder / manifest.key.folder / own_name(manifest.rank, len(manifest.names))
    found = _read_arrays(path, manifest.own, 0, manifest.own_digest)
    return [found[i] for i in range(len(found))]


def _read_arrays(path: Path, contents: Contents, part: int, digest: str) -> dict[int, Values]:
    order = contents.order(part)
    hasher, nbytes = xxhash.xxh3_128(), [contents.arrays[i].nbytes for i in order]
    try:
        with path.open("rb", buffering=0) as file:
            length = file.read(8)
            start = path.stat().st_size - sum(nbytes) - len(length)
            if start != int.from_bytes(length, "little"):
                raise DamagedError(f"{path} is damaged: its length is not that of what was saved")
            hasher.update(length + file.read(start))
            arrays = [np.empty(size, np.uint8) for size in nbytes]
            for into in arrays:
                _fill(into, file.readinto)
                hasher.update(into.data)
    except (OSError, EOFError) as e:
        raise DamagedError(f"{path} can't be read: {e}") from e
    if hasher.hexdigest() != digest:
        raise DamagedError(f"{path} is damaged: its bytes are not those that were saved")
    return dict(zip(order, arrays, strict=True))


def _fill(into: Values, read: Callable[[memoryview], int | None]) -> None:
    left = into.data
    while left:
        count = read(left)
        if not count:
            raise EOFError("it ends too early")
        left = left[count:]


def remove_saves_before(folder: Path, key: SaveKey) -> None:
    """Remove the saves that are older than this one; the manifests first, so that none counts."""
    for save in folder.glob("save-*-step-*"):
        named = _FOLDER.match(save.name)
        if named is None or (int(named[1]), int(named[2])) >= (key.serial, key.step):
            continue
        with contextlib.suppress(OSError), open_directory(save) as descriptor:
            for name in os.listdir(descriptor):  # noqa: PTH208 - a descriptor
                if name.startswith("rank-"):
                    os.unlink(name, dir_fd=descriptor)
        remove_tree(folder, save.name)  # another rank may remove it at the same time
