"""Compressed gradients in DistributedDataParallel: a communication hook."""

from collections.abc import Callable
from typing import Any

from pmesh.compression.schemes import Scheme
from pmesh.torch.library import Tensor
from pmesh.torch.process_group import pmesh_group


def compression_hook(
    compression: Scheme | str, group: object = None
) -> Callable[[object, Any], Any]:
    """Make a hook that compresses what DDP averages.

    It goes to `ddp.register_comm_hook(None, pmesh.torch.compression_hook("int8"))`.

    Each bucket is averaged as `mesh.average_gradients` does it: what compression leaves out of one
    step is added to the next one, and the bits are the same on every rank. DDP lays its buckets
    out anew after the first step, which begins the feedback anew.

    Args:
        compression: `pmesh.INT8()`, `pmesh.PowerSGD(rank=4)`, "int8" and so on; of PowerSGD, each
            parameter of a bucket is a matrix of its own.
        group: that of the model; by default the default one.

    Raises:
        UsageError: the group is none of the backend `pmesh`.
        UnsupportedCompression: at the first step: see `mesh.average_gradients`.
    """
    used = pmesh_group(group, "compression_hook")

    def hook(state: object, bucket: Any) -> Any:  # noqa: ANN401 - a torch.distributed.GradBucket
        del state
        flat = bucket.buffer()
        gradients = {f"{bucket.index()}.{i}": g for i, g in enumerate(bucket.gradients())}
        averaged = used.average(flat, gradients, compression)
        return averaged.get_future().then(_flat)

    hook.__annotations__.clear()  # DDP wants its own types there, or none
    return hook


def _flat(future: Any) -> Tensor:  # noqa: ANN401 - a torch.futures.Future
    tensors: list[Tensor] = future.value()
    return tensors[0]
