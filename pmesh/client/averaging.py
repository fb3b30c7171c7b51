"""average_gradients, and what its compression keeps from one call to the next."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast, overload

from pmesh.client.caller import check_timeout
from pmesh.client.calls import Collective, LastOp, take_apart
from pmesh.client.choosing import chosen_for_gradients
from pmesh.client.job_place import JobPlace
from pmesh.client.line import Handle
from pmesh.client.outputs import written_into
from pmesh.client.reducing import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_TIMEOUT_S,
    Reducing,
    Strategy,
    named_strategy,
)
from pmesh.compression.schemes import Scheme
from pmesh.core.reductions import Values
from pmesh.errors import UsageError

T = TypeVar("T")


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
        async_op: bool = False,
    ) -> T | Handle[T]:
        """The mean of every rank's gradients, each rank counting by its weight.

        With the number of samples as weight the result is the gradient of the mean loss over the
        union of all batches. What a lost rank did not contribute does not count, nor does its
        weight.

        Args:
            grads: a tree of floating-point arrays.
            weight: at least 0; with 0 this rank's gradients are not looked at.
            bucket_bytes: how much is averaged as one op; an array is never divided.
            timeout_s: for each op.
            out: as for `all_reduce`; may be `grads`, and saves the time that new arrays take.
            strategy: as for `all_reduce`.
            compression: as for `all_reduce`, but what it leaves out of a call is added to the
                gradients of the next one with the same paths and shapes (see
                `Scheme.error_feedback`), and PowerSGD begins after its `start_step`. None: what
                this machine's agent was started with, if anything; "none": nothing.
            async_op: return a handle at once.

        Returns:
            A tree like `grads`. Arrays of numpy and torch that were averaged as one op are views of
            one block of memory, which lives as long as any of them; nothing else writes to it.

        Raises:
            UnsupportedCompression: the compression.
            UsageError: the weights of all ranks add up to 0.
            PmeshError: as for `all_reduce`.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise UsageError(f"a weight is a number of samples, at least 0, not {weight}")
        if bucket_bytes < 1:
            raise UsageError(f"bucket_bytes is at least 1, not {bucket_bytes}")
        arrays = take_apart(grads, reduction="mean")
        named = named_strategy(strategy)
        default = self._place.compression
        wanted = Collective(
            kind="all_reduce",
            reduction="sum",
            strategy=named,
            weight=float(weight),
            compression=chosen_for_gradients(compression, default, arrays, strategy=named),
            bucket_bytes=bucket_bytes,
            timeout_s=check_timeout(timeout_s),
        )
        if out is not None:
            arrays = written_into(arrays, out)
        result = self._run(wanted, arrays, async_op=async_op)
        return cast("T | Handle[T]", result)

    def error_feedback_state(self) -> dict[str, Values]:
        """What compression has left out on this rank so far, for a checkpoint of this rank.

        It is another one on each rank, so it does not belong into what `sync` gets. Calls that are
        under way end first.

        Returns:
            Arrays of numpy by name, copies; empty if nothing was compressed with feedback.
        """

        def run(_: JobPlace) -> tuple[Callable[[], dict[str, Values]], LastOp | None]:
            state = self._feedback.state()
            return lambda: state, None

        return cast("dict[str, Values]", self._do(run))

    def load_error_feedback_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what `error_feedback_state` has returned, on this rank or another.

        The sum over all ranks counts: where there are fewer ranks than before, what the others had
        left out is lost. Calls that are under way end first.

        Args:
            state: the arrays, of numpy or what `numpy.asarray` takes; they are copied.

        Raises:
            UsageError: it is something else; then nothing has changed.
        """

        def run(_: JobPlace) -> tuple[Callable[[], None], LastOp | None]:
            self._feedback.load(state)
            return lambda: None, None

        self._do(run)
