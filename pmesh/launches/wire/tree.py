"""A directory as `pmesh run --sync` sends it: its names, and the hashes of its contents.

The encoded tree is a content too, so that one hash stands for a whole directory.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.errors import ProtocolError

MAX_ENTRIES: Final = 50_000  # the indices of as many fit into one message on a link
MAX_TREE_BYTES: Final = 16 * 1024 * 1024  # 50,000 entries of 300 bytes
MAX_PATH: Final = 1024  # macOS takes no longer path
MAX_NAME_BYTES: Final = 255  # of one part of a path, on every file system that is in use

Sha256: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Path = Annotated[str, Meta(min_length=1, max_length=MAX_PATH)]


class FileEntry(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """A file."""

    path: _Path
    """Relative to the directory, with slashes."""
    sha256: Sha256
    nbytes: Annotated[int, Meta(ge=0, le=2**48)]
    executable: bool = False


class LinkEntry(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """A symbolic link to something within the directory."""

    path: _Path
    target: _Path


class DirectoryEntry(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """An empty directory; the others follow from their files."""

    path: _Path


Entry: TypeAlias = FileEntry | LinkEntry | DirectoryEntry


class Content(NamedTuple):
    """What a file holds, wherever it lies."""

    sha256: bytes
    nbytes: int


_decoder: msgspec.msgpack.Decoder[tuple[Entry, ...]] = msgspec.msgpack.Decoder(
    Annotated[tuple[Entry, ...], Meta(max_length=MAX_ENTRIES)]
)
_encoder = msgspec.msgpack.Encoder()


def encode_tree(entries: Sequence[Entry]) -> bytes:
    """Return the tree as bytes; equal directories have equal bytes."""
    return _encoder.encode(sorted(entries, key=lambda entry: entry.path))


def decode_tree_untrusted(data: bytes) -> tuple[Entry, ...]:
    """Reverse `encode_tree`; raise ProtocolError for what no honest machine would send."""
    try:
        entries = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"it is not the tree of a directory: {e}") from e
    flaw = flaw_of(entries)
    if flaw:
        raise ProtocolError(f"it is not the tree of a directory: {flaw}")
    return entries


def content_of(data: bytes) -> Content:
    """Return the hash and the size."""
    return Content(hashlib.sha256(data).digest(), len(data))


def contents_of(entries: Iterable[Entry]) -> tuple[Content, ...]:
    """Return each content once, in the order of the tree; those of empty files need no sending."""
    files = (entry for entry in entries if isinstance(entry, FileEntry) and entry.nbytes)
    return tuple(dict.fromkeys(Content(file.sha256, file.nbytes) for file in files))


def flaw_of(entries: Iterable[Entry]) -> str:
    """Return why a directory can't be made from these entries; "" if it can.

    Nothing may be written outside of the directory, whatever the entries say. So the names have no
    `..`, nothing lies below a link, and a link leads only downwards once it has gone up through the
    directories above it, which are real ones. A disk may take `Data` and `data` for one name: who
    makes the directory opens each one above an entry, and none that is a link.

    >>> flaw_of([LinkEntry("data", "/mnt/data")])
    "'data' is a link to '/mnt/data', outside of the directory"
    """
    kinds: dict[str, type[Entry]] = {}
    above: set[str] = set()
    for entry in entries:
        flaw = _flaw_of_path(entry.path)
        if not flaw and entry.path in kinds:
            flaw = f"{entry.path!r} is there twice"
        if not flaw and isinstance(entry, LinkEntry) and not _stays_within(entry):
            flaw = f"{entry.path!r} is a link to {entry.target!r}, outside of the directory"
        if flaw:
            return flaw
        kinds[entry.path] = type(entry)
        above.update(_directories_above(entry.path))
    for path in sorted(above & kinds.keys()):
        return f"{path!r} is no directory with files, and others lie below it"
    return ""


def _directories_above(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def _flaw_of_path(path: str) -> str:
    parts = path.split("/")
    if any(part in {"", ".", ".."} for part in parts):
        return f"{path!r} is no path below a directory"
    if "\0" in path:
        return f"{path!r} has a null character"
    try:
        lengths = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return f"the name {path!r} is not valid UTF-8, which some machines need"
    if max(lengths) > MAX_NAME_BYTES:
        return f"{path!r} has a name of more than {MAX_NAME_BYTES} bytes"
    return ""


def _stays_within(link: LinkEntry) -> bool:
    """Return True if the target begins with `..` at most for each directory above, then goes down.

    Through another link it could go up from elsewhere: so there is no `..` after a name.
    """
    parts = link.target.split("/")
    ups = next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    down = parts[ups:]
    return ups <= link.path.count("/") and not (
        ".." in down or (down and not down[0]) or "\0" in link.target
    )
