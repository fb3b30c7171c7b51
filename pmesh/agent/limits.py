"""What an agent may use of the system's descriptors and memory, and which trainers fit in."""

import contextlib
import resource
from collections.abc import Generator
from dataclasses import dataclass

from pmesh.core.budgets import Budget
from pmesh.errors import UsageError
from pmesh.net.local.arena_pools import ArenaBudget, ArenaShare
from pmesh.net.local.sessions import MAX_VISITORS

OPEN_FILES = 10_240  # macOS starts programs with 256 and allows this many (OPEN_MAX)
FEW_OPEN_FILES = 1024  # 64 pending connections, 8 links, lanes and arenas of a few jobs, with room

MAX_TRAINERS = 128  # what a heartbeat tells of them takes half of a control message

_FILES_OF_A_TRAINER = 2  # its connection, and what tells of the end of its process


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """What local programs may use of the open files, so that the agent's own always suffice."""

    limit: int
    """Of this process."""
    visitors: int
    """Connections that have not said that they are a trainer's."""
    trainers: int
    """Connections of trainers: for their ops, for their messages, and for each group."""
    arenas: int
    """Of all trainers together."""

    def describe_trainers(self) -> str:
        """Why there can't be another trainer, and what to do."""
        text = (
            f"this agent serves {self.trainers} connections of trainers at most, of which one "
            "program gets half of what the others leave"
        )
        if self.trainers == MAX_TRAINERS:
            return text
        return (
            f"{text}, as only {self.limit} files may be open at once; raise that with "
            f"'ulimit -n {FEW_OPEN_FILES}' before 'pmesh up'"
        )


def plan_files(limit: int) -> FilePlan:
    """Half for the agent itself: listeners, links, lanes, dials, the door. The rest as here.

    >>> plan_files(256)
    FilePlan(limit=256, visitors=32, trainers=16, arenas=64)
    """
    local = limit // 2
    visitors = max(min(MAX_VISITORS, local // 4), 1)
    trainers = max(min(MAX_TRAINERS, local // 8), 1)
    arenas = max(local - visitors - _FILES_OF_A_TRAINER * trainers, 0)
    return FilePlan(limit=limit, visitors=visitors, trainers=trainers, arenas=arenas)


def open_files_limit() -> int:
    """How many files this process may have open; OPEN_FILES where nothing limits it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def raise_open_files() -> str | None:
    """Raise the soft limit of open files; a sentence for the user if too few remain."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        allowed, why = soft, "the system allows no more"
    else:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            allowed, why = wanted, "the system allows no more"
        except (OSError, ValueError) as e:
            allowed, why = soft, str(e)
    if allowed == resource.RLIM_INFINITY or allowed >= FEW_OPEN_FILES:
        return None
    return (
        f"only {allowed} files may be open at once ({why}): connections may be refused;"
        f" raise it with 'ulimit -n {FEW_OPEN_FILES}' before 'pmesh up'"
    )


class Admission:
    """The budgets of one agent for all programs on its machine."""

    def __init__(self, files: FilePlan, *, memory_bytes: int) -> None:
        """`memory_bytes` are the machine's: arenas may take half of them."""
        self._files = files
        self._trainers = Budget[int](limit=files.trainers)
        self._arenas = ArenaBudget(files=files.arenas, nbytes=memory_bytes // 2)

    @contextlib.contextmanager
    def admit(self, pid: int) -> Generator[ArenaShare]:
        """A connection of a trainer, and its program's share of memory; UsageError if full."""
        if not self._trainers.take(pid, 1):
            count = (
                f"{self._trainers.held} are in use, {self._trainers.held_by(pid)} by this program"
            )
            raise UsageError(f"{self._files.describe_trainers()}; {count}")
        try:
            yield ArenaShare(self._arenas, pid)
        finally:
            self._trainers.give_back(pid, 1)
