"""How long a rank of `torch.distributed` computes, though its ops run beside the backward pass."""

import threading


class ComputingTime:
    """The time of a rank without that in which it waits for ops.

    While ops are in flight, the rank computes until it calls the last of them, as DDP does in the
    backward pass; then it waits until none is left. Any thread may call.
    """

    def __init__(self, now: float) -> None:
        """All times are seconds of the same clock."""
        self._lock = threading.Lock()
        self._began = self._called = now
        self._waited = 0.0
        self._in_flight = 0

    def call(self, now: float) -> None:
        """Note that the rank calls an op."""
        with self._lock:
            self._called = now
            self._in_flight += 1

    def end(self, now: float) -> None:
        """Note that an op has ended."""
        with self._lock:
            self._in_flight -= 1
            if not self._in_flight:
                self._waited += now - self._called

    def until(self, now: float) -> float:
        """Return how long the rank has computed, in seconds."""
        with self._lock:
            return (self._called if self._in_flight else now) - self._began - self._waited
