"""Where an agent keeps its files, and where a program on the same machine finds its socket."""

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from pmesh.errors import ConfigError

MAX_SOCKET_PATH_BYTES = 103  # macOS: 104 with the closing NUL; Linux allows 4 more

# Not tempfile.gettempdir(): it follows TMPDIR, which may differ between the agent's shell and the
# trainer's, and both must arrive at the same path. macOS and Linux both have this one.
SYSTEM_TEMPORARY = Path("/tmp")  # noqa: S108 - the directory made in it is 0700 and checked


def home_directory(home: Path | str | None = None) -> Path:
    """The agent's home: `home` if given, else PMESH_HOME, else `~/.pmesh`.

    The path is absolute and without symbolic links, so that every way to name a home leads to the
    same socket. Nothing is created.
    """
    chosen = home or os.environ.get("PMESH_HOME") or "~/.pmesh"
    return Path(chosen).expanduser().resolve()


def socket_path(home: Path) -> Path:
    """The path of the agent's Unix socket for this home (as from `home_directory`).

    In the home itself; where that path is too long for the system, in a 0700 directory of the
    user's under the system's temporary directory, which this makes if need be.

    Raises:
        ConfigError: that directory is not this user's alone.
    """
    path = home / "agent.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    name = hashlib.sha3_256(os.fsencode(home)).hexdigest()[:16]
    return _private_directory() / f"{name}.sock"


def _private_directory() -> Path:
    directory = SYSTEM_TEMPORARY / f"pmesh-{os.getuid()}"
    # Anyone may have created this name first: as a file, as a link, or open to others.
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
