"""`pmesh.connect` and what it returns: a rank among others, and the collectives it can call."""

import math
import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, cast

from pmesh.client.calls import Arrays, Collective, LastOp, run_collective, take_apart
from pmesh.client.connection import AgentConnection
from pmesh.client.home import home_directory, socket_path
from pmesh.client.session import TrainerSession
from pmesh.core.messages import Call
from pmesh.core.session import SESSION_VERSION, Connect, Joined
from pmesh.core.views import View
from pmesh.errors import MeshClosed, UsageError
from pmesh.ids import JobName, Rank

DEFAULT_BUCKET_BYTES = 32 * 1024 * 1024  # large enough that latency is nothing, small to hold
DEFAULT_TIMEOUT_S = 1800.0  # I6: a slow peer that is alive gets this long

T = TypeVar("T")


def connect(
    job: str,
    wait_for: int = 1,
    timeout_s: float = 30.0,
    home: Path | str | None = None,
) -> "Mesh":
    """Join a job through the agent on this machine; returns when all its ranks are there.

    Args:
        job: a name of your choice; whoever gives the same one trains together.
        wait_for: how many trainers to wait for.
        timeout_s: how long.
        home: the agent's home, if it is neither PMESH_HOME nor `~/.pmesh`.

    Raises:
        AgentNotRunning: start one with `pmesh up`.
        NotEnoughRanks: fewer than `wait_for` trainers came in time.
        JobRunning: the job has its ranks already.
    """
    if not 1 <= len(job) <= 64:  # noqa: PLR2004 - what core.session allows
        raise UsageError(f"a job's name has 1 to 64 characters: {job!r}")
    if not 1 <= wait_for <= 1024:  # noqa: PLR2004 - likewise
        raise UsageError(f"wait_for is at least 1 and at most 1024, not {wait_for}")
    request = Connect(
        SESSION_VERSION, JobName(job), wait_for, _checked_timeout(timeout_s), _program()
    )
    session = TrainerSession(AgentConnection(socket_path(home_directory(home))))
    try:
        return Mesh(session, session.join(request), job=job)
    except BaseException:
        session.end("the job did not begin")
        raise


def _program() -> str:
    """What runs, for `pmesh status`: the script's name, cut to what the message allows."""
    path = Path(sys.argv[0] if sys.argv and sys.argv[0] else sys.executable)
    return os.fsencode(path.name).decode(errors="replace")[:256]


class Mesh:
    """This trainer among the ranks of its job. Get one from `pmesh.connect`.

    Collective calls block until the result is there, and take an array of numpy, MLX or torch, or a
    (nested) dict, list or tuple of them. They return the same types, shapes and dtypes, bit for bit
    alike on every rank, and leave their arguments as they were. Every rank must make the same calls
    in the same order, whatever the library its arrays are of.

    Dtypes: float64, float32, float16, bfloat16 (both added as float32), int64, int32 and bool.

    Any thread may call; one call runs at a time. Close it, or use it in a `with` statement: leaving
    that by an exception counts as a crash of this rank, so that the others learn of it.
    """

    def __init__(self, session: TrainerSession, joined: Joined, *, job: str) -> None:
        self._session = session
        self._joined = joined
        self._job = job
        self._last_op: LastOp | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<Mesh {self._job!r}, rank {self.rank} of {self.size}>"

    @property
    def rank(self) -> Rank:
        """The number of this trainer among all of its job, from 0."""
        return self._joined.rank

    @property
    def size(self) -> int:
        """How many ranks the job has."""
        return self._joined.size

    @property
    def names(self) -> tuple[str, ...]:
        """For each rank the name of its machine."""
        return self._joined.names

    @property
    def view(self) -> View:
        """What the agents had agreed on when the job began: machines, ring order, ranks."""
        return self._joined.view

    @property
    def last_op(self) -> LastOp | None:
        """What the last collective call came to; None before the first."""
        return self._last_op

    def all_reduce(self, x: T, op: str = "sum", timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
        """Combine every rank's values; all get the result.

        Args:
            x: of the same shapes and dtypes on every rank.
            op: sum, mean (floats only), max, min or prod; for bool max (any), min or prod (all).
            timeout_s: for each op; a tree takes one for each 32 MiB of a dtype.

        Raises:
            UnsupportedArray: x, its dtype or op has no meaning here.
            OpMismatch: another rank called something else.
            RankLost: another rank is gone.
            OpTimedOut: some rank did not call in time.
        """
        wanted = Collective(
            kind="all_reduce",
            reduction=op,
            bucket_bytes=DEFAULT_BUCKET_BYTES,
            timeout_s=_checked_timeout(timeout_s),
        )
        return cast("T", self._run(wanted, take_apart(x, reduction=op)))

    def broadcast(self, x: T, root: int = 0, timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
        """Give every rank the values of one.

        Args:
            x: of the same shapes and dtypes on every rank; only the root's values matter.
            root: whose.
            timeout_s: for each op; a tree takes one for each 32 MiB of a dtype.

        Raises:
            PmeshError: as for `all_reduce`.
        """
        if not 0 <= root < self.size:
            raise UsageError(f"there is no rank {root}: this job has ranks 0 to {self.size - 1}")
        wanted = Collective(
            kind="broadcast",
            root=root,
            bucket_bytes=DEFAULT_BUCKET_BYTES,
            timeout_s=_checked_timeout(timeout_s),
        )
        return cast("T", self._run(wanted, take_apart(x)))

    def barrier(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until every rank has called this; raises as `all_reduce` does."""
        call = Call("barrier", "float32", (0,))
        with self._calling() as session:
            timeout_s = _checked_timeout(timeout_s)
            done, _ = session.run_op(call, "float32", 0, timeout_s=timeout_s)
            self._last_op = LastOp(done.op, done.contributors, 0)

    def average_gradients(
        self,
        grads: T,
        weight: float = 1.0,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> T:
        """The mean of every rank's gradients, each rank counting by its weight.

        With the number of samples as weight the result is the gradient of the mean loss over the
        union of all batches.

        Args:
            grads: a tree of floating-point arrays.
            weight: at least 0; with 0 this rank's gradients are not looked at.
            bucket_bytes: how much is averaged as one op; an array is never divided.
            timeout_s: for each op.

        Raises:
            UsageError: the weights of all ranks add up to 0.
            PmeshError: as for `all_reduce`.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise UsageError(f"a weight is a number of samples, at least 0, not {weight}")
        if bucket_bytes < 1:
            raise UsageError(f"bucket_bytes is at least 1, not {bucket_bytes}")
        wanted = Collective(
            kind="all_reduce",
            reduction="sum",
            weight=float(weight),
            bucket_bytes=bucket_bytes,
            timeout_s=_checked_timeout(timeout_s),
        )
        return cast("T", self._run(wanted, take_apart(grads, reduction="mean")))

    def close(self) -> None:
        """Leave the job. A call in which another thread waits raises MeshClosed there."""
        self._stop(crashed=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop(crashed=error)

    def _stop(self, *, crashed: BaseException | None) -> None:
        if os.getpid() != self._process:
            return  # a forked child's copy: the rank is the parent's
        if self._lock.acquire(blocking=False):
            try:
                if crashed is None:
                    self._session.leave()
                else:
                    self._session.end(f"{type(crashed).__name__}: {crashed}")
            finally:
                self._lock.release()
        else:
            self._session.interrupt("it was closed")

    def _run(self, wanted: Collective, arrays: Arrays) -> object:
        with self._calling() as session:
            result, last = run_collective(session, wanted, arrays)
            self._last_op = last or self._last_op
        return result

    @contextmanager
    def _calling(self) -> Generator[TrainerSession]:
        if os.getpid() != self._process:
            raise MeshClosed("this process was forked from the trainer; call connect() in it")
        with self._lock:
            self._session.check_open()
            try:
                yield self._session
            finally:
                self._session.end_if_interrupted()


def _checked_timeout(timeout_s: float) -> float:
    if not timeout_s > 0:
        raise UsageError(f"timeout_s is more than 0, not {timeout_s}")
    return float(timeout_s)
