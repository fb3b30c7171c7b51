"""The agent's home directory, private to its user: its files, its two keys, its lock.

Only this user's own files are opened, and errors say what to do. `node_key` holds the 32-byte
Ed25519 seed; `mesh_key` holds the text that `pmesh key show` prints. The lock gives the home to one
agent.
"""

import contextlib
import errno
import fcntl
import os
import shlex
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Final

from pmesh.core.identity.keys import MeshKey, NodeKey, mesh_key_from_text, mesh_key_text
from pmesh.errors import AgentAlreadyRunning, ConfigError, KeyFileError
from pmesh.home_paths import LOCK_NAME, MESH_KEY_NAME, NODE_KEY_NAME, check_home


def open_own_file(path: Path, flags: int = 0) -> int:
    """Open a file for reading and writing, and create it (0600) if there is none.

    Writing to a link or to a file with a second name would change another file. Such a file, and
    one of another user, is refused and not changed.

    Args:
        path: A path in a home that `open_home` has accepted.
        flags: More flags of `os.open`, such as O_APPEND.

    Raises:
        ConfigError: The file is refused or can't be written; the message says what to do.
    """
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o600)  # a pipe won't block
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a link; run: {move_away(path)}") from e
        if e.errno == errno.EISDIR:
            raise ConfigError(f"{path} is not a file; run: {move_away(path)}") from e
        raise ConfigError(f"can't write {path}: {_why_not_written(e)}") from e
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        what = "is not a file"
    elif found.st_uid != os.geteuid():
        what = "belongs to another user"
    elif found.st_nlink > 1:
        what = "is also a file elsewhere (a hard link)"
    else:
        return descriptor
    os.close(descriptor)
    raise ConfigError(f"{path} {what}; run: {move_away(path)}")


def reason(error: OSError) -> str:
    """Return why a write failed, and what to do if the disk is full."""
    text = error.strerror or str(error)
    return f"{text}; free some space, then run it again" if is_full(error) else text


def _why_not_written(error: OSError) -> str:
    refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    cure = "; make its directory writable, or set PMESH_HOME to another home" if refused else ""
    return f"{reason(error)}{cure}"


def is_full(error: OSError) -> bool:
    """True if the disk, or this user's quota, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def move_away(path: Path) -> str:
    """Return a command that renames a file, so that a new one can take its path."""
    quoted = shlex.quote(str(path))
    return f"mv {quoted} {quoted}.bad"


def open_home(home: Path) -> Path:
    """Create the home directory (0700) if there is none; refuse one that others can enter.

    Raises:
        ConfigError: It can't be created, is not a directory, belongs to another user, or is open to
            others; the message has the command that fixes it.
    """
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        cure = "" if is_full(e) else "; choose another with --home"
        raise ConfigError(f"can't use {home} as home: {reason(e)}{cure}") from e
    check_home(home, holds_keys=True)
    return home


@contextlib.contextmanager
def hold_home(home: Path) -> Generator[None]:
    """Be this home's only agent within the block.

    The kernel drops the lock however the process ends. The file stays: if it were removed, two
    agents could lock two files of the same name.

    Raises:
        AgentAlreadyRunning: Another process holds the lock; the message has its pid.
        ConfigError: The lock file can't be written, or is not this user's own.
    """
    path = home / LOCK_NAME
    descriptor = open_own_file(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        except BlockingIOError:
            pid = os.read(descriptor, 32).decode(errors="replace").strip()
            raise AgentAlreadyRunning(
                f"an agent already runs in {home}: {f'pid {pid}' if pid else 'it is just starting'}"
                "; stop it with 'pmesh down', or choose another home with --home"
            ) from None
        except OSError as e:
            raise ConfigError(f"can't write {path}: {_why_not_written(e)}") from e
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the pid of an ended process does no harm
                os.truncate(descriptor, 0)
    finally:
        os.close(descriptor)


NODE_KEY_BYTES = 32
_LONGEST_KEY_FILE_BYTES = 4096  # a mesh key is 100 bytes; we don't read a huge file by mistake
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def load_node_key(home: Path, *, entropy: bytes) -> NodeKey:
    """Load the machine's identity; make it from `entropy` (32 random bytes) if there is none.

    Raises:
        KeyFileError: The file is not a private file of 32 bytes, or can't be written.
    """
    path = home / NODE_KEY_NAME
    seed = read_private(path)
    if seed is None:
        seed = entropy
        write_private(path, seed)
    if len(seed) != NODE_KEY_BYTES:
        raise KeyFileError(
            f"{path} holds {len(seed)} bytes, but a node key has {NODE_KEY_BYTES}; to get a new"
            f" identity at the next start, run: {move_away(path)}"
        )
    return NodeKey.from_seed(seed)


def load_mesh_key(home: Path) -> MeshKey | None:
    """Load the home's mesh key; None if there is none. Raises KeyFileError if it is invalid."""
    path = home / MESH_KEY_NAME
    text = read_private(path)
    return None if text is None else _parse_mesh_key(path, text)


def read_mesh_key(path: Path) -> MeshKey:
    """Read the mesh key in a file that the user named, which may be a link.

    Raises:
        KeyFileError: The file is missing, not private, or holds no mesh key.
    """
    if path.is_dir():  # to move it away, as below, would be bad advice
        raise KeyFileError(f"{path} is a directory; name the file in it that holds the mesh key")
    text = read_private(path, flags=0)
    if text is None:
        raise KeyFileError(f"there is no key file {path}")
    return _parse_mesh_key(path, text)


def store_mesh_key(home: Path, key: MeshKey, *, in_place_of: Path | None = None) -> None:
    """Write the home's mesh key, replacing any other. Raises KeyFileError if that fails.

    Args:
        home: The home.
        key: The key.
        in_place_of: A file that is removed as the key is written, and stays if it can't be.
    """
    text = f"{mesh_key_text(key)}\n".encode()
    write_private(home / MESH_KEY_NAME, text, in_place_of=in_place_of)


def _parse_mesh_key(path: Path, text: bytes) -> MeshKey:
    try:
        return mesh_key_from_text(text.decode())
    except ValueError as e:  # includes UnicodeDecodeError
        raise KeyFileError(
            f"{path} holds no mesh key ({e}); run: {move_away(path)},"
            " then 'pmesh key set', and paste what 'pmesh key show' prints elsewhere"
        ) from e


def read_private(
    path: Path, flags: int = os.O_NOFOLLOW, *, most_bytes: int = _LONGEST_KEY_FILE_BYTES
) -> bytes | None:
    """Read a file of this user that nobody else can read; None if there is none."""
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
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):  # Python opens no directory, and would not close it
        os.close(descriptor)
        raise KeyFileError(f"{path} is not a file; run: {move_away(path)}")
    with open(descriptor, "rb", closefd=True) as file:  # noqa: PTH123 - a descriptor has no path
        if found.st_uid != os.geteuid():  # root could still read it
            raise _of_another(path)
        if found.st_mode & _OTHERS:
            raise KeyFileError(f"other users can read {path}; run: {_make_private(path)}")
        return file.read(most_bytes)


def write_private(path: Path, content: bytes, *, in_place_of: Path | None = None) -> None:
    """Write the file atomically, so that it survives a power loss; a link is replaced.

    The file `in_place_of` is removed, but only once the disk has taken all of the content.
    """
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(descriptor, "wb", closefd=True) as file:  # noqa: PTH123 - as above
            file.write(content)  # mkstemp: O_EXCL and 0600
            file.flush()
            os.fsync(descriptor)
        if in_place_of is not None:
            remove_private(in_place_of)
        os.rename(temporary, path)  # noqa: PTH104 - one atomic system call
        _flush_directory(path.parent)
    except (OSError, KeyFileError) as e:
        if temporary is not None:
            with contextlib.suppress(OSError):  # already renamed
                os.unlink(temporary)  # noqa: PTH108 - as above
        if isinstance(e, KeyFileError):
            raise
        raise KeyFileError(f"can't write {path}: {_why_not_written(e)}") from e


def remove_private(path: Path) -> None:
    """Remove a file, if it is there. Raises KeyFileError if that fails."""
    try:
        path.unlink(missing_ok=True)
    except OSError as e:
        raise KeyFileError(f"can't remove {path}: {_why_not_written(e)}") from e


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


MAX_LOG_BYTES: Final = 8 << 20  # of agent.log, and of agent.log.1 before it
_OUTPUTS: Final = (1, 2)


class LogFile:
    """Where the output of an agent goes that was started with `--detach` or by launchd."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def rotate_if_full(self) -> None:
        """Begin a new file if this one is full, and give the old one the suffix .1.

        Raises OSError if it can't be moved. If there can be no new one, the old one goes on.
        """
        found = os.fstat(_OUTPUTS[1])
        if found.st_size < self._max_bytes or not self._is(found):
            return
        self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        try:
            descriptor = open_own_file(self._path, os.O_APPEND)
        except ConfigError:
            return
        for output in _OUTPUTS:
            os.dup2(descriptor, output)
        os.close(descriptor)

    def _is(self, found: os.stat_result) -> bool:
        try:
            return os.path.samestat(found, self._path.stat())
        except FileNotFoundError:  # the user has removed it
            return False
