"""The file that the log of an agent goes to: it is moved aside before it fills a disk."""

import os
from pathlib import Path
from typing import Final

from pmesh.agent.home import open_own_file
from pmesh.errors import ConfigError

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
