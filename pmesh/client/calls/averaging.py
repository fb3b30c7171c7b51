"""average_gradients, and what compression has left out of it so far."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, cast, get_args, overload

from pmesh.client.calls.queue import Handle, check_timeout
from pmesh.client.calls.reducing import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_TIMEOUT_S,
    Reducing,
    Strategy,
    named_strategy,
    rebuild_late,
)
from pmesh.client.collective.bucketed import (
    Arrays,
    Collective,
    LastOp,
    run_alone,
    take_apart,
    written_into,
)
from pmesh.client.collective.buckets import backward_order
from pmesh.client.collective.differences import fill_missing
from pmesh.client.elastic.membership import Place
from pmesh.client.feedback.call import Compression, chosen_for_gradients
from pmesh.client.link.session import TrainerSession
from pmesh.compression.schemes import Scheme
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.local import World
from pmesh.errors import UsageError

T = TypeVar("T")

Missing = Literal["error", "zeros"]


class Averaging(Reducing):
    """Gradients."""

    @overload
    def average_gradients(
        self,
        grads: T,
        weight: float = ...,
        bucket_bytes: int = ...,
        timeout_s: float = ...,
        *,
        out: T | None = ...,
        strategy: Strategy = ...,
        compression: Scheme | str | None = ...,
        missing: Missing = ...,
        async_op: Literal[False] = ...,
    ) -> T: ...
    @overload
    def average_gradients(
        self,
        grads: T,
        weight: float = ...,
        bucket_bytes: int = ...,
        timeout_s: float = ...,
        *,
        out: T | None = ...,
        strategy: Strategy = ...,
        compression: Scheme | str | None = ...,
        missing: Missing = ...,
        async_op: Literal[True],
    ) -> Handle[T]: ...
    def average_gradients(
        self,
        grads: T,
        weight: float = 1.0,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        out: T | None = None,
        strategy: Strategy = "auto",
        compression: Scheme | str | None = None,
        missing: Missing = "error",
        async_op: bool = False,
    ) -> T | Handle[T]:
        """The mean of every rank's gradients, each rank counting by its weight.

        With the number of samples as weight the result is the gradient of the mean loss over the
        union of all batches. What a lost rank did not contribute does not count, nor does its
        weight.

        MLX's gradients are computed when they are asked for. Here this is done bucket by bucket,
        the last layers first, while the network carries the bucket before: so what the network
        takes is mostly hidden behind the rest of the backward pass. Nothing else is to be done for
        that, but for not evaluating them before. It does not hold with `compression`,
        `missing="zeros"` or `out`, nor with `async_op`: then they are all computed first.

        Args:
            grads: a tree of floating-point arrays.
            weight: at least 0; with 0 this rank's gradients are not looked at.
            bucket_bytes: how much is averaged as one op at most; an array is never divided. Of MLX
                arrays an eighth of the tree, but at least 4 MiB.
            timeout_s: for each op.
            out: as for `all_reduce`; may be `grads`, and saves the time that new arrays take.
            strategy: as for `all_reduce`.
            compression: as for `all_reduce`, but what it leaves out of a call is added to the
                gradients of the next one with the same paths and shapes (see
                `Scheme.error_feedback`), and PowerSGD begins after its `start_step`. None: what
                this machine's agent was started with, if anything; "none": nothing.
            missing: what a None is, as of a parameter that was not used, where another rank has an
                array: an "error", or "zeros", which count by this rank's weight, and the mean comes
                out everywhere. Alike on all ranks; not with `out=`; one more small op.
            async_op: return a handle at once.

        Returns:
            A tree like `grads`. Arrays of numpy and torch that were averaged as one op are views of
            one block of memory, which lives as long as any of them; nothing else writes to it.

        Raises:
            UnsupportedCompression: the compression.
            UsageError: the weights of all ranks add up to 0.
            OpMismatch: only some ranks have None at some path, or other paths, shapes or dtypes.
            PmeshError: as for `all_reduce`.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise UsageError(f"a weight is a number of samples, at least 0, not {weight}")
        if missing not in get_args(Missing):
            raise UsageError(f"missing is one of {get_args(Missing)}, not {missing!r}")
        if bucket_bytes < 1:
            raise UsageError(f"bucket_bytes is at least 1, not {bucket_bytes}")
        arrays = take_apart(grads, reduction="mean", lazily=True)
        named = named_strategy(strategy)
        wanted = Collective(
            kind="all_reduce",
            reduction="sum",
            strategy=named,
            weight=float(weight),
            bucket_bytes=bucket_bytes,
            timeout_s=check_timeout(timeout_s),
            backward=backward_order(arrays.tree, arrays.leaves, bucket_bytes),
        )
        default = self._place.compression
        choose = partial(chosen_for_gradients, compression, default, strategy=named)
        scheme = choose(arrays) if default or compression is not None else None
        if scheme is not None or missing == "zeros" or out is not None:
            arrays = arrays.evaluated()
        if missing == "zeros":
            if out is not None:
                raise UsageError("out= has no place for missing='zeros': leave one of them out")
            result = self._run_filled(wanted, arrays, choose, async_op=async_op)
            return cast("T | Handle[T]", result)
        if out is not None:
            arrays = written_into(arrays, out)
        result = self._run(wanted, arrays, compression=scheme, async_op=async_op)
        return cast("T | Handle[T]", result)

    def _run_filled(
        self,
        wanted: Collective,
        arrays: Arrays,
        choose: Callable[[Arrays], Compression | None],
        *,
        async_op: bool,
    ) -> object:
        """As `_run`, for the tree that all ranks have together."""
        wanted = replace(wanted, backward=None)

        def ops(session: TrainerSession) -> tuple[tuple[Arrays, list[object]], LastOp | None]:
            filled = fill_missing(session, arrays, timeout_s=wanted.timeout_s)
            results, last = self._ops(wanted, filled.detached(), choose(filled))(session)
            return (filled, results), last

        def alone(world: World) -> tuple[tuple[Arrays, list[object]], LastOp | None]:
            results, last = run_alone(wanted, arrays.detached(), world)
            return (arrays, results), last

        def finish(done: tuple[Arrays, list[Any]]) -> object:
            return rebuild_late(*done)

        return self._call(ops, alone, finish, timeout_s=wanted.timeout_s, async_op=async_op)

    def error_feedback_state(self) -> dict[str, Values]:
        """What compression has left out on this rank so far, for a checkpoint of this rank.

        It is another one on each rank, so it does not belong into what `sync` gets. Calls that are
        under way end first.

        Returns:
            Arrays of numpy by name, copies; empty if nothing was compressed with feedback.
        """

        def run(_: Place) -> tuple[dict[str, Values], None]:
            return self._feedback.state(), None

        return cast("dict[str, Values]", self._do(run, dict))

    def load_error_feedback_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what `error_feedback_state` has returned, on this rank or another.

        The sum over all ranks counts: where there are fewer ranks than before, what the others had
        left out is lost. Calls that are under way end first.

        Args:
            state: the arrays, of numpy or what `numpy.asarray` takes; they are copied.

        Raises:
            UsageError: it is something else; then nothing has changed.
        """

        def run(_: Place) -> tuple[None, None]:
            self._feedback.load(state)
            return None, None

        self._do(run, lambda nothing: nothing)
