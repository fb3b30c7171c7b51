"""Limits of the agent's file descriptors and memory, and the admission of trainers."""

import contextlib
import resource
from collections.abc import Generator
from dataclasses import dataclass

from pmesh.errors import UsageError
from pmesh.net.sessions.arena_pools import ArenaBudget, ArenaShare, Budget
from pmesh.net.sessions.sessions import MAX_VISITORS

OPEN_FILES = 10_240  # macOS starts programs with 256 and allows this many (OPEN_MAX)
FEW_OPEN_FILES = 1024  # ample for 64 pending connections, 8 links, lanes and arenas of a few jobs

MAX_FOLLOWERS = 64  # terminals with a launch
MAX_TRAINERS = 128  # their part of a heartbeat takes half of a control message

_FILES_OF_A_TRAINER = 2  # its connection, and a descriptor that reports the end of its process


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """How many open files local programs may use, so that enough remain for the agent itself."""

    limit: int
    """The limit of this process."""
    visitors: int
    """Connections that have not identified themselves as a trainer's."""
    followers: int
    """Connections that show what a launch prints, for as long as it runs."""
    trainers: int
    """Connections of trainers: for their ops, for their messages, and for each group."""
    arenas: int
    """Arenas of all trainers together."""

    def describe_trainers(self) -> str:
        """Return why no other trainer is admitted, and what to do."""
        text = (
            f"this agent serves at most {self.trainers} trainer connections, and a program may "
            "have half of those that other programs leave"
        )
        if self.trainers == MAX_TRAINERS:
            return text
        return (
            f"{text}, because only {self.limit} files may be open at once; raise the limit with "
            f"'ulimit -n {FEW_OPEN_FILES}' before 'pmesh up'"
        )


def plan_files(limit: int) -> FilePlan:
    """Divide the files: half stays for the agent's own listeners, links, lanes and dials.

    >>> plan_files(256)
    FilePlan(limit=256, visitors=32, followers=16, trainers=16, arenas=48)
    """
    local = limit // 2
    visitors = max(min(MAX_VISITORS, local // 4), 1)
    followers = max(min(MAX_FOLLOWERS, local // 8), 1)
    trainers = max(min(MAX_TRAINERS, local // 8), 1)
    return FilePlan(
        limit=limit,
        visitors=visitors,
        followers=followers,
        trainers=trainers,
        arenas=max(local - visitors - followers - _FILES_OF_A_TRAINER * trainers, 0),
    )


def open_files_limit() -> int:
    """Return how many files this process may open; OPEN_FILES if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def raise_open_files() -> str | None:
    """Raise the soft limit of open files; return a warning if it stays too low."""
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
    """Admits trainers within the agent's budgets for all programs on its machine."""

    def __init__(self, files: FilePlan, *, memory_bytes: int) -> None:
        """`memory_bytes` is the machine's memory, half of which arenas may take."""
        self._files = files
        self._followers = 0
        self._trainers = Budget[int](limit=files.trainers)
        self._arenas = ArenaBudget(files=files.arenas, nbytes=memory_bytes // 2)

    @contextlib.contextmanager
    def follow(self) -> Generator[None]:
        """Admit a program that starts or follows a launch. Raises UsageError if full."""
        if self._followers >= self._files.followers:
            raise UsageError(
                f"{self._followers} programs show launches here, as many as this agent serves; "
                "end a 'pmesh logs -f' or a 'pmesh run --on'"
            )
        self._followers += 1
        try:
            yield
        finally:
            self._followers -= 1

    @contextlib.contextmanager
    def admit(self, pid: int) -> Generator[ArenaShare]:
        """Admit a trainer's connection and give its program's share. Raises UsageError if full."""
        if not self._trainers.take(pid, 1):
            count = (
                f"{self._trainers.held} are in use, {self._trainers.held_by(pid)} by this program"
            )
            raise UsageError(f"{self._files.describe_trainers()}; {count}")
        try:
            yield ArenaShare(self._arenas, pid)
        finally:
            self._trainers.give_back(pid, 1)
