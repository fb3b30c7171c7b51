"""average_gradients, and its error feedback: what compression has left out so far."""

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
    OnNonfinite,
    run_alone,
    take_apart,
    written_into,
)
from pmesh.client.collective.buckets import backward_order
from pmesh.client.collective.differences import fill_missing
from pmesh.client.collective.guard import check_alone, check_mode
from pmesh.client.elastic.place import Place
from pmesh.client.feedback.call import Compression, chosen_for_gradients
from pmesh.client.session.session import TrainerSession
from pmesh.compression.schemes import Scheme
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.trainer import World
from pmesh.errors import UsageError

T = TypeVar("T")

Missing = Literal["error", "zeros"]


class Averaging(Reducing):
    """average_gradients, and the state of its error feedback."""

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
        on_nonfinite: OnNonfinite = ...,
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
        on_nonfinite: OnNonfinite = ...,
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
        on_nonfinite: OnNonfinite = "keep",
        async_op: bool = False,
    ) -> T | Handle[T]:
        """Return the mean of all ranks' gradients, weighted by the ranks' weights.

        If the weight is the number of samples, the result is the gradient of the mean loss over the
        union of all batches. If the values of a lost rank are missing, its weight does not count
        either.

        MLX computes gradients lazily. This call evaluates them bucket by bucket, the last layers
        first, while the network sends the bucket before. So most of the network's time is hidden
        behind the rest of the backward pass; all you must do is not evaluate them yourself. With
        `compression`, `missing="zeros"`, `out` or `async_op` they are all evaluated first.

        Args:
            grads: a tree of floating-point arrays.
            weight: at least 0; with 0 this rank's gradients are not read.
            bucket_bytes: the most that is averaged as one op; an array is never divided. For MLX
                arrays it is at most an eighth of the tree, or 4 MiB if that is more.
            timeout_s: for each op.
            out: as for `all_reduce`; may be `grads`. It saves the time for new arrays.
            strategy: as for `all_reduce`.
            compression: as for `all_reduce`. What it leaves out of a call is added to the gradients
                of the next call with the same paths and shapes (see `Scheme.error_feedback`), and
                PowerSGD begins after its `start_step`. None: the default of this machine's agent,
                if it has one. "none": no compression.
            missing: the meaning of None, the gradient of an unused parameter, where another rank
                has an array. "error": the call fails. "zeros": it counts as zeros, with this rank's
                weight, and all ranks get the mean. The same on all ranks; costs one more small op;
                not possible with `out=`.
            on_nonfinite: what happens if a gradient of some rank is NaN or infinite; the same on
                all ranks. "keep": the mean is NaN or infinite, too. "raise": all ranks get
                NonFiniteGradients, which names the rank. "skip": the gradients of that rank are
                left out, with its weight, and a warning names it. As long as all are finite, both
                cost one pass over the mean (compressed: over this rank's gradients) and no op.
            async_op: return a handle at once.

        Returns:
            A tree like `grads`. Arrays of numpy and torch that were averaged as one op are views of
            one block of memory, which lives as long as any of them; nothing else writes to it.

        Raises:
            UnsupportedCompression: the compression does not fit these gradients.
            UsageError: the weights of all ranks add up to 0.
            NonFiniteGradients: as `on_nonfinite` says; with "skip" if no rank is left.
            OpMismatch: the paths, shapes or dtypes of the ranks differ, or only some have None.
            PmeshError: as for `all_reduce`.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise UsageError(f"a weight is a number of samples, at least 0, not {weight}")
        if missing not in get_args(Missing):
            raise UsageError(f"missing is one of {get_args(Missing)}, not {missing!r}")
        check_mode(on_nonfinite)
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
            on_nonfinite=on_nonfinite,
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
            arrays = written_into(arrays, out, bucket_bytes=bucket_bytes)
        result = self._run(
            wanted, arrays, compression=scheme, async_op=async_op, writes=out is not None
        )
        return cast("T | Handle[T]", result)

    def _run_filled(
        self,
        wanted: Collective,
        arrays: Arrays,
        choose: Callable[[Arrays], Compression | None],
        *,
        async_op: bool,
    ) -> object:
        """Do as `_run`, with zeros where this rank has None and another rank an array."""
        wanted = replace(wanted, backward=None)

        def ops(session: TrainerSession) -> tuple[tuple[Arrays, list[object]], LastOp | None]:
            filled = fill_missing(session, arrays, timeout_s=wanted.timeout_s)
            results, last = self._ops(wanted, filled.detached(), choose(filled))(session)
            return (filled, results), last

        def alone(world: World) -> tuple[tuple[Arrays, list[object]], LastOp | None]:
            check_alone(wanted, arrays, world)
            results, last = run_alone(wanted, arrays.detached(), world)
            return (arrays, results), last

        def finish(done: tuple[Arrays, list[Any]]) -> object:
            return rebuild_late(*done)

        return self._call(ops, alone, finish, timeout_s=wanted.timeout_s, async_op=async_op)

    def error_feedback_state(self) -> dict[str, Values]:
        """Return what compression has left out on this rank, for a checkpoint of this rank.

        It differs from rank to rank, so do not pass it to `sync`. Calls under way end first.

        Returns:
            Copies, as numpy arrays by name; none if nothing was compressed with feedback.
        """

        def run(_: Place) -> tuple[dict[str, Values], None]:
            return self._feedback.state(), None

        return cast("dict[str, Values]", self._do(run, dict))

    def load_error_feedback_state(self, state: Mapping[str, Any]) -> None:
        """Continue with what `error_feedback_state` has returned, on this rank or another.

        What matters is the sum over all ranks. If there are fewer ranks than before, what the
        others had left out is lost. Calls under way end first.

        Args:
            state: the arrays, of numpy or what `numpy.asarray` takes; they are copied.

        Raises:
            UsageError: it is something else; then nothing has changed.
        """

        def run(_: Place) -> tuple[None, None]:
            self._feedback.load(state)
            return None, None

        self._do(run, lambda nothing: nothing)
