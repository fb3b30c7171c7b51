"""How the calls of a mesh or a group run: at once, or in a thread after the calls before."""

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from pmesh.client.calls import threads
from pmesh.client.calls.traceback import make_public, public
from pmesh.client.collective.bucketed import LastOp
from pmesh.client.elastic.place import Place
from pmesh.client.session.session import TrainerSession
from pmesh.core.wire.trainer import World
from pmesh.errors import MeshClosed, OpTimedOut, PmeshError, UsageError
from pmesh.ids import Rank, TrainerId

R = TypeVar("R")
T = TypeVar("T")


class Handle(Generic[T]):
    """A call that is under way, made with `async_op=True`.

    The calls of one mesh, or of one group, run in the order in which they were made. Handles may be
    waited for in any order. Do not change the arguments of a call until it is `done`.
    """

    def __init__(self, done: Callable[[], bool], take: Callable[[float | None], T]) -> None:
        """`take` waits for the result, at most so many seconds, and returns it once."""
        self._done = done
        self._take = take
        self._lock = threading.Lock()
        self._result: list[T] = []
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<Handle, {'done' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Return True if the call has ended, with a result or an error."""
        return os.getpid() != self._process or self._done()

    @public
    def wait(self, timeout_s: float | None = None) -> T:
        """Wait for the call and return its result.

        Args:
            timeout_s: how long to wait; the call continues after that. None: until the call ends.

        Raises:
            OpTimedOut: the call is still under way.
            PmeshError: what the call raises.
        """
        if os.getpid() != self._process:
            raise _forked()
        if timeout_s is not None and timeout_s > threading.TIMEOUT_MAX:
            timeout_s = None  # longer than the system can wait, such as infinity
        seconds = -1 if timeout_s is None else max(timeout_s, 0)
        if not self._lock.acquire(timeout=seconds):  # another thread waits, too
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

    @public
    def result(self) -> T:
        """Return the result of a call that is done; raise what the call raises.

        Raises:
            UsageError: the call is still under way; `wait` waits.
        """
        if not self.done():
            raise UsageError("this call is still under way: wait() for it")
        return self.wait()


class _Result(Future[T]):
    """The result of a function, which knows if a callback was added."""

    def __init__(self) -> None:
        super().__init__()
        self.adding = threading.Lock()
        self.calls_back = False

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        with self.adding:
            self.calls_back = True
        super().add_done_callback(fn)


class Line:
    """Runs functions one after the other, in threads that start when they are needed.

    A callback may submit more functions and wait for them; another thread runs those.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], Any], _Result[Any]]] = deque()
        self._news = threading.Condition()
        self._free = 0
        """The number of threads that run neither a function nor a callback."""
        self._runs = False
        self._ended = False
        self._threads: set[threading.Thread] = set()
        self._process = os.getpid()
        threads.at_end(self, Line.end)

    @property
    def idle(self) -> bool:
        """True if no function runs or waits."""
        return not (self._waiting or self._runs)

    def next_up(self, most: int) -> list[Callable[[], Any]]:
        """Return the functions that run next, at most so many."""
        with self._news:
            return [run for run, _ in itertools.islice(self._waiting, most)]

    def submit(self, run: "Callable[[], T]") -> "Future[T]":
        """Run a function after all that were submitted before.

        Raises:
            MeshClosed: this process was forked from the line's, and has none of its threads.
            RuntimeError: the system can't start a thread.
        """
        if os.getpid() != self._process:
            raise _forked()
        result: _Result[T] = _Result()
        with self._news:
            if not self._ended:
                self._waiting.append((run, result))
                try:
                    self._ensure_thread()
                except RuntimeError:
                    self._waiting.pop()
                    raise
                return result
        _settling(run, result)()
        return result

    def end(self) -> None:
        """End the threads after what was submitted; functions submitted later run at once."""
        with self._news:
            self._ended = True
            self._news.notify_all()

    def join(self) -> None:
        """Wait until the threads have ended, at most for a minute; `end` comes first."""
        threads.join(list(self._threads))  # a `tuple` is not atomic

    def _ensure_thread(self) -> None:
        """Start a thread if functions wait and none is free; the caller holds the lock."""
        self._news.notify()
        if self._waiting and not (self._runs or self._free):
            self._threads.add(threads.start(self._work, "pmesh"))
            self._free += 1

    # --- in a thread

    def _work(self) -> None:
        while (work := self._next()) is not None:
            work()
            del work  # it refers to its group, perhaps as the last

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next function; return None if none will come any more."""
        with self._news:
            while self._runs or not self._waiting:
                if self._ended and not self._waiting:
                    self._news.notify()  # the next thread, which notifies another
                    return None
                self._news.wait()
            self._runs = True
            self._free -= 1
            return partial(self._run, *self._waiting.popleft())

    def _run(self, run: "Callable[[], T]", result: "_Result[T]") -> None:
        settle = _settling(run, result)
        with result.adding:
            quiet = not result.calls_back
            if quiet:
                with self._news:
                    self._runs, self._free = False, self._free + 1
                settle()
        if quiet:
            return
        with self._news:
            self._runs = False
            with contextlib.suppress(RuntimeError):  # no thread: this one continues a little later
                self._ensure_thread()
        settle()
        with self._news:
            self._free += 1


def _settling(run: "Callable[[], T]", result: "_Result[T]") -> Callable[[], None]:
    """Run a function; return what hands its result to the waiting thread and the callbacks."""
    try:
        return partial(result.set_result, run())
    except BaseException as e:  # noqa: BLE001 - the waiting thread raises it
        return partial(result.set_exception, e)


def _forked() -> MeshClosed:
    return MeshClosed("this process was forked from the trainer; call connect() in it")


@dataclass(slots=True)
class Turn:
    """The turn of several calls whose ops may be sent together."""

    is_kept: bool = False
    """True while some of these ops have not ended: then no other call may begin."""


@dataclass(slots=True, eq=False)
class PendingCall(Generic[R, T]):
    """One call, from when it is made until its result is taken."""

    number: int
    run: Callable[[Place], tuple[R, LastOp | None]]
    """Runs the ops, perhaps in a thread of the line."""
    finish: Callable[[R], T]
    """Makes the user's result in the thread that waits, as MLX's arrays belong to threads."""
    world: World | None = None
    """The ranks when `run` ended."""
    turn: Turn | None = None
    queued: Future[tuple[R, LastOp | None]] | None = None
    """None if the caller's thread runs it."""


class Caller:
    """A rank among others, and how its calls run. Subclasses add the calls."""

    def __init_subclass__(cls) -> None:
        make_public(cls)

    def __init__(self, place: Place) -> None:
        self._place = place
        self._line = Line()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._seen = -1
        self._world = place.world
        """The ranks after the latest call that has returned or was waited for (O5)."""
        self._last_op: LastOp | None = None
        self._process = os.getpid()
        threads.at_end(self, Caller._end_with_the_program)

    @property
    def rank(self) -> Rank:
        """The number of this trainer in its job or group, from 0; -1 before it has entered.

        Machines come and go, so `rank`, `size` and `names` of a job change, but only while a call
        runs: after the call they say which ranks took part. Rank 0 has been in the job for longest.
        """
        return Rank(self._world.rank)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._world.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each rank's machine."""
        return self._world.names

    @property
    def trainers(self) -> tuple[TrainerId, ...]:
        """The id of each rank's trainer, which stays the same while ranks change."""
        return self._world.trainers

    @property
    def last_op(self) -> LastOp | None:
        """Facts about the last collective that has returned or was waited for; None before."""
        return self._last_op

    def close(self) -> None:
        """Leave the group. A call in another thread raises MeshClosed there."""
        self._stop(crashed=None)

    def _trainer_at(self, rank: int) -> TrainerId:
        """O5: return the trainer that has this rank now; this trainer if it is alone."""
        self._place.check_synced()
        if self._place.is_alone:
            return self._place.world.trainers[0]
        if rank not in range(self.size):  # as None is not
            raise UsageError(f"there is no rank {rank}: there are ranks 0 to {self.size - 1}")
        return self._world.trainers[rank]

    def _call(
        self,
        ops: Callable[[TrainerSession], tuple[R, LastOp | None]],
        alone: Callable[[World], tuple[R, LastOp | None]],
        finish: Callable[[R], T],
        *,
        timeout_s: float,
        async_op: bool = False,
    ) -> T | Handle[T]:
        """Run `ops` in the job, or `alone` if this rank is alone for now."""
        run = partial(Place.run, ops=ops, alone=alone, timeout_s=timeout_s)
        return self._do(run, finish, async_op=async_op)

    def _do(
        self,
        run: Callable[[Place], tuple[R, LastOp | None]],
        finish: Callable[[R], T],
        *,
        async_op: bool = False,
        turn: Turn | None = None,
    ) -> T | Handle[T]:
        work = PendingCall(next(self._numbers), run, finish, turn=turn)
        if not async_op and (self._line.idle or (turn is not None and turn.is_kept)):
            return self._take(work, None)
        work.queued = self._line.submit(partial(self._execute, work))
        handle = Handle(work.queued.done, partial(self._take, work))
        return handle if async_op else handle.wait()

    def _take(self, work: PendingCall[R, T], timeout_s: float | None) -> T:
        last: LastOp | None = None
        try:
            if work.queued is None:
                value, last = self._execute(work)
            else:
                value, last = work.queued.result(timeout_s)
        finally:
            if work.world is not None and work.number > self._seen:
                # O5: the world changes when a call returns
                self._seen, self._world = work.number, work.world
                self._last_op = last or self._last_op
        return work.finish(value)

    def _execute(self, work: PendingCall[R, T]) -> tuple[R, LastOp | None]:
        if os.getpid() != self._process:
            raise _forked()
        turn = work.turn
        if turn is None or not turn.is_kept:
            self._lock.acquire()
        try:
            try:
                self._place.check_open()
                return work.run(self._place)
            finally:
                work.world = self._place.world
                self._place.end_if_interrupted()
        finally:
            if turn is not None:
                turn.is_kept = self._place.has_begun
            if turn is None or not turn.is_kept:
                self._lock.release()

    def _end_with_the_program(self) -> None:
        """End its calls. If it is still open, nobody has closed it: the others see a crash."""
        self._stop(crashed=MeshClosed("the program has ended"))

    def _stop(self, *, crashed: BaseException | None) -> None:
        if os.getpid() != self._process:
            return  # a forked child only has a copy: the rank is the parent's
        if self._lock.acquire(blocking=False):
            try:
                if crashed is None:
                    self._place.leave()
                else:
                    self._place.end(f"{type(crashed).__name__}: {crashed}")
            finally:
                self._lock.release()
        else:
            self._place.interrupt()
        self._line.end()


def check_timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """Return the time as a float; raise UsageError unless it is a number, and more than 0."""
    try:
        is_more = timeout_s > 0
    except TypeError:  # None, or a timedelta
        raise UsageError(f"{name} is a number of seconds, not {timeout_s!r}") from None
    if not is_more:
        raise UsageError(f"{name} is more than 0, not {timeout_s}")
    return float(timeout_s)
