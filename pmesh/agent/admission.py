"""Which trainers an agent takes in, and what they may use of its descriptors and memory."""

import contextlib
from collections.abc import Generator

from pmesh.agent.limits import FilePlan
from pmesh.core.budgets import Budget
from pmesh.errors import UsageError
from pmesh.net.arena_pools import ArenaBudget, ArenaShare


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
