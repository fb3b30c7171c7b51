"""The agent's home directory, private to its user, and the lock that gives it to one agent."""

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

from pmesh.agent.own_files import is_full, open_own_file, reason
from pmesh.client.home import check_home
from pmesh.errors import AgentAlreadyRunning, ConfigError

LOCK_NAME = "agent.lock"


def open_home(home: Path) -> Path:
    """Make the home directory (0700) where there is none; refuse one that others can enter.

    Raises:
        ConfigError: It can't be made, is not a directory, belongs to another user, or is open to
            others; with the command that mends it.
    """
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        cure = "" if is_full(e) else "; choose another by --home"
        raise ConfigError(f"can't use {home} as home: {reason(e)}{cure}") from e
    check_home(home, holds_keys=True)
    return home


@contextlib.contextmanager
def hold_home(home: Path) -> Generator[None]:
    """Be this home's one agent within the block.

    The kernel drops the lock when the process ends, however it ends. The file stays: removing it
    would let two agents lock two files of one name.

    Raises:
        AgentAlreadyRunning: Another process holds it; names its pid.
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
                f"an agent runs in {home} already: {f'pid {pid}' if pid else 'it is just starting'}"
                "; stop it with 'pmesh down', or choose another home by --home"
            ) from None
        except OSError as e:
            raise ConfigError(f"can't write {path}: {reason(e)}") from e
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the pid of an ended process harms nobody
                os.truncate(descriptor, 0)
    finally:
        os.close(descriptor)
