"""The work objects that ops of `torch.distributed` return."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from pmesh.client.calls import threads
from pmesh.client.calls.queue import Handle
from pmesh.torch.library import Tensor, TorchFuture, dist, torch


class Work(dist.Work):  # type: ignore[misc] # torch has no types here
    """An op that another thread runs, or that has ended.

    torch could make a work from a future, but its `wait` returns True even if the future failed.
    """

    def __init__(self, done: "Future[Any]", tensors: Sequence[Tensor]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._done = done
        self.tensors = list(tensors)
        self._lock = threading.RLock()
        self._future: TorchFuture = None
        self._settled: TorchFuture = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the op has ended; raise its error if it has failed."""
        try:
            self._done.result(_seconds(timeout))
        finally:
            self._pass_on(self._done)  # after `wait`, the future is done too
        return True

    def synchronize(self) -> None:
        """Wait until the op has ended; then its results are in place, also on a GPU."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True if the op has ended, with or without an error."""
        return self._done.done()

    def is_success(self) -> bool:
        """Return True if the op has ended without an error."""
        return self.is_completed() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of an op that has failed, or else None."""
        return self._done.exception() if self.is_completed() else None

    def result(self) -> list[Tensor]:
        """Wait for the op, and return the tensors that it wrote."""
        self.wait()
        return self.tensors

    def source_rank(self) -> int:
        """Wait for a message, and return the rank of its sender in the group."""
        self.wait()
        return int(self._done.result())

    _source_rank = source_rank

    def get_future(self) -> TorchFuture:
        """Return a future of the tensors, or of the op's error."""
        with self._lock:
            if self._future is not None:
                return self._future
            devices = {t.device for t in self.tensors if t.device.type == "cuda"}
            self._settled = torch.futures.Future(devices=list(devices))
            # After set_exception, C++ (such as DDP) would take the exception for the result. An
            # error that a callback raises is an error in Python and in C++.
            self._future = self._settled.then(self._result_or_error)
        self._done.add_done_callback(self._pass_on)
        return self._future

    def _result_or_error(self, settled: TorchFuture) -> list[Tensor]:
        del settled
        self._done.result()
        return self.tensors

    def _pass_on(self, done: "Future[Any]") -> None:
        with self._lock:
            if self._settled is not None and done.done() and not self._settled.done():
                self._settled.set_result(None)


class MessageWork(Work):
    """A message on its way. The thread that waits for it writes it to the tensor."""

    def __init__(
        self,
        handle: Handle[Any],
        take: Callable[[float | None], Any],
        tensors: Sequence[Tensor],
    ) -> None:
        """`take` waits for at most so many seconds, and writes the message to its tensor."""
        super().__init__(Future(), tensors)
        self._handle = handle
        self._take = take
        self._settling = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message has arrived; raise its error if it has failed."""
        self._settle(_seconds(timeout))
        return super().wait()

    def is_completed(self) -> bool:
        """Return True if the message has failed, or has arrived and is in its tensor."""
        if not self._done.done() and self._handle.done():
            self._settle(None)
        return self._done.done()

    def get_future(self) -> TorchFuture:
        """Return a future of the tensors, or of the error; a new thread waits for the message."""
        if not self.is_completed():
            threads.start(self._settle, "pmesh-message")
        return super().get_future()

    def _settle(self, seconds: float | None = None) -> None:
        until = None if seconds is None else time.monotonic() + seconds
        if not self._settling.acquire(timeout=-1 if seconds is None else seconds):
            raise dist.DistBackendError(
                f"Timed out : the message is still under way after {seconds:g} s"
            )
        try:
            if self._done.done():
                return
            result = self._take(None if until is None else max(0.0, until - time.monotonic()))
        except Exception as e:
            if until is not None and not self._handle.done():
                raise  # only the wait has timed out; the message goes on
            self._done.set_exception(e)
        else:
            self._done.set_result(result)
        finally:
            self._settling.release()


def _seconds(timeout: timedelta | None) -> float | None:
    """Return the timeout, or None for no limit, which C++ passes as 0."""
    seconds = timeout.total_seconds() if timeout is not None else 0.0
    return seconds if seconds > 0 else None
