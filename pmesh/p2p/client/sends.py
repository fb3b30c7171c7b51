"""The sends of a trainer: those under way, and those that wait, in a queue for each receiver."""

from collections import Counter, deque
from dataclasses import dataclass

from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Envelope
from pmesh.ids import TrainerId

MAX_SENDS = 224  # under way; each takes an arena and a descriptor, and a session has at most 256
# A pair of ranks keeps at most 256 messages that nobody has received, so these always fit.


@dataclass(slots=True, eq=False)
class Send:
    """One send. While it waits, its data are a copy."""

    call: int
    to: TrainerId
    envelope: Envelope
    data: Values
    deadline: float
    is_copy: bool = False


class Sends:
    """Bookkeeping without I/O; the caller holds a lock.

    A receiver may take half of the slots that other receivers leave free. So a receiver that does
    not receive does not block sends to others (Choudhury and Hahne, IEEE/ACM Transactions on
    Networking 6(2), 1998).
    """

    def __init__(self) -> None:
        self._under_way: dict[int, TrainerId] = {}
        self._counts: Counter[TrainerId] = Counter()
        self._queues: dict[TrainerId, deque[Send]] = {}

    @property
    def queued(self) -> bool:
        """True if sends wait."""
        return bool(self._queues)

    def begin(self, send: Send) -> bool:
        """Return True if the send may start now; otherwise queue it for its receiver."""
        if send.to in self._queues or not self._has_room(send.to):
            self._keep(send)
            return False
        self._count(send)
        return True

    def next(self) -> Send | None:
        """Return the next send that may start; it stays first in its queue until `started`."""
        for to, queue in self._queues.items():
            if self._has_room(to):
                self._count(queue[0])
                return queue[0]
        return None

    def started(self, send: Send) -> None:
        """Handle a send that was handed to the agent: the next one in its queue may follow."""
        queue = self._queues.get(send.to)
        if queue and queue[0] is send:
            queue.popleft()
            if not queue:
                del self._queues[send.to]

    def put_back(self, send: Send) -> bool:
        """Queue a send for which there is no memory; return False if no send will free any."""
        self.ended(send.call)
        if not self._under_way:
            self.started(send)
            return False
        queue = self._queues.get(send.to)
        if not queue or queue[0] is not send:
            self._keep(send)
        return True

    def ended(self, call: int) -> None:
        """Handle the end of a call; do nothing unless it was a send."""
        to = self._under_way.pop(call, None)
        if to is not None:
            self._counts[to] -= 1
            if not self._counts[to]:
                del self._counts[to]

    def _has_room(self, to: TrainerId) -> bool:
        others = len(self._under_way) - self._counts[to]
        left = MAX_SENDS - others
        return self._counts[to] < max(left // 2, min(left, 1))

    def _count(self, send: Send) -> None:
        self._under_way[send.call] = send.to
        self._counts[send.to] += 1

    def _keep(self, send: Send) -> None:
        if not send.is_copy:
            send.data, send.is_copy = send.data.copy(), True
        self._queues.setdefault(send.to, deque()).append(send)
