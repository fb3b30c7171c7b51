"""Calls that run behind one another in a thread of their own, and what tells of each."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Generic, TypeVar

from pmesh.errors import OpTimedOut, PmeshError, UsageError

T = TypeVar("T")


class Handle(Generic[T]):
    """A call that is under way, made with `async_op=True`.

    The calls of one mesh, or of one group, run in the order in which they were made; handles may be
    waited for in any order. Arguments must stay as they are until `done`.
    """

    def __init__(self, done: Callable[[], bool], take: Callable[[float | None], T]) -> None:
        """`take` waits for so many seconds, and gives what the user gets; to be called once."""
        self._done = done
        self._take = take
        self._lock = threading.Lock()
        self._result: list[T] = []

    def __repr__(self) -> str:
        return f"<Handle, {'done' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Whether the call has ended, well or badly."""
        return self._done()

    def wait(self, timeout_s: float | None = None) -> T:
        """The result, once it is there.

        Args:
            timeout_s: how long to wait; the call goes on after it. None: as long as the call takes.

        Raises:
            OpTimedOut: it is still under way.
            PmeshError: what the call raises.
        """
        seconds = -1 if timeout_s is None else max(timeout_s, 0)
        if not self._lock.acquire(timeout=seconds):  # another thread waits for it, too
            raise OpTimedOut(f"the call is still under way after {seconds:g} s")
        try:
            if not self._result:
                self._result.append(self._take(timeout_s))
            return self._result[0]
        except FutureTimeoutError as e:
            if isinstance(e, PmeshError):
                raise  # the call's own
            raise OpTimedOut(f"the call is still under way after {seconds:g} s") from e
        finally:
            self._lock.release()

    def result(self) -> T:
        """The result of a call that is done; raises what the call raises.

        Raises:
            UsageError: it is still under way; `wait` waits.
        """
        if not self.done():
            raise UsageError("this call is still under way: wait() for it")
        return self.wait()


class Line:
    """Runs what it is given in order, in one thread that begins with the first."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._under_way = 0
        self._ended = False

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return self._under_way == 0

    def submit(self, run: "Callable[[], T]") -> "Future[T]":
        """Run it after all that came before."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                result = run()
            except BaseException as e:  # noqa: BLE001 - for who waits, whatever it is
                self._end()
                future.set_exception(e)
            else:
                self._end()
                future.set_result(result)

        with self._lock:
            self._under_way += 1
            if not self._ended:
                self._waiting.put(work)
                if self._thread is None:
                    # It must not keep a program that has ended from ending.
                    self._thread = threading.Thread(target=self._work, name="pmesh", daemon=True)
                    self._thread.start()
                return future
        work()
        return future

    def end(self) -> None:
        """Let the thread end once it has run what it was given; what comes later runs at once."""
        with self._lock:
            self._ended = True
            self._waiting.put(None)

    def _end(self) -> None:
        with self._lock:
            self._under_way -= 1

    def _work(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()
