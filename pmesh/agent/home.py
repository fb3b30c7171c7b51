"""The agent's home directory, private to its user, and the lock that gives it to one agent."""

import contextlib
import fcntl
import os
import shlex
import stat
from collections.abc import Generator
from pathlib import Path

from pmesh.errors import AgentAlreadyRunning, ConfigError

LOCK_NAME = "agent.lock"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def open_home(home: Path) -> Path:
    """Make the home directory (0700) where there is none; refuse one that others can enter.

    Raises:
        ConfigError: It can't be made, is not a directory, belongs to another user, or is open to
            others; with the command that mends it.
    """
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = home.stat()
    except OSError as e:
        raise ConfigError(f"can't use {home} as home: {e.strerror}; choose one by --home") from e
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{home} belongs to another user; choose another home by --home")
    if status.st_mode & _OTHERS:
        mend = f"chmod 700 {shlex.quote(str(home))}"
        raise ConfigError(f"{home} holds keys, and other users can enter it; run: {mend}")
    return home


@contextlib.contextmanager
def hold_home(home: Path) -> Generator[None]:
    """Be this home's one agent within the block.

    The kernel drops the lock when the process ends, however it ends. The file stays: removing it
    would let two agents lock two files of one name.

    Raises:
        AgentAlreadyRunning: Another process holds it; names its pid.
        ConfigError: The lock file can't be written.
    """
    descriptor = _open_lock(home)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(descriptor, 32).decode(errors="replace").strip()
            raise AgentAlreadyRunning(
                f"an agent runs in {home} already: {f'pid {pid}' if pid else 'it is just starting'}"
                "; stop it with 'pmesh down', or choose another home by --home"
            ) from None
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        try:
            yield
        finally:
            os.truncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _open_lock(home: Path) -> int:
    path = home / LOCK_NAME
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise ConfigError(f"can't write {path}: {e.strerror}") from e
