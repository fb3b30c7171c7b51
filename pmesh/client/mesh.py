"""What `pmesh.connect` returns: a rank among others, and the collectives that it can call."""

import math
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar, cast

from pmesh.client.calls import (
    ALONE,
    Arrays,
    Collective,
    LastOp,
    run_alone,
    run_collective,
    take_apart,
)
from pmesh.client.place import Place
from pmesh.client.session import TrainerSession
from pmesh.client.shards import Indices, check_shard, deal, order_of
from pmesh.client.states import pack, unpack_untrusted
from pmesh.core.messages import Call
from pmesh.core.views import View
from pmesh.errors import MeshClosed, ProtocolError, RunError, UsageError
from pmesh.ids import Rank

DEFAULT_BUCKET_BYTES = 32 * 1024 * 1024  # large enough that latency is nothing, small to hold
DEFAULT_TIMEOUT_S = 1800.0  # I6: a slow peer that is alive gets this long

T = TypeVar("T")


class Mesh:
    """This trainer among the ranks of its job. Get one from `pmesh.connect`.

    Collective calls block until the result is there, and take an array of numpy, MLX or torch, or a
    (nested) dict, list or tuple of them. They return the same types, shapes and dtypes, bit for bit
    alike on every rank, and leave their arguments as they were. Every rank must make the same calls
    in the same order, whatever the library its arrays are of.

    Machines come and go: an op in flight goes on among the ranks that are left, and `rank`, `size`
    and `last_op` say afterwards who took part. Call `sync` at the top of the training loop, and who
    comes, or comes back, takes part too.

    Dtypes: float64, float32, float16, bfloat16 (both added as float32), int64, int32 and bool.

    Any thread may call; one call runs at a time. Close it, or use it in a `with` statement: leaving
    that by an exception counts as a crash of this rank, so that the others learn of it.
    """

    def __init__(self, place: Place, *, job: str) -> None:
        self._place = place
        self._job = job
        self._last_op: LastOp | None = None
        self._order: tuple[tuple[int, int, int], Indices] | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<Mesh {self._job!r}, rank {self.rank} of {self.size}>"

    @property
    def rank(self) -> Rank:
        """The number of this trainer among all of its job, from 0; -1 before it has entered.

        Machines come and go, so this, `size` and `names` change, but only while a call runs: after
        it they say who took part in it. Rank 0 is the one that has been in the job for longest.
        """
        return Rank(self._place.world.rank)

    @property
    def size(self) -> int:
        """How many ranks the job has."""
        return len(self._place.world.names)

    @property
    def names(self) -> tuple[str, ...]:
        """For each rank the name of its machine."""
        return self._place.world.names

    @property
    def step(self) -> int:
        """How many times the job has synced: 0 before the first `sync`, 1 after it, and so on.

        `while mesh.step < N: state = mesh.sync(state); ...` runs its body N times if nothing
        happens, and a newcomer goes on with the job's number: it runs the body for what is left.
        """
        return self._place.step

    @property
    def view(self) -> View:
        """What the agents had agreed on when this trainer joined: machines, ring order, ranks."""
        return self._place.view

    @property
    def last_op(self) -> LastOp | None:
        """What the last collective call came to; None before the first."""
        return self._last_op

    def sync(self, state: T, timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
        """Let all ranks have the same state; the place where trainers enter a running job.

        Call it at the top of each step, with everything that the next steps depend on: weights, the
        optimizer's state, random generators, the position in the data. If all ranks have the same,
        this costs a hash of the state and one small op, and returns `state` itself. Else those who
        differ get the state of a rank that was in the job, of those the one with the most steps,
        of those the lowest rank's: in the first `sync` rank 0's.

        A rank that had to be given another state though it was in the job is named in a warning of
        the logger `pmesh`: what it computes differs from the others.

        Args:
            state: dicts, lists and tuples, nested as you like, of arrays (numpy, MLX, torch; any
                dtype) and of None, bool, int, float, str and bytes. Every byte comes out as it was.
                It may be of another structure on each rank: who receives gets that of the source,
                in new arrays, of the source's library, torch tensors on the device of those that
                they replace, else on the CPU. Order in a dict counts. Named tuples and
                subclasses of dict come out as such where the receiver has the same.
            timeout_s: for each op; one that moves state takes one op for each 32 MiB. For a trainer
                without an agent also how long it waits for one.

        Raises:
            UnsupportedArray: the state holds something else.
            UsageError: it holds arrays of a library that is not installed here.
            RunError: what has arrived is not what was sent.
            PmeshError: as for `all_reduce`; the state is as it was, the next `sync` begins anew.
        """
        with self._calling() as place:
            synced = place.sync(pack(state), timeout_s=check_timeout(timeout_s))
            self._last_op = LastOp.among(synced.last.op, synced.last.world, synced.nbytes)
        if synced.received is None:
            return state
        try:
            return cast("T", unpack_untrusted(synced.received, state))
        except ProtocolError as e:
            raise RunError(f"the state that has arrived can't be read: {e}") from e

    def shard(
        self, dataset_len: int, *, epoch: int = 0, position: int = 0, seed: int = 0
    ) -> Indices:
        """This rank's samples of an epoch, from a position on.

        All samples in an order that depends on seed and epoch alone, cut at `position` and dealt
        round robin: rank r takes every `size`-th, from the r-th on. So for one position the ranks'
        shards have nothing in common and together hold what is left of the epoch, whatever has come
        and gone before.

        After each step all ranks must move `position` alike: by what all of them took, which is
        `BATCH * size` where each took `mesh.shard(...)[:BATCH]`, with the `mesh.size` that held
        when they took it, before the step's ops. Keep it in the state that `sync` gets. The samples
        of a rank that is lost in the middle of a step are skipped in that epoch.

        Args:
            dataset_len: how many samples there are.
            epoch: another one gives another order.
            position: how many samples of the epoch have been taken by all ranks together.
            seed: another one gives other orders.

        Returns:
            Indices from 0 to `dataset_len` - 1 as int64, read-only; empty at the epoch's end.

        Raises:
            UsageError: before a newcomer's first `sync`, or for a negative number.
        """
        self._place.check_synced()
        check_shard(dataset_len, epoch=epoch, position=position, seed=seed)
        key = (dataset_len, epoch, seed)
        if self._order is None or self._order[0] != key:
            self._order = key, order_of(dataset_len, epoch=epoch, seed=seed)
        world = self._place.world
        return deal(self._order[1], position=position, rank=world.rank, size=len(world.names))

    def all_reduce(self, x: T, op: str = "sum", timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
        """Combine every rank's values; all get the result.

        Args:
            x: of the same shapes and dtypes on every rank.
            op: sum, mean (floats only), max, min or prod; for bool max (any), min or prod (all).
            timeout_s: for each op; a tree takes one for each 32 MiB of a dtype.

        Raises:
            UnsupportedArray: x, its dtype or op has no meaning here.
            OpMismatch: another rank called something else.
            RankLost: another rank is gone, and some rank has connected with `on_loss="raise"`.
            NotEnoughRanks: fewer than `min_ranks` were left for all the time.
            OpTimedOut: some rank did not call in time.
            HistorySuperseded: the job has gone on without this rank; `sync` comes back to it.
            AgentStopped: the agent on this machine is gone; `sync` comes back through another.
        """
        wanted = Collective(
            kind="all_reduce",
            reduction=op,
            bucket_bytes=DEFAULT_BUCKET_BYTES,
            timeout_s=check_timeout(timeout_s),
        )
        return cast("T", self._run(wanted, take_apart(x, reduction=op)))

    def broadcast(self, x: T, root: int = 0, timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
        """Give every rank the values of one.

        Args:
            x: of the same shapes and dtypes on every rank; only the root's values matter.
            root: whose; while ranks change, it stays the same trainer.
            timeout_s: for each op; a tree takes one for each 32 MiB of a dtype.

        Raises:
            RankLost: the root is gone.
            PmeshError: as for `all_reduce`.
        """
        wanted = Collective(
            kind="broadcast",
            root=root,
            bucket_bytes=DEFAULT_BUCKET_BYTES,
            timeout_s=check_timeout(timeout_s),
        )
        return cast("T", self._run(wanted, take_apart(x)))

    def barrier(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until every rank has called this; raises as `all_reduce` does."""
        call = Call("barrier", "float32", (0,))
        timeout_s = check_timeout(timeout_s)

        def in_job(session: TrainerSession) -> LastOp:
            done = session.run_op(call, "float32", 0, timeout_s=timeout_s)
            return LastOp.among(done.op, done.world, 0)

        with self._calling() as place:
            self._last_op = place.run(in_job, lambda world: LastOp.among(ALONE, world, 0))

    def average_gradients(
        self,
        grads: T,
        weight: float = 1.0,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> T:
        """The mean of every rank's gradients, each rank counting by its weight.

        With the number of samples as weight the result is the gradient of the mean loss over the
        union of all batches. What a lost rank did not contribute does not count, nor does its
        weight.

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
            timeout_s=check_timeout(timeout_s),
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
                    self._place.leave()
                else:
                    self._place.end(f"{type(crashed).__name__}: {crashed}")
            finally:
                self._lock.release()
        else:
            self._place.interrupt()

    def _run(self, wanted: Collective, arrays: Arrays) -> object:
        with self._calling() as place:
            result, last = place.run(
                lambda session: run_collective(session, wanted, arrays),
                lambda world: run_alone(wanted, arrays, world),
            )
            self._last_op = last or self._last_op
        return result

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
