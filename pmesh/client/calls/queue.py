"""How the calls of a mesh or a group run: at once, or in a thread, behind those under way."""

import itertools
import os
import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from typing import Generic, TypeVar

from pmesh.client.collective.bucketed import LastOp
from pmesh.client.collective.rank_order import Order
from pmesh.client.elastic.membership import Place
from pmesh.client.link.session import TrainerSession
from pmesh.core.wire.local import World
from pmesh.errors import MeshClosed, OpTimedOut, PmeshError, UsageError
from pmesh.ids import Rank, TrainerId

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


Ops = Callable[[TrainerSession, Order], tuple[T, LastOp | None]]
"""What a call does in the job; returns what it has come to. May run in another thread."""

Run = Callable[[Place], tuple[Callable[[], T], LastOp | None]]
"""Both, as the place has it. The last step is for the thread that waits for the result: MLX's
arrays belong to threads."""

Alone = Callable[[World], tuple[T, LastOp | None]]
"""What it does for a rank that is alone for the time being."""


class Caller:
    """A rank among others, and how it calls. What it can call is in the classes that follow."""

    def __init__(self, place: Place, order: Order | None = None) -> None:
        self._place = place
        self._order = order or Order()
        self._line = Line()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._seen = -1
        self._world = self._order.seen(place.world)
        """As of the last call that has returned, or was waited for (O5)."""
        self._last_op: LastOp | None = None
        self._process = os.getpid()

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
    def last_op(self) -> LastOp | None:
        """What the last collective call came to, that returned or was waited for; None before."""
        return self._last_op

    def close(self) -> None:
        """Leave the job. A call in which another thread waits raises MeshClosed there."""
        self._stop(crashed=None)

    def _trainer_at(self, rank: int) -> TrainerId:
        """O5: who that rank is, whatever its rank becomes; of a rank that is alone itself."""
        self._place.check_synced()
        if self._place.is_alone:
            return self._place.world.trainers[0]
        if not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank}: there are ranks 0 to {self.size - 1}")
        return self._world.trainers[rank]

    def _call(
        self, ops: Ops[Callable[[], T]], alone: Alone[Callable[[], T]], *, async_op: bool
    ) -> T | Handle[T]:
        """Run a call, or line it up."""

        # In quotes: Python makes the types of an inner function anew each time, in 5 µs.
        def run(place: Place) -> "tuple[Callable[[], T], LastOp | None]":
            return place.run(lambda session: ops(session, self._order), alone)

        return self._do(run, async_op=async_op)

    def _do(self, run: Run[T], *, async_op: bool = False) -> T | Handle[T]:
        number = next(self._numbers)
        worlds: list[World] = []

        def work() -> "tuple[Callable[[], T], LastOp | None]":
            with self._calling() as place:
                try:
                    return run(place)
                finally:
                    worlds.append(self._order.seen(place.world))

        def take(ended: "Callable[[], tuple[Callable[[], T], LastOp | None]]") -> T:
            last: LastOp | None = None
            try:
                finish, last = ended()
            finally:
                if worlds and number > self._seen:  # O5: the world changes when a call returns
                    self._seen, self._world = number, worlds[0]
                    self._last_op = last or self._last_op
            return finish()

        if not async_op and self._line.idle:
            return take(work)
        future = self._line.submit(work)
        handle = Handle(future.done, lambda timeout_s: take(lambda: future.result(timeout_s)))
        return handle if async_op else handle.wait()

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

    @contextmanager
    def _calling(self) -> Generator[Place]:
        if os.getpid() != self._process:
            raise MeshClosed("this process was forked from the trainer; call connect() in it")
        with self._lock:
            self._place.check_open()
            try:
                yield self._place
            finally:
                self._place.end_if_interrupted()


def check_timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """The time as a float; raises UsageError if it is none."""
    if not timeout_s > 0:
        raise UsageError(f"{name} is more than 0, not {timeout_s}")
    return float(timeout_s)
