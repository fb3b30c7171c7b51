"""The two key files of a home: what the machine is, and which mesh it belongs to.

`node_key` holds the 32-byte Ed25519 seed; `mesh_key` holds the text that `pmesh key show` prints.
"""

import contextlib
import errno
import os
import shlex
import stat
import tempfile
from pathlib import Path

from pmesh.agent.own_files import move_away, reason
from pmesh.core.identity import MeshKey, NodeKey, mesh_key_from_text, mesh_key_text
from pmesh.errors import KeyFileError

NODE_KEY_NAME = "node_key"
MESH_KEY_NAME = "mesh_key"
NODE_KEY_BYTES = 32
_LONGEST_KEY_FILE_BYTES = 4096  # a mesh key is 100 bytes; a wrong path to a film is not read
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def load_node_key(home: Path, *, entropy: bytes) -> NodeKey:
    """The machine's identity; made of `entropy` (32 random bytes) if the home has none yet.

    Raises:
        KeyFileError: The file is not a private file of 32 bytes, or can't be made.
    """
    path = home / NODE_KEY_NAME
    seed = _read_private(path)
    if seed is None:
        seed = entropy
        _write_private(path, seed)
    if len(seed) != NODE_KEY_BYTES:
        raise KeyFileError(
            f"{path} holds {len(seed)} bytes, a node key has {NODE_KEY_BYTES}; the next start makes"
            f" a new identity after: {move_away(path)}"
        )
    return NodeKey.from_seed(seed)


def load_mesh_key(home: Path) -> MeshKey | None:
    """The home's mesh key; None if it has none yet. Raises KeyFileError if it can't be used."""
    path = home / MESH_KEY_NAME
    text = _read_private(path)
    return None if text is None else _parse_mesh_key(path, text)


def read_mesh_key(path: Path) -> MeshKey:
    """The mesh key in a file that the user named, which may be a link; raises KeyFileError."""
    text = _read_private(path, flags=0)
    if text is None:
        raise KeyFileError(f"there is no key file {path}")
    return _parse_mesh_key(path, text)


def store_mesh_key(home: Path, key: MeshKey) -> None:
    """Make this the home's mesh key, in place of any other; raises KeyFileError if it can't."""
    _write_private(home / MESH_KEY_NAME, f"{mesh_key_text(key)}\n".encode())


def _parse_mesh_key(path: Path, text: bytes) -> MeshKey:
    try:
        return mesh_key_from_text(text.decode())
    except ValueError as e:  # a UnicodeDecodeError is one too
        raise KeyFileError(
            f"{path} holds no mesh key ({e}); run: {move_away(path)},"
            " then 'pmesh key set', and paste what 'pmesh key show' prints elsewhere"
        ) from e


def _read_private(path: Path, flags: int = os.O_NOFOLLOW) -> bytes | None:
    """This user's own file, which nobody else can read; None if there is none."""
    try:  # O_NONBLOCK: a pipe won't block
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except FileNotFoundError:
        return None
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise KeyFileError(f"{path} is a link; run: {move_away(path)}") from e
        with contextlib.suppress(OSError):
            if path.stat().st_uid != os.geteuid():
                raise _of_another(path) from e
        raise KeyFileError(f"can't read {path}: {e.strerror}; run: {_make_private(path)}") from e
    with open(descriptor, "rb", closefd=True) as file:  # noqa: PTH123 - a descriptor has no path
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise KeyFileError(f"{path} is not a file; run: {move_away(path)}")
        if found.st_uid != os.geteuid():  # root could read it all the same
            raise _of_another(path)
        if found.st_mode & _OTHERS:
            raise KeyFileError(f"other users can read {path}; run: {_make_private(path)}")
        return file.read(_LONGEST_KEY_FILE_BYTES)


def _write_private(path: Path, content: bytes) -> None:
    """Whole or not at all, and still there after a loss of power; a link is replaced."""
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(descriptor, "wb", closefd=True) as file:  # noqa: PTH123 - likewise
            file.write(content)  # mkstemp: O_EXCL and 0600
            file.flush()
            os.fsync(descriptor)
        os.rename(temporary, path)  # noqa: PTH104 - one call for what the comment above promises
        _flush_directory(path.parent)
    except OSError as e:
        if temporary is not None:
            with contextlib.suppress(OSError):  # renamed already
                os.unlink(temporary)  # noqa: PTH108 - likewise
        raise KeyFileError(f"can't write {path}: {reason(e)}") from e


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_private(path: Path) -> str:
    return f"chmod 600 {shlex.quote(str(path))}"


def _of_another(path: Path) -> KeyFileError:
    mend = f"chown {os.geteuid()} {shlex.quote(str(path))}"
    return KeyFileError(
        f"{path} belongs to another user; if the key in it is yours, run as root: {mend}"
    )
