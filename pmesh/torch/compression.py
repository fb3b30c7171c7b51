"""A communication hook that compresses the gradients of DistributedDataParallel."""

from collections.abc import Callable
from typing import Any

from pmesh.compression.schemes import Scheme
from pmesh.torch.library import Tensor
from pmesh.torch.process_group import pmesh_group


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


def _flat(future: Any) -> Tensor:  # noqa: ANN401 - a torch.futures.Future
    tensors: list[Tensor] = future.value()
    return tensors[0]
