"""DistributedDataParallel for a job whose ranks come and go; a hook that compresses for torch's."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from pmesh.client.calls.queue import Line
from pmesh.client.collective.bucketed import OnNonfinite
from pmesh.client.collective.guard import check_mode
from pmesh.compression.schemes import Scheme
from pmesh.errors import PmeshError, UsageError
from pmesh.torch.arguments import StagedTensor, one_of
from pmesh.torch.batch_norm import SyncBatchNorm
from pmesh.torch.elastic import current
from pmesh.torch.library import Tensor, dist, torch
from pmesh.torch.process_group import pmesh_group
from pmesh.torch.ranks import Elastic
from pmesh.torch.work import Work

T = TypeVar("T")

_MIB = 1024 * 1024
_BUCKET_MIB = 25  # as in torch
_FIRST_BUCKET_BYTES = _MIB  # as in torch: small, so that the first op begins early
_TAKES = (
    *("device_ids", "output_device", "dim", "bucket_cap_mb", "find_unused_parameters"),
    *("gradient_as_bucket_view", "batched_grad_copy"),
)
_Average = Callable[[dict[str, StagedTensor]], None]


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):  # type: ignore[misc] # torch has no types here
    """A DistributedDataParallel that averages gradients over the ranks that are present.

    It needs `pmesh.torch.init(elastic=True)`. Pass the model to `pmesh.torch.sync` at the top of
    each step, which gives all ranks the same weights and buffers. When a rank is lost in the
    backward pass, the ops continue with the remaining ranks.

    If ranks have batches of different sizes, set `gradient_weight` to this rank's number of samples
    before the backward pass; with 0 this rank's gradients do not count.
    """

    def __init__(
        self,
        module: Any,  # noqa: ANN401 - a torch.nn.Module
        *,
        compression: Scheme | str | None = None,
        on_nonfinite: OnNonfinite = "keep",
        **options: Any,  # noqa: ANN401 - torch's
    ) -> None:
        """Wrap a module.

        Args:
            module: the model, on any device. Ranks may have different values in it, but the same
                parameters.
            compression: as for `mesh.average_gradients`.
            on_nonfinite: as for `mesh.average_gradients`, for each bucket by itself. "keep": the
                optimizer gets NaN. "raise": the backward pass raises on all ranks, and the buckets
                before have their mean already; do not step, and go on with the next one. "skip":
                the optimizer gets, in each bucket, the mean of the ranks whose gradients in that
                bucket are finite; the backward pass raises if there is none.
            options: `device_ids`, `output_device`, `bucket_cap_mb`, `find_unused_parameters` and
                `gradient_as_bucket_view` of torch's DDP.

        Raises:
            UsageError: `init(elastic=True)` was not called, or the model or an option needs a fixed
                number of ranks, or `on_nonfinite` is no such word.
        """
        elastic = current()
        check_mode(on_nonfinite)
        _refuse(module, options)
        number = elastic.number_of_next_model()
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = {
            f"{number}.{name}": parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in ignored
        }
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            module,
            process_group=LocalGroup(elastic),
            init_sync=False,
            **options,
        )
        self.gradient_weight = 1.0
        self._elastic = elastic
        cap_bytes = int((options.get("bucket_cap_mb") or _BUCKET_MIB) * _MIB)
        average = partial(_average, elastic, self, compression, on_nonfinite)
        reducer = Reducer(cut_into_buckets(named, cap_bytes), average, elastic.line)
        name_of = {id(parameter): name for name, parameter in named.items()}

        def hook(state: object, bucket: Any) -> Any:  # noqa: ANN401 - a torch.distributed.GradBucket
            del state
            pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
            # Copied here from a GPU: only this thread's stream has waited for the values.
            found = {name_of[id(p)]: StagedTensor(gradient, filled=True) for p, gradient in pairs}
            done = reducer.add(found)
            return Work(done, [bucket.buffer()]).get_future().then(_flat)

        hook.__annotations__.clear()  # DDP refuses annotations other than its own types
        self.register_comm_hook(None, hook)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the module's
        """Run the module. Raises UsageError if gradients are enabled before the first `sync`."""
        if torch.is_grad_enabled() and self not in self._elastic.synced:
            raise UsageError(
                "this model's weights may differ from those of the other ranks: call "
                "pmesh.torch.sync(model, optimizer) at the top of the training loop"
            )
        inner: Any = super()
        return inner.forward(*inputs, **kwargs)

    def will_sync_module_buffers(self) -> bool:
        """Return False: `pmesh.torch.sync` syncs buffers, not each forward pass."""
        return False

    def join(self, *_: object, **__: object) -> Any:  # noqa: ANN401 - torch's
        """Raise UsageError: a rank without samples sets `gradient_weight` to 0 instead."""
        raise UsageError(
            "join is for a fixed number of ranks: a rank without samples sets "
            "model.gradient_weight = 0, or ends"
        )


class Reducer:
    """Averages the gradients of each backward pass in the same order on every rank.

    DDP makes new buckets after a rank's first backward pass, so a newcomer's buckets differ from
    those of the other ranks. Ops therefore have buckets of their own, which depend only on the
    order of the parameters. An op begins once all gradients of its bucket are ready.
    """

    def __init__(self, buckets: Sequence[Sequence[str]], average: _Average, line: Line) -> None:
        """`line` calls `average` for one bucket after another."""
        self._buckets = buckets
        self._average = average
        self._line = line
        self._bucket_of = {name: i for i, names in enumerate(buckets) for name in names}
        self._begin_pass()

    def add(self, gradients: dict[str, StagedTensor]) -> "Future[None]":
        """Add gradients that are ready. Return a future that is done once they are averaged."""
        self._ready |= gradients
        done = self._done[max(self._bucket_of[name] for name in gradients)]
        while all(name in self._ready for name in self._buckets[self._next]):
            self._begin_op()
            if self._next == len(self._buckets):
                self._begin_pass()
                break
        return done

    def _begin_pass(self) -> None:
        self._ready: dict[str, StagedTensor] = {}
        self._done: list[Future[None]] = [Future() for _ in self._buckets]
        self._next = 0

    def _begin_op(self) -> None:
        bucket = {name: self._ready[name] for name in self._buckets[self._next]}
        before = self._done[self._next - 1] if self._next else None
        self._line.submit(partial(self._run, bucket, before, self._done[self._next]))
        self._next += 1

    def _run(
        self, bucket: dict[str, StagedTensor], before: "Future[None] | None", done: "Future[None]"
    ) -> None:
        try:
            if before is not None:
                before.result()  # it has ended; after an error all ranks skip the remaining buckets
            self._average(bucket)
        except Exception as e:  # noqa: BLE001 - the backward pass raises it
            done.set_exception(e)
        else:
            done.set_result(None)


def cut_into_buckets(named: dict[str, Tensor], cap_bytes: int) -> list[list[str]]:
    """Return a bucket for each op. The last parameters come first, as their gradients do."""
    buckets: list[list[str]] = []
    size, cap = 0, 0
    for name, parameter in reversed(named.items()):
        if not buckets or size >= cap:
            cap = cap_bytes if buckets else min(_FIRST_BUCKET_BYTES, cap_bytes)
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += parameter.numel() * parameter.element_size()
    return buckets


class LocalGroup(dist.ProcessGroup):  # type: ignore[misc] # torch has no types here
    """The group that DDP gets: this rank alone, so that collectives of DDP need no other rank.

    Only one op goes over the mesh: the sum that tells DDP which parameters any rank has used.
    """

    def __init__(self, elastic: Elastic) -> None:
        super().__init__(0, 1)  # pyright: ignore[reportUnknownMemberType]
        self._elastic = elastic

    def getBackendName(self) -> str:  # noqa: N802 - C++ calls this name
        """Return the backend's name."""
        return "pmesh"

    def broadcast(self, tensors: Sequence[Tensor], opts: object) -> Work:
        """Do nothing: the group has one rank."""
        del opts
        done: Future[None] = Future()
        done.set_result(None)
        return Work(done, tensors)

    def allreduce(self, tensors: Sequence[Tensor], opts: object) -> Work:
        """Sum how often each parameter was used on all ranks; DDP calls this for nothing else."""
        del opts
        target = StagedTensor(one_of(tensors, "allreduce"), filled=True)

        def run() -> None:
            _guarded(lambda: self._elastic.mesh.all_reduce(target.memory, "sum", out=target.memory))
            target.write()

        return Work(self._elastic.line.submit(run), tensors)


def compression_hook(
    compression: Scheme | str, group: object = None
) -> Callable[[object, Any], Any]:
    """Return a communication hook for DDP that averages gradients with compression.

    Call `ddp.register_comm_hook(None, pmesh.torch.compression_hook("int8"))`.

    Each bucket is averaged as by `mesh.average_gradients`: what compression leaves out of one step
    is added to the next one, and all ranks get the same bits. DDP makes new buckets after the first
    step; the error feedback then starts again from zero.

    Args:
        compression: `pmesh.INT8()`, `pmesh.PowerSGD(rank=4)`, "int8" and so on. PowerSGD treats
            each parameter of a bucket as one matrix.
        group: the group of the model; None is the default group.

    Raises:
        UsageError: the group has another backend than `pmesh`.
        UnsupportedCompression: raised in the first step; see `mesh.average_gradients`.
    """
    used = pmesh_group(group, "compression_hook")

    def hook(state: object, bucket: Any) -> Any:  # noqa: ANN401 - a torch.distributed.GradBucket
        del state
        flat = bucket.buffer()
        gradients = {f"{bucket.index()}.{i}": g for i, g in enumerate(bucket.gradients())}
        averaged = used.average(flat, gradients, compression)
        return averaged.get_future().then(_flat)

    hook.__annotations__.clear()  # DDP refuses annotations other than its own types
    return hook


def _refuse(module: Any, options: dict[str, Any]) -> None:  # noqa: ANN401 - a torch.nn.Module
    others = [name for name in options if name not in _TAKES]
    if others:
        raise UsageError(
            f"pmesh.torch.DistributedDataParallel takes compression, on_nonfinite, "
            f"{', '.join(_TAKES)}, not {', '.join(others)}"
        )
    synced = torch.nn.SyncBatchNorm, SyncBatchNorm
    if any(isinstance(each, synced) for each in module.modules()):
        raise UsageError(
            "SyncBatchNorm needs a fixed number of ranks: use BatchNorm, or "
            "torch.distributed.init_process_group('pmesh') and torch's own DDP"
        )


def _average(
    elastic: Elastic,
    model: DistributedDataParallel,
    compression: Scheme | str | None,
    on_nonfinite: OnNonfinite,
    gradients: dict[str, StagedTensor],
) -> None:
    tree = {name: target.memory for name, target in gradients.items()}
    weight = model.gradient_weight
    _guarded(
        lambda: elastic.mesh.average_gradients(
            tree, weight, out=tree, compression=compression, on_nonfinite=on_nonfinite
        )
    )
    for target in gradients.values():
        target.write()


def _guarded(call: Callable[[], T]) -> T:
    """Call, and turn errors of pmesh into those of torch."""
    try:
        return call()
    except PmeshError as e:
        raise dist.DistBackendError(f"{type(e).__name__}: {e}") from e


def _flat(future: Any) -> Tensor:  # noqa: ANN401 - a torch.futures.Future
    tensors: list[Tensor] = future.value()
    return tensors[0]
