"""The paths of an agent's home, of its files that other programs read, and of its Unix socket.

And how directories are opened, removed and compared without being led elsewhere by a link.
"""

import contextlib
import hashlib
import os
import shlex
import shutil
import stat
from collections.abc import Generator
from pathlib import Path

from pmesh.errors import ConfigError

LOCK_NAME = "agent.lock"
NODE_KEY_NAME = "node_key"
MESH_KEY_NAME = "mesh_key"
MESH_KEYS_NAME = "mesh_keys"
LOG_NAME = "agent.log"
HOME_NAMES = (NODE_KEY_NAME, MESH_KEY_NAME, MESH_KEYS_NAME, LOCK_NAME)
"""Files of which the home of each agent has one: three hold keys."""
MAX_SOCKET_PATH_BYTES = 103  # macOS: 104 with the closing NUL; Linux allows 4 more

# Not tempfile.gettempdir(): it follows TMPDIR, which may differ between the shells of the agent and
# the trainer, and both need the same path. macOS and Linux both have this one.
SYSTEM_TEMPORARY = Path("/tmp")  # noqa: S108 - the directory made in it is 0700 and checked

COPY_VARIABLE = "PMESH_COPY"
"""For a command of `pmesh run --sync`: the copy of the directory in which it runs."""

CONNECTS_VARIABLE = "PMESH_CONNECTS"
"""For a command of `pmesh run`: the file that a program makes before it connects to its agent."""

A_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags of `os.open` for a directory that is no link to one."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_PASS = stat.S_IXGRP | stat.S_IXOTH


def home_directory(home: Path | str | None = None) -> Path:
    """Return the agent's home: `home` if given, else PMESH_HOME, else `~/.pmesh`.

    The path is absolute and without symbolic links, so that every name of a home leads to the same
    socket. Nothing is created, and the home need not exist.

    Raises ConfigError if others can write to the home, or if it belongs to another user: its files
    may be theirs. And if the path leads nowhere.
    """
    chosen = home or os.environ.get("PMESH_HOME") or "~/.pmesh"
    path = expand_user(Path(chosen))
    try:
        directory = path.resolve()
    except (OSError, RuntimeError) as e:  # this directory is gone; links in a circle
        raise ConfigError(f"can't use {path} as home: {e}; choose another with --home") from e
    check_home(directory)
    return directory


def expand_user(path: Path) -> Path:
    """Replace `~` or `~USER` at its beginning. Raises ConfigError if that has no home directory."""
    try:
        return path.expanduser()
    except RuntimeError as e:
        raise ConfigError(
            f"{path}: the system knows no home directory of {path.parts[0]}; write the whole path"
        ) from e


def check_home(home: Path, *, holds_keys: bool = False) -> None:
    """Raise ConfigError if the user does not control the home; one that does not exist is fine.

    The message has the command that repairs it, if there is one.

    Args:
        home: A result of `home_directory`.
        holds_keys: Also refuse a home that others can enter.
    """
    try:
        found = home.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{home} is not a directory; choose another home with --home")
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"{home} belongs to another user; run pmesh as that user, or choose another home "
                "with --home"
            )
        _check_above(home)
    except FileNotFoundError:
        return
    except OSError as e:
        raise ConfigError(
            f"can't use {home} as home: {e.strerror}; choose another with --home"
        ) from e
    mend = f"chmod 700 {shlex.quote(str(home))}"
    if found.st_mode & _OTHERS_WRITE:
        raise ConfigError(
            f"other users can change the files in {home}; check that they are yours, then run: "
            f"{mend}"
        )
    if holds_keys and found.st_mode & _OTHERS:
        raise ConfigError(f"{home} holds keys, and other users can enter it; run: {mend}")


def _check_above(home: Path) -> None:
    """Refuse a path on which any user could replace the home by another directory.

    A directory that a group can write to is accepted: on Linux it is often the user's own group.
    """
    for directory in reversed(home.parents):
        mode = directory.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"any user can rename files in {directory}, and so replace {home}; run: "
                f"chmod +t {shlex.quote(str(directory))}"
            )
        if not mode & _OTHERS_PASS:
            return  # others cannot reach deeper directories


def socket_path(home: Path) -> Path:
    """Return the path of the agent's Unix socket for this home (a result of `home_directory`).

    It lies in the home. If that path is too long for the system, it lies in a 0700 directory of the
    user in the system's temporary directory, which this function creates if needed.

    Raises ConfigError if others can use that directory, or if the path holds anything but a socket
    of this user.
    """
    path = home / "agent.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        name = hashlib.sha3_256(os.fsencode(home)).hexdigest()[:16]
        path = _private_directory() / f"{name}.sock"
    with contextlib.suppress(OSError):  # there is none yet
        found = path.lstat()
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            quoted = shlex.quote(str(path))
            raise ConfigError(f"{path} is not a socket of yours; run: mv {quoted} {quoted}.bad")
    return path


def _private_directory() -> Path:
    directory = SYSTEM_TEMPORARY / f"pmesh-{os.getuid()}"
    # Another user may have created this name first: as a file, as a link, or open to others.
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not ours or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{directory} is not a directory that only you can enter; remove it, "
            "or set PMESH_HOME to a shorter path"
        )
    return directory


def holds_keys(directory: Path) -> bool:
    """Return True for the home of any agent, whatever its path is."""
    return any(os.path.lexists(directory / name) for name in HOME_NAMES)


def path_below(directory: Path, path: Path) -> Path | None:
    """Return how a path goes on from a directory; None if it leads elsewhere.

    Links are followed, but for one at its end. Directories are compared by what they are: a disk
    may have several names for one.
    """
    real = path.parent.resolve() / path.name
    for above in (real, *real.parents):
        with contextlib.suppress(OSError):
            if above.samefile(directory):
                return real.relative_to(above)
    return None


def is_in_launch_copy(path: Path) -> bool:
    """Return True for what lies in this launch's own copy of a directory: no later one has it."""
    copy = os.environ.get(COPY_VARIABLE, "")
    return copy != "" and path_below(Path(copy), path.absolute()) is not None


@contextlib.contextmanager
def open_directory(path: Path | str, *, within: int | None = None) -> Generator[int]:
    """Give a descriptor of a directory; one that is a link is refused.

    Args:
        path: What to open.
        within: A descriptor of the directory that a relative path begins at.

    Raises:
        OSError: There is no such directory, or it can't be entered.
    """
    descriptor = os.open(path, A_DIRECTORY, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def remove_tree(directory: Path, name: str) -> None:
    """Remove what has this name in a directory, with all that is in it; a failure is no error.

    No link is followed, so nothing is removed elsewhere. Raises ValueError for a name that leads
    elsewhere.
    """
    if "/" in name or name in {"", ".", ".."}:
        raise ValueError(f"{name!r} is not the name of something in a directory")
    with contextlib.suppress(OSError), open_directory(directory) as descriptor:
        shutil.rmtree(name, ignore_errors=True, dir_fd=descriptor)
