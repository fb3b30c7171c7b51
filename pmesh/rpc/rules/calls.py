"""The calls that one rank has made, those that it serves, and what it keeps for other ranks."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

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


class CallKey(NamedTuple):
    """Which call it is, of another rank or of this one itself."""

    caller: TrainerId
    number: int


class RequestOutcome(Enum):
    """What becomes of a new request."""

    TAKEN = "taken"
    FULL = "full"
    REPEATED = "repeated"
    """It was sent before, and each call runs at most once: nothing is answered."""


@dataclass(slots=True)
class _Served:
    nbytes: int
    missing: int
    """The number of arrays that have not arrived."""
    cancelled: bool = False
    running: bool = False


@dataclass(slots=True)
class _Caller:
    last: int = -1
    """The number of its latest request."""
    references: set[int] = field(default_factory=set[int])


class Service:
    """Bookkeeping without I/O; the caller holds a lock.

    A call first waits for its large arrays, then for one of `threads` threads, then it runs. At
    most `waiting` calls wait, whose arguments take at most `room_bytes`, unless there is but one.
    """

    def __init__(self, *, threads: int, waiting: int, room_bytes: int) -> None:
        self.threads = threads
        self.waiting = waiting
        self._room_bytes = room_bytes
        self._served: dict[CallKey, _Served] = {}
        self._queue: deque[CallKey] = deque()
        self._callers: dict[TrainerId, _Caller] = {}
        self._running = 0
        self._bytes = 0
        self._references = 0

    @property
    def running(self) -> int:
        """The number of calls that run."""
        return self._running

    @property
    def held(self) -> int:
        """The number of objects that other ranks hold."""
        return sum(len(caller.references) for caller in self._callers.values())

    def __len__(self) -> int:
        """Return the number of calls that wait or run."""
        return len(self._served)

    @property
    def callers(self) -> tuple[TrainerId, ...]:
        """The ranks that have called, and are not lost."""
        return tuple(self._callers)

    def request(self, call: CallKey, *, nbytes: int, arrays: int) -> RequestOutcome:
        """Take a new call, or not.

        Args:
            call: its caller and number.
            nbytes: the size of its arguments.
            arrays: how many of its arrays arrive later, each reported by `arrived`.
        """
        caller = self._callers.setdefault(call.caller, _Caller())
        if call.number <= caller.last:
            return RequestOutcome.REPEATED
        caller.last = call.number
        is_full = len(self._served) >= self.threads + self.waiting
        if is_full or (self._served and self._bytes + nbytes > self._room_bytes):
            return RequestOutcome.FULL
        self._served[call] = _Served(nbytes, arrays)
        self._bytes += nbytes
        if not arrays:
            self._queue.append(call)
        return RequestOutcome.TAKEN

    def arrived(self, call: CallKey) -> bool:
        """Note one array of a call; return False if the call needs it no more."""
        served = self._served.get(call)
        if served is None or served.cancelled or not served.missing:
            return False
        served.missing -= 1
        if not served.missing:
            self._queue.append(call)
        return True

    def start(self) -> CallKey | None:
        """Return the next call to run, if a thread is free for it; `finish` must follow."""
        if not self._queue or self._running >= self.threads:
            return None
        call = self._queue.popleft()
        self._served[call].running = True
        self._running += 1
        return call

    def finish(self, call: CallKey) -> bool:
        """End a call that ran; return True if its caller waits for the answer."""
        served = self._served[call]
        self._running -= 1
        self._drop(call)
        return not served.cancelled

    def cancel(self, call: CallKey) -> bool:
        """Cancel a call that its caller has given up; return True if it will never run."""
        served = self._served.get(call)
        if served is None:
            return False
        served.cancelled = True
        if served.running:
            return False
        if not served.missing:
            self._queue.remove(call)
        self._drop(call)
        return True

    def is_cancelled(self, call: CallKey) -> bool:
        """Return True if nobody waits for the call any more."""
        served = self._served.get(call)
        return served is None or served.cancelled

    def keep(self, call: CallKey) -> int | None:
        """Count a reference of the caller to the result of a running call; return its number.

        None if the caller has given up, or is lost: then the result is dropped.
        """
        if self.is_cancelled(call):
            return None
        number, self._references = self._references, self._references + 1
        self._callers[call.caller].references.add(number)
        return number

    def holds(self, caller: TrainerId, reference: int) -> bool:
        """Return True if the caller holds this reference."""
        found = self._callers.get(caller)
        return found is not None and reference in found.references

    def release(self, caller: TrainerId, reference: int) -> bool:
        """Free a reference; return True if the caller held it."""
        if not self.holds(caller, reference):
            return False
        self._callers[caller].references.remove(reference)
        return True

    def lose(self, caller: TrainerId) -> tuple[list[CallKey], set[int]]:
        """Cancel all calls of a lost caller; return those that never run, and its references."""
        found = self._callers.pop(caller, _Caller())
        own = [call for call in self._served if call.caller == caller]
        return [call for call in own if self.cancel(call)], found.references

    def _drop(self, call: CallKey) -> None:
        self._bytes -= self._served.pop(call).nbytes
