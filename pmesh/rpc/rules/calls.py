"""The calls that one rank has made."""

from collections.abc import Iterable
from dataclasses import dataclass

from pmesh.ids import TrainerId


@dataclass(frozen=True, slots=True)
class Pending:
    """A call that has not ended."""

    callee: TrainerId
    deadline: float
    """By the caller's clock, in seconds."""


class Calls:
    """Bookkeeping without I/O; the caller holds a lock. Each call ends once."""

    def __init__(self) -> None:
        self._next = 0
        self._pending: dict[int, Pending] = {}

    def __len__(self) -> int:
        """Return the number of calls that have not ended."""
        return len(self._pending)

    def begin(self, callee: TrainerId, *, deadline: float) -> int:
        """Register a call; return its number, which is higher than those before."""
        number, self._next = self._next, self._next + 1
        self._pending[number] = Pending(callee, deadline)
        return number

    def end(self, number: int, callee: TrainerId) -> bool:
        """End a call by the callee's answer; return False if there is no such call of it.

        It may have been given up, or the callee lies.
        """
        pending = self._pending.get(number)
        if pending is None or pending.callee != callee:
            return False
        del self._pending[number]
        return True

    def give_up(self, number: int) -> TrainerId | None:
        """End a call without an answer; return who must be told, or None if it has ended."""
        pending = self._pending.pop(number, None)
        return None if pending is None else pending.callee

    def overdue(self, now: float) -> list[int]:
        """Return the calls whose time is over; `give_up` ends them."""
        return [number for number, each in self._pending.items() if each.deadline <= now]

    def lose(self, callees: Iterable[TrainerId]) -> list[int]:
        """End all calls of lost callees; return their numbers."""
        lost = set(callees)
        numbers = [number for number, each in self._pending.items() if each.callee in lost]
        for number in numbers:
            del self._pending[number]
        return numbers

    def lose_all(self) -> list[int]:
        """End all calls: this rank is cut off."""
        return self.lose({each.callee for each in self._pending.values()})
