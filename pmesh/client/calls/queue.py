"""How the calls of a mesh or a group run: at once, or in a thread, behind those under way."""

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
from typing import Generic, TypeVar

from pmesh.client.calls import threads
from pmesh.client.calls.traceback import make_public, public
from pmesh.client.collective.bucketed import LastOp
from pmesh.client.elastic.membership import Place
from pmesh.client.link.session import TrainerSession
from pmesh.core.wire.local import World
from pmesh.errors import MeshClosed, OpTimedOut, PmeshError, UsageError
from pmesh.ids import Rank, TrainerId

R = TypeVar("R")
T = TypeVar("T")


class Handle(Generic[T]):
    """A call that is under way, made with `async_op=True`.

    The calls of one mesh, or of one group, run in the order in which they were made; handles may be
    waited for in any order. Arguments must stay as they are until `done`.
    """

    def __init__(self, done: Callable[[], bool], take: Callable[[float | None], T]) -> None:
        """`take` waits for at most that many seconds and returns the result; it is called once."""
        self._done = done
        self._take = take
        self._lock = threading.Lock()
        self._result: list[T] = []
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<Handle, {'done' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Whether the call has ended, well or badly."""
        return os.getpid() != self._process or self._done()

    @public
    def wait(self, timeout_s: float | None = None) -> T:
        """The result, once it is there.

        Args:
            timeout_s: how long to wait; the call goes on after it. None: as long as the call takes.

        Raises:
            OpTimedOut: it is still under way.
            PmeshError: what the call raises.
        """
        _check_not_forked(self._process)
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

    @public
    def result(self) -> T:
        """The result of a call that is done; raises what the call raises.

        Raises:
            UsageError: it is still under way; `wait` waits.
        """
        if not self.done():
            raise UsageError("this call is still under way: wait() for it")
        return self.wait()


class _Result(Future[T]):
    """What a function returns; knows whether anybody is to be called back."""

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

    Who is called back when a function has ended may submit others and wait for them: meanwhile
    another thread runs what waits.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._news = threading.Condition()
        self._free = 0
        """How many threads run nothing, and call nobody back."""
        self._runs = False
        self._ended = False
        self._threads: set[threading.Thread] = set()
        self._process = os.getpid()
        threads.at_end(self.end)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self._waiting or self._runs)

    def submit(self, run: "Callable[[], T]") -> "Future[T]":
        """Run it after all that were submitted before.

        Raises:
            MeshClosed: this process was forked from that of the line, and has none of its threads.
            RuntimeError: the system gives no thread.
        """
        _check_not_forked(self._process)
        result: _Result[T] = _Result()
        with self._news:
            if not self._ended:
                self._waiting.append(partial(self._run, run, result))
                try:
                    self._see_to_it()
                except RuntimeError:
                    self._waiting.pop()
                    raise
                return result
        _settling(run, result)()
        return result

    def end(self) -> None:
        """Let the threads end after what was submitted; what is submitted later runs at once."""
        with self._news:
            self._ended = True
            self._news.notify_all()

    def join(self) -> None:
        """After `end`: wait until its threads have ended; what lasts is left after a minute."""
        threads.join(tuple(self._threads))

    def _see_to_it(self) -> None:
        """Under the lock: have a thread for what waits."""
        self._news.notify()
        if self._waiting and not (self._runs or self._free):
            self._threads.add(threads.start(self._work, "pmesh"))
            self._free += 1

    # --- in a thread

    def _work(self) -> None:
        while (work := self._next()) is not None:
            work()
            del work  # it holds its group, which perhaps nobody else does

    def _next(self) -> Callable[[], None] | None:
        """None: nothing will come any more."""
        with self._news:
            while self._runs or not self._waiting:
                if self._ended and not self._waiting:
                    self._news.notify()  # and so on, to the last
                    return None
                self._news.wait()
            self._runs = True
            self._free -= 1
            return self._waiting.popleft()

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
            with contextlib.suppress(RuntimeError):  # no thread: this one goes on, a little later
                self._see_to_it()
        settle()
        with self._news:
            self._free += 1


def _settling(run: "Callable[[], T]", result: "_Result[T]") -> Callable[[], None]:
    """Run it; what this returns gives the result to who waits, and calls others back."""
    try:
        return partial(result.set_result, run())
    except BaseException as e:  # noqa: BLE001 - the waiting thread raises it
        return partial(result.set_exception, e)


def _check_not_forked(process: int) -> None:
    if os.getpid() != process:
        raise MeshClosed("this process was forked from the trainer; call connect() in it")


@dataclass(slots=True, eq=False)
class Work(Generic[R, T]):
    """One call, from when it is made until its result is taken."""

    number: int
    run: Callable[[Place], tuple[R, LastOp | None]]
    """Its ops; may run in the queue's thread."""
    finish: Callable[[R], T]
    """Makes what the user gets, in the thread that waits: MLX's arrays belong to threads."""
    world: World | None = None
    """The ranks when `run` ended."""
    queued: Future[tuple[R, LastOp | None]] | None = None
    """None: the caller's thread runs it."""


class Caller:
    """A rank among others, and how its calls run; subclasses have the calls."""

    def __init_subclass__(cls) -> None:
        make_public(cls)

    def __init__(self, place: Place) -> None:
        self._place = place
        self._line = Line()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._seen = -1
        self._world = place.world
        """The ranks after the last call that returned or was waited for (O5)."""
        self._last_op: LastOp | None = None
        self._process = os.getpid()
        threads.at_end(self._end_with_the_program)

    @property
    def rank(self) -> Rank:
        """The number of this trainer among all of its job or group, from 0.

        Machines come and go, so this, `size` and `names` of a job change, but only while a call
        runs: after it they say who took part in it. Rank 0 is the one that has been in the job for
        longest. -1 before this one has entered.
        """
        return Rank(self._world.rank)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self._world.names)

    @property
    def names(self) -> tuple[str, ...]:
        """For each rank the name of its machine."""
        return self._world.names

    @property
    def trainers(self) -> tuple[TrainerId, ...]:
        """For each rank the id of its trainer, which stays the same while ranks change."""
        return self._world.trainers

    @property
    def last_op(self) -> LastOp | None:
        """Facts about the last collective call that returned or was waited for; None before."""
        return self._last_op

    def close(self) -> None:
        """Leave the group. A call in which another thread waits raises MeshClosed there."""
        self._stop(crashed=None)

    def _trainer_at(self, rank: int) -> TrainerId:
        """O5: the trainer with that rank, whatever its rank becomes; this one if it is alone."""
        self._place.check_synced()
        if self._place.is_alone:
            return self._place.world.trainers[0]
        if not 0 <= rank < self.size:
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
        """Run ops in the job, or what a rank does that is alone for the time being."""
        run = partial(Place.run, ops=ops, alone=alone, timeout_s=timeout_s)
        return self._do(run, finish, async_op=async_op)

    def _do(
        self,
        run: Callable[[Place], tuple[R, LastOp | None]],
        finish: Callable[[R], T],
        *,
        async_op: bool = False,
    ) -> T | Handle[T]:
        work = Work(next(self._numbers), run, finish)
        if not async_op and self._line.idle:
            return self._take(work, None)
        work.queued = self._line.submit(partial(self._execute, work))
        handle = Handle(work.queued.done, partial(self._take, work))
        return handle if async_op else handle.wait()

    def _take(self, work: Work[R, T], timeout_s: float | None) -> T:
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

    def _execute(self, work: Work[R, T]) -> tuple[R, LastOp | None]:
        _check_not_forked(self._process)
        with self._lock:
            self._place.check_open()
            try:
                return work.run(self._place)
            finally:
                work.world = self._place.world
                self._place.end_if_interrupted()

    def _end_with_the_program(self) -> None:
        """Make its calls end; nobody has closed it, if it is open, so that is a crash."""
        self._stop(crashed=MeshClosed("the program has ended"))

    def _stop(self, *, crashed: BaseException | None) -> None:
        if os.getpid() != self._process:
            return  # a forked child's copy: the rank is the parent's
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
    """The time as a float; raises UsageError if it is none."""
    if not timeout_s > 0:
        raise UsageError(f"{name} is more than 0, not {timeout_s}")
    return float(timeout_s)
