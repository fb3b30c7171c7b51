"""The process group, which runs each op of `torch.distributed` by a call of pmesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

from pmesh.client.calls.queue import Handle, Line
from pmesh.client.calls.reducing import all_reduce_in_turn
from pmesh.client.collective.bucketed import take_apart
from pmesh.client.group import Collectives
from pmesh.compression.schemes import Scheme
from pmesh.errors import UnsupportedArray, UsageError
from pmesh.p2p.client.calls import ANY
from pmesh.torch.arguments import (
    StagedTensor,
    TorchReduction,
    check_dtype,
    counts_of,
    given,
    list_in,
    list_of,
    one_of,
    options_for,
    pieces,
    reduction_of,
    targets,
)
from pmesh.torch.composed import is_sparse, monitored_barrier, sum_sparse
from pmesh.torch.group_base import GroupBase, Queued
from pmesh.torch.library import Tensor, TensorList, dist, torch
from pmesh.torch.work import Work


class ProcessGroup(GroupBase):
    """A process group of `torch.distributed` over pmesh. Tensors may be on any device.

    Collectives run in the order of their calls: in the caller's thread if the caller waits and no
    other op runs, else in a thread of the group. Errors are `torch.distributed.DistBackendError`,
    the same on all ranks. Once a rank is lost, every call raises that error at once.
    """

    # --- reductions

    def allreduce(
        self,
        tensors: Tensor | TensorList,
        opts: object = None,
        timeout: timedelta | None = None,
        **named: object,
    ) -> Work:
        """Reduce the tensors of all ranks in place; every rank gets the result."""
        return self._all_reduce(tensors, options_for("Allreduce", opts, timeout, named))

    def allreduce_coalesced(self, tensors: TensorList, opts: object = None) -> Work:
        """Reduce several tensors of all ranks in place, in one op for each dtype."""
        return self._all_reduce(tensors, options_for("AllreduceCoalesced", opts))

    def reduce(
        self,
        tensors: Tensor | TensorList,
        opts: object = None,
        timeout: timedelta | None = None,
        **named: object,
    ) -> Work:
        """Reduce the tensors of all ranks; only the root gets the result, in place."""
        options = options_for("Reduce", opts, timeout, named, root="root")
        x = one_of(tensors, "reduce")
        reduction = reduction_of(options.reduceOp, [x])
        target, values = StagedTensor(x, filled=True), given(x)
        root = options.rootRank

        def run(seconds: float) -> None:
            scaled = values if reduction.factor is None else values * reduction.factor
            result = self._calls.reduce(scaled, root, reduction.name, seconds)
            if result is not None:
                target.memory.copy_(result)
                reduction.finish(target.memory, self.size())
                target.write()

        return self._run("reduce", options, run, [x], [x])

    def reduce_scatter(
        self,
        outputs: Tensor | TensorList,
        inputs: Sequence[Any],
        opts: object = None,
        timeout: timedelta | None = None,
        **named: object,
    ) -> Work:
        """Reduce lists with one tensor per rank; each rank gets its tensor of the result."""
        out = one_of(outputs, "reduce_scatter")
        xs = list_in(inputs)
        options = options_for("ReduceScatter", opts, timeout, named)
        run = self._reduce_scatter_of([(out, [given(x) for x in xs])], options)
        return self._run("reduce_scatter", options, run, xs, [out])

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: object = None) -> Work:
        """Reduce tensors that hold one part per rank; each rank gets its part of the result."""
        return self._reduce_scatter_singles("_reduce_scatter_base", [output], [x], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: TensorList, inputs: TensorList, opts: object = None
    ) -> Work:
        """Do `reduce_scatter_single` for several tensors."""
        return self._reduce_scatter_singles(
            "reduce_scatter_tensor_coalesced", outputs, inputs, opts
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def average(
        self, flat: Tensor, gradients: dict[str, Tensor], compression: Scheme | str
    ) -> Work:
        """Average gradients, views of `flat`, in place, with compression and error feedback."""
        found = {name: StagedTensor(x, filled=True) for name, x in gradients.items()}

        def run(seconds: float) -> None:
            tree = {name: target.memory for name, target in found.items()}
            self._calls.average_gradients(
                tree, timeout_s=seconds, out=tree, compression=compression
            )
            _write(list(found.values()))

        return self._run("average_gradients", dist.AllreduceOptions(), run, [flat], [flat])

    # --- moving

    def broadcast(
        self,
        tensors: Tensor | TensorList,
        opts: object = None,
        timeout: timedelta | None = None,
        **named: object,
    ) -> Work:
        """Give every rank the root's values, in place."""
        options = options_for("Broadcast", opts, timeout, named, root="root")
        x = one_of(tensors, "broadcast")
        root, target = options.rootRank, StagedTensor(x, filled=True)

        def run(seconds: float) -> None:
            self._calls.broadcast(target.memory, root, seconds, out=target.memory)
            target.write()

        return self._run("broadcast", options, run, [x], [x])

    def allgather(
        self,
        outputs: Sequence[Any],
        inputs: Tensor | TensorList,
        opts: object = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Gather the tensors of all ranks into a list."""
        x, outs = one_of(inputs, "all_gather"), list_in(outputs)
        check_dtype(outs, x, "all_gather")
        options = options_for("Allgather", opts, timeout)
        run = self._all_gather_of([(targets(outs), given(x))])
        return self._run("all_gather", options, run, [x], outs)

    def allgather_coalesced(
        self, output_lists: Sequence[TensorList], inputs: TensorList, opts: object = None
    ) -> Work:
        """Gather several tensors; `output_lists` has a list of tensors for each rank."""
        found = [targets([of_rank[i] for of_rank in output_lists]) for i in range(len(inputs))]
        pairs = [(outs, given(x)) for outs, x in zip(found, inputs, strict=True)]
        run, outs = self._all_gather_of(pairs), [out for outs in output_lists for out in outs]
        return self._run("all_gather", options_for("Allgather", opts), run, inputs, outs)

    def all_gather_single(
        self,
        output: Tensor,
        x: Tensor,
        opts: object = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Gather the tensors of all ranks into one tensor, one after another."""
        return self._all_gather_singles("_all_gather_base", [output], [x], opts, timeout)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: TensorList, inputs: TensorList, opts: object = None
    ) -> Work:
        """Do `all_gather_single` for several tensors."""
        return self._all_gather_singles("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self,
        outputs: Sequence[Any],
        inputs: Tensor | TensorList,
        opts: object = None,
        timeout: timedelta | None = None,
        **named: object,
    ) -> Work:
        """Gather the tensors of all ranks into a list at the root."""
        options = options_for("Gather", opts, timeout, named, root="root")
        x, root = one_of(inputs, "gather"), options.rootRank
        outs = list_in(outputs) if root == self.rank() else []
        check_dtype(outs, x, "gather")
        values, found = given(x), targets(outs)

        def run(seconds: float) -> None:
            places = [target.memory for target in found] if root == self.rank() else None
            self._calls.gather_into(places, values, root, seconds)
            _write(found)

        return self._run("gather", options, run, [x], outs)

    def scatter(
        self,
        outputs: Tensor | TensorList,
        inputs: Sequence[Any],
        opts: object = None,
        timeout: timedelta | None = None,
        **named: object,
    ) -> Work:
        """Give each rank its tensor of the root's list."""
        options = options_for("Scatter", opts, timeout, named, root="root")
        out, root = one_of(outputs, "scatter"), options.rootRank
        xs = list_in(inputs) if root == self.rank() else []
        check_dtype(xs, out, "scatter")
        values, target = [given(x) for x in xs], StagedTensor(out)

        def run(seconds: float) -> None:
            parts = values if root == self.rank() else None
            self._calls.scatter_into(target.memory, parts, root, seconds)
            target.write()

        return self._run("scatter", options, run, xs, [out])

    def all_to_all_single(
        self,
        output: Tensor,
        x: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: object = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Send a part of a tensor, cut along the first dimension, to each rank."""
        equal = not output_split_sizes and not input_split_sizes
        target, values = StagedTensor(output), given(x)
        check_dtype([output], x, "all_to_all")
        xs = pieces(values, counts_of(values, input_split_sizes, self.size()))
        outs = pieces(target.memory, counts_of(target.memory, output_split_sizes, self.size()))

        def run(seconds: float) -> None:
            self._calls.all_to_all_into(outs, xs, seconds, equal=equal)
            target.write()

        return self._run("all_to_all", options_for("AllToAll", opts, timeout), run, [x], [output])

    alltoall_base = all_to_all_single

    def alltoall(
        self,
        outputs: TensorList,
        inputs: TensorList,
        opts: object = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Send a tensor of the list to each rank, and receive one from each."""
        found, values = targets(outputs), [given(x) for x in inputs]

        def run(seconds: float) -> None:
            self._calls.all_to_all_into([each.memory for each in found], values, seconds)
            _write(found)

        return self._run("all_to_all", options_for("AllToAll", opts, timeout), run, inputs, outputs)

    def send(self, tensors: TensorList, to: int, tag: int = 0) -> Work:
        """Send a tensor to one rank."""
        x = one_of(tensors, "send")

        def begin() -> Handle[Any]:
            return self._calls.send(given(x), to, tag, self._timeout_s, async_op=True)

        return self._message("send", begin, x, lambda _: to)

    def recv(self, tensors: TensorList, source: int, tag: int = 0) -> Work:
        """Receive a tensor from one rank."""
        return self._receive("recv", one_of(tensors, "recv"), source, tag)

    def recv_anysource(self, tensors: TensorList, tag: int = 0) -> Work:
        """Receive a tensor from the rank that sends first."""
        return self._receive("recvAnySource", one_of(tensors, "recv"), ANY, tag)

    def barrier(self, opts: object = None, timeout: timedelta | None = None) -> Work:
        """Wait for all ranks."""
        return self._run(
            "barrier", options_for("Barrier", opts, timeout), self._calls.barrier, [], []
        )

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Wait for all ranks; the error names the first missing rank, or all of them."""

        def run(seconds: float) -> None:
            given_s = seconds if timeout is None else timeout.total_seconds()
            monitored_barrier(self._calls, given_s, wait_all_ranks=wait_all_ranks)

        options = options_for("Barrier", None, timeout)
        self._run("monitored_barrier", options, run, [], []).wait()

    # --- objects

    def all_gather_object(self, obj: object) -> list[Any]:
        """See `pmesh.torch.all_gather_object`."""
        gathered: list[Any] = self._object(
            "all_gather_object", lambda seconds: self._calls.all_gather_object(obj, seconds)
        )
        return gathered

    def broadcast_object(self, obj: object, root: int) -> Any:  # noqa: ANN401 - the root's object
        """See `pmesh.torch.broadcast_object`; the root is a rank of this group."""
        return self._object(
            "broadcast_object", lambda seconds: self._calls.broadcast_object(obj, root, seconds)
        )

    def _object(self, name: str, call: Callable[[float], Any]) -> Any:  # noqa: ANN401 - data
        found: list[Any] = []
        options = options_for("Barrier", None)
        self._run(name, options, lambda seconds: found.append(call(seconds)), [], []).wait()
        return found[0]

    # --- helpers

    def _all_reduce(self, tensors: Tensor | TensorList, options: Any) -> Work:  # noqa: ANN401
        xs = list_of(tensors)
        reduction = reduction_of(options.reduceOp, xs)
        if any(map(is_sparse, xs)):
            return self._all_reduce_sparse(xs, reduction, options)
        found = [StagedTensor(x, filled=True) for x in xs]
        is_plain = reduction.factor is None and not reduction.is_divided
        is_small = len(found) == 1 and 0 < found[0].memory.nbytes <= _SMALL_BYTES
        if is_plain and is_small and _is_reduced(xs[0].dtype, reduction.name):
            small = _SmallAllReduce(self._calls, self._line, found[0], reduction.name)
            return self._run("all_reduce", options, small, xs, xs)

        def run(seconds: float) -> None:
            values = [target.memory for target in found]
            factor = reduction.factor
            scaled = values if factor is None else [_times(each, factor) for each in values]
            tree, out = (each[0] if len(found) == 1 else each for each in (scaled, values))
            self._calls.all_reduce(tree, reduction.name, seconds, out=out)
            for each in values:
                reduction.finish(each, self.size())
            _write(found)

        return self._run("all_reduce", options, run, xs, xs)

    def _all_reduce_sparse(
        self,
        xs: TensorList,
        reduction: TorchReduction,
        options: Any,  # noqa: ANN401 - torch's
    ) -> Work:
        x = one_of(xs, "all_reduce of sparse tensors")

        def run(seconds: float) -> None:
            sum_sparse(self._calls, x, reduction, seconds)

        return self._run("all_reduce", options, run, [], [x])

    def _reduce_scatter_singles(
        self, name: str, outputs: TensorList, inputs: TensorList, opts: object
    ) -> Work:
        options = options_for("ReduceScatter", opts)
        parts: list[tuple[Tensor, list[Tensor]]] = []
        for out, x in zip(outputs, inputs, strict=True):
            check_dtype([out], x, "reduce_scatter")
            if out.numel() * self.size() != x.numel():
                raise ValueError(
                    f"reduce_scatter: {x.numel()} values are no {self.size()} times {out.numel()}"
                )
            parts.append((out, pieces(given(x), [out.numel()] * self.size())))
        run = self._reduce_scatter_of(parts, options)
        return self._run(name, options, run, inputs, outputs)

    def _reduce_scatter_of(
        self,
        parts: Sequence[tuple[Tensor, list[Tensor]]],
        options: Any,  # noqa: ANN401 - torch's
    ) -> Callable[[float], None]:
        reduction = reduction_of(options.reduceOp, [out for out, _ in parts])
        pairs = [(StagedTensor(out), xs) for out, xs in parts]

        def run(seconds: float) -> None:
            for target, xs in pairs:
                factor = reduction.factor
                scaled = xs if factor is None else [x * factor for x in xs]
                own = target.memory.reshape(scaled[self.rank()].shape)
                self._calls.reduce_scatter_into(own, scaled, reduction.name, seconds)
                reduction.finish(own, self.size())
                target.write()

        return run

    def _all_gather_singles(
        self,
        name: str,
        outputs: TensorList,
        inputs: TensorList,
        opts: object,
        timeout: timedelta | None = None,
    ) -> Work:
        parts: list[tuple[list[StagedTensor], Tensor]] = []
        whole: list[StagedTensor] = []
        for out, x in zip(outputs, inputs, strict=True):
            check_dtype([out], x, "all_gather")
            if out.numel() != x.numel() * self.size():
                raise ValueError(
                    f"all_gather: {out.numel()} values are no {self.size()} times {x.numel()}"
                )
            whole.append(StagedTensor(out))
            cut = pieces(whole[-1].memory, [x.numel()] * self.size())
            parts.append((targets(cut), given(x)))
        run = self._all_gather_of(parts, whole)
        return self._run(name, options_for("Allgather", opts, timeout), run, inputs, outputs)

    def _all_gather_of(
        self, parts: Sequence[tuple[list[StagedTensor], Tensor]], whole: Sequence[StagedTensor] = ()
    ) -> Callable[[float], None]:
        def run(seconds: float) -> None:
            for found, x in parts:
                self._calls.all_gather_into([target.memory for target in found], x, seconds)
                _write(found)
            _write(whole)

        return run

    def _receive(self, name: str, x: Tensor, source: int, tag: int) -> Work:
        target = StagedTensor(x)

        def begin() -> Handle[Any]:
            like = target.memory
            return self._calls.recv(source, tag, self._timeout_s, like=like, async_op=True)

        def take(arrived: Tensor) -> int:
            if (arrived.dtype, arrived.numel()) != (x.dtype, x.numel()):
                raise UsageError(
                    f"what has come is {arrived.dtype} {list(arrived.shape)}, and does not fit "
                    f"into {x.dtype} {list(x.shape)}"
                )
            target.memory.copy_(arrived.reshape(x.shape))
            target.write()
            return source if source != ANY else int(self._calls.last_source or 0)

        return self._message(name, begin, x, take)


_SMALL_BYTES = 16 * 1024  # of larger values, moving them takes longer than the calls
_MOST_TOGETHER = 8


@dataclass(frozen=True, slots=True, eq=False)
class _SmallAllReduce:
    """An all_reduce of few values. If more of them wait behind it, all are sent together.

    So nothing has to be woken up between two of them but their own agents.
    """

    calls: Collectives
    line: Line
    target: StagedTensor
    reduction: str

    def __call__(self, timeout_s: float) -> None:
        following = self._following(timeout_s)
        if not following:
            x = self.target.memory
            self.calls.all_reduce(x, self.reduction, timeout_s, out=x)
            self.target.write()
            return
        xs = [self.target.memory, *(other.target.memory for _, other in following)]
        first, *others = all_reduce_in_turn(self.calls, xs, self.reduction, timeout_s)
        for (queued, other), call in zip(following, others, strict=True):
            queued.rest = partial(other.finish, call)
        self.finish(first)

    def _following(self, timeout_s: float) -> "list[tuple[Queued, _SmallAllReduce]]":
        found: list[tuple[Queued, _SmallAllReduce]] = []
        for queued in self.line.next_up(_MOST_TOGETHER - 1):
            if not isinstance(queued, Queued) or queued.timeout_s != timeout_s:
                break
            other = queued.run
            if not isinstance(other, _SmallAllReduce) or other.reduction != self.reduction:
                break
            found.append((queued, other))
        return found

    def finish(self, call: Callable[[], object]) -> None:
        """Reduce the values by `call`, and write the result to the tensor."""
        call()
        self.target.write()


def pmesh_group(group: object, what: str) -> ProcessGroup:
    """Return the group; None is the default one. Raises UsageError for another backend's group."""
    used = group if group is not None else dist.distributed_c10d._get_default_group()  # noqa: SLF001
    if not isinstance(used, ProcessGroup):
        raise UsageError(f"{what} is for a group of the backend 'pmesh'")
    return used


@lru_cache(maxsize=64)  # a training reduces a few dtypes
def _is_reduced(dtype: Any, reduction: str) -> bool:  # noqa: ANN401 - a torch.dtype
    """Return False for what can't be reduced so: it fails in its own turn, and no other with it."""
    try:
        take_apart(torch.empty(0, dtype=dtype), reduction=reduction)
    except UnsupportedArray:
        return False
    return True


def _times(x: Tensor, factor: object) -> Tensor:
    """Return the tensor times a factor, as a new one: an op that fails changes no input (I8)."""
    return torch.mul(x, factor, out=torch.empty_like(x))


def _write(found: Sequence[StagedTensor]) -> None:
    for target in found:
        target.write()


def _keep_from_tracing() -> None:
    """Keep torch.compile from tracing the ops and what they call, since it can't.

    `torch.compiler.disable` does the same, but imports all of dynamo.
    """
    frames: Any = torch._C._dynamo.eval_frame  # noqa: SLF001 - as above
    if not hasattr(frames, "set_code_exec_strategy"):
        return  # an older torch
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)  # noqa: SLF001
    for op in vars(ProcessGroup).values():
        if isinstance(op, FunctionType):
            frames.set_code_exec_strategy(op.__code__, skip)


_keep_from_tracing()
