"""The process group: each op of `torch.distributed` by a call of pmesh."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

from pmesh.client.calls.point_to_point import ANY
from pmesh.client.calls.queue import Handle, Line
from pmesh.client.group import Collectives
from pmesh.errors import (
    AgentStopped,
    GroupBroken,
    HistorySuperseded,
    MeshClosed,
    PmeshError,
    RankLost,
    RosterChanged,
    UsageError,
)
from pmesh.torch.reductions import reduction_of
from pmesh.torch.staging import Target, given, pieces, targets
from pmesh.torch.work import MessageWork, Work

T = TypeVar("T")
Tensors = Sequence[torch.Tensor]

_ENDS = (RankLost, GroupBroken, RosterChanged, HistorySuperseded, AgentStopped, MeshClosed)
"""After these, torch's fixed number of ranks is not there any more."""
_UNSET_S = 0.0
_DONE: "Future[None]" = Future()
_DONE.set_result(None)


class ProcessGroup(dist.ProcessGroup):
    """Some ranks of `torch.distributed` over pmesh; the tensors may be on any device.

    All collectives run in the order in which they were called: one that its caller waits for in
    the caller's thread, others in a thread of the group. Their errors are
    `torch.distributed.DistBackendError`, on all ranks the same. Once a rank is lost, every call
    raises it at once.
    """

    def __init__(
        self,
        calls: Collectives,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        timeout: timedelta,
        name: str = "",
        split: "Callable[[Sequence[int]], ProcessGroup | None]",
        end: Callable[[], None],
    ) -> None:
        """`split` makes a group of some ranks of this one, and `end` leaves it."""
        super().__init__(rank, size)
        self._calls = calls
        self._store = store
        self._timeout_s = timeout.total_seconds()
        self._name, self._desc = name, "undefined"
        self._split, self._end = split, end
        self._line = Line()
        self._lost = ""
        self._sequence = 0
        self._since_coalescing: list[Work] | None = None

    # --- what torch asks of a group

    def getBackendName(self) -> str:  # noqa: N802 - what C++ calls
        """The backend's name."""
        return "pmesh"

    def _get_backend_name(self) -> str:
        return "pmesh"

    def name(self) -> str:
        """The backend's name."""
        return "pmesh"

    @property
    def group_name(self) -> str:
        """By which functional collectives find the group."""
        return self._name

    pg_name = group_name

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)

    def getGroupName(self) -> str:  # noqa: N802 - what C++ calls
        """By which functional collectives find the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - what C++ calls
        """Give it another name."""
        self._name = name

    @property
    def group_desc(self) -> str:
        """What it is for."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802 - what C++ calls
        """What it is for."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - what C++ calls
        """Say what it is for."""
        self._desc = desc

    def get_group_store(self) -> dist.Store:
        """The store of the group."""
        return self._store

    def _get_backend(self, device: torch.device) -> "ProcessGroup":
        del device  # all of them
        return self

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def set_timeout(self, timeout: timedelta) -> None:
        """The time for each op that names none."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout
    supports_splitting = True

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> "ProcessGroup | None":
        """A group of some ranks of this one, which count in this order; None if not of them."""
        del opts, device_types
        made = self._split(list(new_ranks))
        if made is not None:
            made.setGroupName(group_name or f"{self._name}:{list(new_ranks)}")
            made.setGroupDesc(group_desc or self._desc)
            if timeout is not None:
                made.set_timeout(timeout)
        return made

    def shutdown(self) -> None:
        """Leave the group once what was called has ended."""
        self._line.end()
        self._end()

    def abort(self) -> None:
        """Leave at once."""
        self._lost = self._lost or "the process group was aborted"
        self.shutdown()

    # --- reductions

    def allreduce(
        self,
        tensors: torch.Tensor | Tensors,
        opts: object = None,
        timeout: timedelta | None = None,
        **named: object,
    ) -> Work:
        """The sum, and so on, of all ranks' values, in place."""
        return self._all_reduce(tensors, _options("Allreduce", opts, timeout, named))

    def allreduce_coalesced(self, tensors: Tensors, opts: object = None) -> Work:
        """The same for several tensors as one op of each dtype."""
        return self._all_reduce(tensors, _options("AllreduceCoalesced", opts))

    def reduce(
        self,
        tensors: torch.Tensor | Tensors,
        opts: object = None,
        timeout: timedelta | None = None,
        **named: object,
    ) -> Work:
        """The sum, and so on, at one rank."""
        options = _options("Reduce", opts, timeout, named, root="root")
        x = _one(tensors, "reduce")
        reduction, factor = reduction_of(options.reduceOp)
        target, values = Target(x, filled=True), given(x)
        root = options.rootRank

        def run(seconds: float) -> None:
            scaled = values if factor is None else values * factor
            result = self._calls.reduce(scaled, root, reduction, seconds)
            if result is not None:
                target.memory.copy_(result)
                target.write()

        return self._run("reduce", options, run, [x], [x])

    def reduce_scatter(
        self,
        outputs: torch.Tensor | Tensors,
        inputs: Sequence[Any],
        opts: object = None,
        timeout: timedelta | None = None,
        **named: object,
    ) -> Work:
        """This rank's part of the sum of lists with a tensor for each rank."""
        out = _one(outputs, "reduce_scatter")
        xs = _one_list(inputs)
        options = _options("ReduceScatter", opts, timeout, named)
        run = self._reduce_scatter_of([(out, [given(x) for x in xs])], options)
        return self._run("reduce_scatter", options, run, xs, [out])

    def reduce_scatter_single(
        self, output: torch.Tensor, x: torch.Tensor, opts: object = None
    ) -> Work:
        """The same of one tensor, whose parts for the ranks lie behind each other."""
        return self._reduce_scatter_singles("_reduce_scatter_base", [output], [x], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: object = None
    ) -> Work:
        """The same of several tensors."""
        return self._reduce_scatter_singles(
            "reduce_scatter_tensor_coalesced", outputs, inputs, opts
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- moving

    def broadcast(
        self,
        tensors: torch.Tensor | Tensors,
        opts: object = None,
        timeout: timedelta | None = None,
        **named: object,
    ) -> Work:
        """The values of one rank for all, in place."""
        options = _options("Broadcast", opts, timeout, named, root="root")
        x = _one(tensors, "broadcast")
        root, target = options.rootRank, Target(x, filled=True)

        def run(seconds: float) -> None:
            self._calls.broadcast(target.memory, root, seconds, out=target.memory)
            target.write()

        return self._run("broadcast", options, run, [x], [x])

    def allgather(
        self,
        outputs: Sequence[Any],
        inputs: torch.Tensor | Tensors,
        opts: object = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """The tensors of all ranks in a list."""
        x, outs = _one(inputs, "all_gather"), _one_list(outputs)
        _check_alike(outs, x, "all_gather")
        options = _options("Allgather", opts, timeout)
        run = self._all_gather_of([(targets(outs), given(x))])
        return self._run("all_gather", options, run, [x], outs)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: object = None
    ) -> Work:
        """The same of several tensors, each with a list of its own."""
        pairs = [(targets(outs), given(x)) for outs, x in zip(output_lists, inputs, strict=True)]
        run, outs = self._all_gather_of(pairs), [out for outs in output_lists for out in outs]
        return self._run("all_gather", _options("Allgather", opts), run, inputs, outs)

    def all_gather_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        opts: object = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """The tensors of all ranks behind each other in one."""
        return self._all_gather_singles("_all_gather_base", [output], [x], opts, timeout)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: object = None
    ) -> Work:
        """The same of several tensors."""
        return self._all_gather_singles("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self,
        outputs: Sequence[Any],
        inputs: torch.Tensor | Tensors,
        opts: object = None,
        timeout: timedelta | None = None,
        **named: object,
    ) -> Work:
        """The tensors of all ranks at one of them."""
        options = _options("Gather", opts, timeout, named, root="root")
        x, root = _one(inputs, "gather"), options.rootRank
        outs = _one_list(outputs) if root == self.rank() else []
        _check_alike(outs, x, "gather")
        values, found = given(x), targets(outs)

        def run(seconds: float) -> None:
            places = [target.memory for target in found] if root == self.rank() else None
            self._calls.gather_into(places, values, root, seconds)
            _write(found)

        return self._run("gather", options, run, [x], outs)

    def scatter(
        self,
        outputs: torch.Tensor | Tensors,
        inputs: Sequence[Any],
        opts: object = None,
        timeout: timedelta | None = None,
        **named: object,
    ) -> Work:
        """A tensor for each rank of those that one of them has."""
        options = _options("Scatter", opts, timeout, named, root="root")
        out, root = _one(outputs, "scatter"), options.rootRank
        xs = _one_list(inputs) if root == self.rank() else []
        _check_alike(xs, out, "scatter")
        values, target = [given(x) for x in xs], Target(out)

        def run(seconds: float) -> None:
            parts = values if root == self.rank() else None
            self._calls.scatter_into(target.memory, parts, root, seconds)
            target.write()

        return self._run("scatter", options, run, xs, [out])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: object = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Parts of one tensor, along its first dimension, to each rank."""
        equal = not output_split_sizes and not input_split_sizes
        target, values = Target(output), given(x)
        _check_dtype([output], x, "all_to_all")
        xs = pieces(values, _counts(values, input_split_sizes, self.size()))
        outs = pieces(target.memory, _counts(target.memory, output_split_sizes, self.size()))

        def run(seconds: float) -> None:
            self._calls.all_to_all_into(outs, xs, seconds, equal=equal)
            target.write()

        return self._run("all_to_all", _options("AllToAll", opts, timeout), run, [x], [output])

    alltoall_base = all_to_all_single

    def alltoall(
        self,
        outputs: Tensors,
        inputs: Tensors,
        opts: object = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """A tensor of a list to each rank."""
        found, values = targets(outputs), [given(x) for x in inputs]

        def run(seconds: float) -> None:
            self._calls.all_to_all_into([each.memory for each in found], values, seconds)
            _write(found)

        return self._run("all_to_all", _options("AllToAll", opts, timeout), run, inputs, outputs)

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Work:
        """A tensor to one rank."""
        x = _one(tensors, "send")

        def begin() -> Handle[Any]:
            return self._calls.send(given(x), to, tag, self._timeout_s, async_op=True)

        return self._message("send", begin, x, lambda _: to)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        """A tensor from one rank."""
        return self._receive("recv", _one(tensors, "recv"), source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """A tensor from whichever rank sends first."""
        return self._receive("recvAnySource", _one(tensors, "recv"), ANY, tag)

    def barrier(self, opts: object = None, timeout: timedelta | None = None) -> Work:
        """Wait for all ranks."""
        return self._run("barrier", _options("Barrier", opts, timeout), self._calls.barrier, [], [])

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Wait for all ranks; the error names all that have not come."""
        del wait_all_ranks  # all are named in any case
        options = _options("Barrier", None, timeout)
        self._run("monitored_barrier", options, self._calls.monitored_barrier, [], []).wait()

    # --- coalescing

    def _start_coalescing(self, device: torch.device) -> None:
        del device
        self._since_coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        del device
        works, self._since_coalescing = self._since_coalescing or [], None

        def wait_for_all() -> None:
            for work in works:
                work.wait()

        tensors = [tensor for work in works for tensor in work._tensors]  # noqa: SLF001
        return Work(Line().submit(wait_for_all) if works else _DONE, tensors)

    # --- inside

    def _all_reduce(self, tensors: torch.Tensor | Tensors, options: Any) -> Work:  # noqa: ANN401
        xs = _list(tensors)
        reduction, factor = reduction_of(options.reduceOp)
        found = [Target(x, filled=True) for x in xs]

        def run(seconds: float) -> None:
            values = [target.memory for target in found]
            if factor is not None:
                for each in values:
                    each.mul_(factor)
            tree: Any = values[0] if len(values) == 1 else values
            self._calls.all_reduce(tree, reduction, seconds, out=tree)
            _write(found)

        return self._run("all_reduce", options, run, xs, xs)

    def _reduce_scatter_singles(
        self, name: str, outputs: Tensors, inputs: Tensors, opts: object
    ) -> Work:
        options = _options("ReduceScatter", opts)
        parts: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for out, x in zip(outputs, inputs, strict=True):
            _check_dtype([out], x, "reduce_scatter")
            if out.numel() * self.size() != x.numel():
                raise ValueError(
                    f"reduce_scatter: {x.numel()} values are no {self.size()} times {out.numel()}"
                )
            parts.append((out, pieces(given(x), [out.numel()] * self.size())))
        run = self._reduce_scatter_of(parts, options)
        return self._run(name, options, run, inputs, outputs)

    def _reduce_scatter_of(
        self,
        parts: Sequence[tuple[torch.Tensor, list[torch.Tensor]]],
        options: Any,  # noqa: ANN401 - torch's
    ) -> Callable[[float], None]:
        reduction, factor = reduction_of(options.reduceOp)
        pairs = [(Target(out), xs) for out, xs in parts]

        def run(seconds: float) -> None:
            for target, xs in pairs:
                scaled = xs if factor is None else [x * factor for x in xs]
                own = target.memory.reshape(scaled[self.rank()].shape)
                self._calls.reduce_scatter_into(own, scaled, reduction, seconds)
                target.write()

        return run

    def _all_gather_singles(
        self,
        name: str,
        outputs: Tensors,
        inputs: Tensors,
        opts: object,
        timeout: timedelta | None = None,
    ) -> Work:
        parts: list[tuple[list[Target], torch.Tensor]] = []
        whole: list[Target] = []
        for out, x in zip(outputs, inputs, strict=True):
            _check_dtype([out], x, "all_gather")
            if out.numel() != x.numel() * self.size():
                raise ValueError(
                    f"all_gather: {out.numel()} values are no {self.size()} times {x.numel()}"
                )
            whole.append(Target(out))
            cut = pieces(whole[-1].memory, [x.numel()] * self.size())
            parts.append((targets(cut), given(x)))
        run = self._all_gather_of(parts, whole)
        return self._run(name, _options("Allgather", opts, timeout), run, inputs, outputs)

    def _all_gather_of(
        self, parts: Sequence[tuple[list[Target], torch.Tensor]], whole: Sequence[Target] = ()
    ) -> Callable[[float], None]:
        def run(seconds: float) -> None:
            for found, x in parts:
                self._calls.all_gather_into([target.memory for target in found], x, seconds)
                _write(found)
            _write(whole)

        return run

    def _receive(self, name: str, x: torch.Tensor, source: int, tag: int) -> Work:
        target = Target(x)

        def begin() -> Handle[Any]:
            like = target.memory
            return self._calls.recv(source, tag, self._timeout_s, like=like, async_op=True)

        def take(arrived: torch.Tensor) -> int:
            if (arrived.dtype, arrived.numel()) != (x.dtype, x.numel()):
                raise UsageError(
                    f"what has come is {arrived.dtype} {list(arrived.shape)}, and does not fit "
                    f"into {x.dtype} {list(x.shape)}"
                )
            target.memory.copy_(arrived.reshape(x.shape))
            target.write()
            return source if source != ANY else int(self._calls.last_source or 0)

        return self._message(name, begin, x, take)

    def _message(
        self,
        name: str,
        begin: Callable[[], Handle[T]],
        x: torch.Tensor,
        finish: Callable[[T], int],
    ) -> Work:
        with _shown(name, [x]):
            handle = self._guarded(begin)

        def take(seconds: float | None) -> int:
            return self._guarded(lambda: finish(handle.wait(seconds)))

        return self._note(MessageWork(handle, take, [x]))

    def _run(
        self,
        name: str,
        options: Any,  # noqa: ANN401 - torch's
        run: Callable[[float], None],
        shown: Tensors,
        results: Tensors,
    ) -> Work:
        """Run an op: here if its caller waits for it and none is under way, else in the thread."""
        given_s = options.timeout.total_seconds()
        seconds = given_s if given_s > _UNSET_S else self._timeout_s
        self._sequence += 1
        with _shown(name, shown):
            if not getattr(options, "asyncOp", True) and self._line.idle:
                self._guarded(lambda: run(seconds))
                return Work(_DONE, results)
            done = self._line.submit(lambda: self._guarded(lambda: run(seconds)))
        return self._note(Work(done, results))

    def _note(self, work: Work) -> Work:
        if self._since_coalescing is not None:
            self._since_coalescing.append(work)
        return work

    def _guarded(self, call: Callable[[], T]) -> T:
        """Errors as torch has them, the first loss again for each call after it."""
        if self._lost:
            raise dist.DistBackendError(self._lost)
        try:
            return call()
        except _ENDS as e:
            self._lost = f"{type(e).__name__}: {e}"
            raise dist.DistBackendError(self._lost) from e
        except PmeshError as e:
            raise dist.DistBackendError(f"{type(e).__name__}: {e}") from e


def _shown(name: str, tensors: Tensors) -> AbstractContextManager[object]:
    """The op in what torch.profiler records, with the shapes of its inputs."""
    if not profiler._is_profiler_enabled:  # noqa: SLF001
        return nullcontext()
    shown: AbstractContextManager[object] = _RecordFunctionFast(f"pmesh:{name}", list(tensors))
    return shown


def _options(
    kind: str,
    opts: object,
    timeout: timedelta | None = None,
    named: "dict[str, object] | None" = None,
    root: str = "",
) -> Any:  # noqa: ANN401 - torch's options, which have no common type
    """The options of an op; from the arguments, for who calls the group's short forms."""
    wanted = getattr(dist, f"{kind}Options", None) or getattr(
        dist.distributed_c10d, f"{kind}Options"
    )
    given_options = dict(named or {})
    if isinstance(opts, wanted) and not given_options:
        return opts
    made = opts if isinstance(opts, wanted) else wanted()
    if opts is not None and made is not opts:
        given_options["root" if root and isinstance(opts, int) else "op"] = opts
    if timeout is not None:
        made.timeout = timeout
    for name, value in given_options.items():
        setattr(made, {"op": "reduceOp", "root": "rootRank"}.get(name, name), value)
    return made


def _list(tensors: torch.Tensor | Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _one(tensors: torch.Tensor | Tensors, what: str) -> torch.Tensor:
    found = _list(tensors)
    if len(found) != 1:
        raise ValueError(f"{what} takes one tensor at a time, not {len(found)}")
    return found[0]


def _one_list(lists: Sequence[Any]) -> list[torch.Tensor]:
    """The list of a call for one tensor, which C++ passes as a list of lists."""
    inner = lists[0] if lists else []
    return [*lists] if isinstance(inner, torch.Tensor) else [*inner]


def _check_dtype(outs: Tensors, x: torch.Tensor, what: str) -> None:
    for out in outs:
        if out.dtype != x.dtype:
            raise ValueError(f"{what}: {x.dtype} does not fit into {out.dtype}")


def _check_alike(outs: Tensors, x: torch.Tensor, what: str) -> None:
    _check_dtype(outs, x, what)


def _counts(x: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """How many values each rank's part has."""
    rows = x.shape[0] if x.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(f"all_to_all: {rows} rows can't be split into {size} equal parts")
        return [x.numel() // size] * size
    if sum(splits) != rows or len(splits) != size:
        raise ValueError(f"all_to_all: the parts {list(splits)} are not those of {rows} rows")
    return [split * (x.numel() // rows if rows else 0) for split in splits]


def _write(found: Sequence[Target]) -> None:
    for target in found:
        target.write()
