"""What an op of `torch.distributed` returns: to be waited for, with its error."""

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
    """An op that another thread runs, or that has run.

    Not one that torch makes of a future: `wait` of that returns True though the future has failed.
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
            self._pass_on(self._done)  # who has waited finds the future done, too
        return True

    def synchronize(self) -> None:
        """The same as `wait`: results are there when an op has ended, also on a GPU."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._done.done()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        """The error of an op that has failed."""
        return self._done.exception() if self.is_completed() else None

    def result(self) -> list[Tensor]:
        """The tensors that were written to; waits for them."""
        self.wait()
        return self.tensors

    def source_rank(self) -> int:
        """The rank in its group that a message has come from."""
        self.wait()
        return int(self._done.result())

    _source_rank = source_rank

    def get_future(self) -> TorchFuture:
        """A future that gets the tensors, or the op's error."""
        with self._lock:
            if self._future is not None:
                return self._future
            devices = {t.device for t in self.tensors if t.device.type == "cuda"}
            self._settled = torch.futures.Future(devices=list(devices))
            # Not set_exception: that fails for who asks in Python, but C++, as in DDP, then takes
            # the exception for the result. What a callback raises is an error there, too.
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
    """A message under way; the thread that waits takes what has come."""

    def __init__(
        self,
        handle: Handle[Any],
        take: Callable[[float | None], Any],
        tensors: Sequence[Tensor],
    ) -> None:
        """`take` waits for at most that many seconds, and writes what has come to its tensor."""
        super().__init__(Future(), tensors)
        self._handle = handle
        self._take = take
        self._settling = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message has arrived; raise the error if it has not."""
        self._settle(_seconds(timeout))
        return super().wait()

    def is_completed(self) -> bool:
        """Whether it has arrived, and lies in its tensor, or has failed."""
        if not self._done.done() and self._handle.done():
            self._settle(None)
        return self._done.done()

    def get_future(self) -> TorchFuture:
        """A future that gets the tensors, or the error; a thread of its own waits for it."""
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
                raise  # it goes on after the time that this thread would wait
            self._done.set_exception(e)
        else:
            self._done.set_result(result)
        finally:
            self._settling.release()


def _seconds(timeout: timedelta | None) -> float | None:
    """None for no limit, as torch in C++ says by 0."""
    seconds = timeout.total_seconds() if timeout is not None else 0.0
    return seconds if seconds > 0 else None
