"""torch's DistributedDataParallel where ranks come and go."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from pmesh.client.calls.queue import Line
from pmesh.compression.schemes import Scheme
from pmesh.errors import PmeshError, UsageError
from pmesh.torch.arguments import one_of
from pmesh.torch.elastic import current
from pmesh.torch.library import Tensor, dist, torch
from pmesh.torch.ranks import Elastic
from pmesh.torch.staging import Target
from pmesh.torch.work import Work

T = TypeVar("T")

_MIB = 1024 * 1024
_BUCKET_MIB = 25  # as in torch
_FIRST_BUCKET_BYTES = _MIB  # as in torch: a small one, so that the first op begins early
_TAKES = (
    *("device_ids", "output_device", "dim", "bucket_cap_mb", "find_unused_parameters"),
    *("gradient_as_bucket_view", "batched_grad_copy"),
)
_Average = Callable[[dict[str, Target]], None]


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):  # type: ignore[misc] # torch has no types here
    """DDP whose gradients are averaged among the ranks that are there.

    It is for programs that have called `pmesh.torch.init(elastic=True)`. Pass the model to
    `pmesh.torch.sync` at the top of each step: this brings weights and buffers to all ranks. When a
    rank is lost in the backward pass, the ops go on among the others.

    Set `gradient_weight` to this rank's number of samples before the backward pass where ranks have
    batches of different sizes; with 0 this rank's gradients do not count.
    """

    def __init__(
        self,
        module: Any,  # noqa: ANN401 - a torch.nn.Module
        *,
        compression: Scheme | str | None = None,
        **options: Any,  # noqa: ANN401 - torch's
    ) -> None:
        """Wrap a module.

        Args:
            module: the model, on any device, the same on every rank but for its values.
            compression: as for `mesh.average_gradients`.
            options: `device_ids`, `output_device`, `bucket_cap_mb`, `find_unused_parameters` and
                `gradient_as_bucket_view`, as torch's DDP has them.

        Raises:
            UsageError: no elastic job has begun, or the model or an option needs a fixed number of
                ranks.
        """
        elastic = current()
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
        average = partial(_average, elastic, self, compression)
        gradients = Gradients(cut_into_buckets(named, cap_bytes), average, elastic.line)
        name_of = {id(parameter): name for name, parameter in named.items()}

        def hook(state: object, bucket: Any) -> Any:  # noqa: ANN401 - a torch.distributed.GradBucket
            del state
            pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
            # What is on a GPU is copied here: only this thread's stream has waited for it.
            found = {name_of[id(p)]: Target(gradient, filled=True) for p, gradient in pairs}
            done = gradients.add(found)
            return Work(done, [bucket.buffer()]).get_future().then(_flat)

        hook.__annotations__.clear()  # DDP wants its own types there, or none
        self.register_comm_hook(None, hook)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the module's
        """As torch's; UsageError for a model that no `sync` has got yet."""
        if torch.is_grad_enabled() and self not in self._elastic.synced:
            raise UsageError(
                "this model's weights may differ from those of the other ranks: call "
                "pmesh.torch.sync(model, optimizer) at the top of the training loop"
            )
        inner: Any = super()
        return inner.forward(*inputs, **kwargs)

    def will_sync_module_buffers(self) -> bool:
        """Not in each forward pass: `pmesh.torch.sync` does."""
        return False

    def join(self, *_: object, **__: object) -> Any:  # noqa: ANN401 - torch's
        """Not here: a rank that has no samples left sets `gradient_weight` to 0."""
        raise UsageError(
            "join is for a fixed number of ranks: a rank without samples sets "
            "model.gradient_weight = 0, or ends"
        )


class Gradients:
    """The gradients of each backward pass, averaged in the same order on every rank.

    DDP lays out its buckets anew after a rank's first backward pass, so those of a newcomer are
    others than those of the ranks that were there. So what is averaged as one op is fixed by the
    order of the parameters alone, and begins once the gradients of all of them are there.
    """

    def __init__(self, buckets: Sequence[Sequence[str]], average: _Average, line: Line) -> None:
        """`average` is called in `line`, for one bucket after the other."""
        self._buckets = buckets
        self._average = average
        self._line = line
        self._bucket_of = {name: i for i, names in enumerate(buckets) for name in names}
        self._begin_pass()

    def add(self, gradients: dict[str, Target]) -> "Future[None]":
        """Take some that are ready; the future is done when they have been averaged."""
        self._ready |= gradients
        done = self._done[max(self._bucket_of[name] for name in gradients)]
        while all(name in self._ready for name in self._buckets[self._next]):
            self._begin_op()
            if self._next == len(self._buckets):
                self._begin_pass()
                break
        return done

    def _begin_pass(self) -> None:
        self._ready: dict[str, Target] = {}
        self._done: list[Future[None]] = [Future() for _ in self._buckets]
        self._next = 0

    def _begin_op(self) -> None:
        bucket = {name: self._ready[name] for name in self._buckets[self._next]}
        before = self._done[self._next - 1] if self._next else None
        self._line.submit(partial(self._run, bucket, before, self._done[self._next]))
        self._next += 1

    def _run(
        self, bucket: dict[str, Target], before: "Future[None] | None", done: "Future[None]"
    ) -> None:
        try:
            if before is not None:
                before.result()  # it has ended; after an error all ranks leave the rest out
            self._average(bucket)
        except Exception as e:  # noqa: BLE001 - the backward pass raises it
            done.set_exception(e)
        else:
            done.set_result(None)


def cut_into_buckets(named: dict[str, Tensor], cap_bytes: int) -> list[list[str]]:
    """Which gradients are averaged as one op; the last parameters, whose come first, first."""
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
    """What DDP takes for its group: of this rank alone, so that its collectives need nobody else.

    The exception is the sum by which DDP learns which parameters any rank has used.
    """

    def __init__(self, elastic: Elastic) -> None:
        super().__init__(0, 1)  # pyright: ignore[reportUnknownMemberType]
        self._elastic = elastic

    def getBackendName(self) -> str:  # noqa: N802 - what C++ calls
        """The backend's name."""
        return "pmesh"

    def broadcast(self, tensors: Sequence[Tensor], opts: object) -> Work:
        """What one rank has is what all have."""
        del opts
        done: Future[None] = Future()
        done.set_result(None)
        return Work(done, tensors)

    def allreduce(self, tensors: Sequence[Tensor], opts: object) -> Work:
        """How often each parameter was used, over all ranks; DDP asks nothing else of it."""
        del opts
        target = Target(one_of(tensors, "allreduce"), filled=True)

        def run() -> None:
            _guarded(lambda: self._elastic.mesh.all_reduce(target.memory, "sum", out=target.memory))
            target.write()

        return Work(self._elastic.line.submit(run), tensors)


def _refuse(module: Any, options: dict[str, Any]) -> None:  # noqa: ANN401 - a torch.nn.Module
    others = [name for name in options if name not in _TAKES]
    if others:
        raise UsageError(
            f"pmesh.torch.DistributedDataParallel takes compression, {', '.join(_TAKES)}, "
            f"not {', '.join(others)}"
        )
    if any(isinstance(each, torch.nn.SyncBatchNorm) for each in module.modules()):
        raise UsageError(
            "SyncBatchNorm needs a fixed number of ranks: use BatchNorm, or "
            "torch.distributed.init_process_group('pmesh') and torch's own DDP"
        )


def _average(
    elastic: Elastic,
    model: DistributedDataParallel,
    compression: Scheme | str | None,
    gradients: dict[str, Target],
) -> None:
    tree = {name: target.memory for name, target in gradients.items()}
    weight = model.gradient_weight
    _guarded(
        lambda: elastic.mesh.average_gradients(tree, weight, out=tree, compression=compression)
    )
    for target in gradients.values():
        target.write()


def _guarded(call: Callable[[], T]) -> T:
    """Errors as torch has them."""
    try:
        return call()
    except PmeshError as e:
        raise dist.DistBackendError(f"{type(e).__name__}: {e}") from e


def _flat(future: Any) -> Tensor:  # noqa: ANN401 - a torch.futures.Future
    tensors: list[Tensor] = future.value()
    return tensors[0]
