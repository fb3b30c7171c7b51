"""Files of the home: opened only if they are this user's own, and failures said in a sentence."""

import errno
import os
import shlex
import stat
from pathlib import Path

from pmesh.errors import ConfigError


def open_own_file(path: Path, flags: int = 0) -> int:
    """Open a file for reading and writing, and make it (0600) where there is none.

    What it writes would end up elsewhere if the file were a link or had a second name; such a file,
    and one of another user, is refused and not changed.

    Args:
        path: In a home that `open_home` has accepted.
        flags: Further ones of `os.open`, such as O_APPEND.

    Raises:
        ConfigError: With what to do.
    """
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o600)  # a pipe won't block
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a link; run: {move_away(path)}") from e
        raise ConfigError(f"can't write {path}: {reason(e)}") from e
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
    """Why a write has failed, and what to do where the disk is full."""
    text = error.strerror or str(error)
    return f"{text}; free some space, then run it again" if is_full(error) else text


def is_full(error: OSError) -> bool:
    """Whether there was no room on the disk, or none for this user."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def move_away(path: Path) -> str:
    """The command after which a new file can be made at this path; nothing is lost."""
    quoted = shlex.quote(str(path))
    return f"mv {quoted} {quoted}.bad"
