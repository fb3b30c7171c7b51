"""What a rank computes while its ops run, as DDP does in the backward pass."""

import threading


class Overlap:
    """How long a rank has computed beside its ops, where its session takes it to wait.

    While ops are in flight, the rank computes until it calls the last of them; then it waits until
    none is left. Any thread may call.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """In all; it grows when no op is left in flight."""
        self._lock = threading.Lock()
        self._in_flight = 0
        self._first = self._last = (0.0, 0.0)

    def begin(self, now: float, own_s: float) -> None:
        """Note that the rank calls an op.

        Args:
            now: seconds of any clock.
            own_s: how long the rank has computed by then, as its session knows.
        """
        with self._lock:
            self._last = now, own_s
            if not self._in_flight:
                self._first = self._last
            self._in_flight += 1

    def end(self) -> None:
        """Note that an op has ended."""
        with self._lock:
            self._in_flight -= 1
            if not self._in_flight:
                (began, own_before), (called, own_then) = self._first, self._last
                self.seconds += (called - began) - (own_then - own_before)
