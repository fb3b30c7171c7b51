"""Batch normalization over the values of all ranks, on any device."""

from typing import Any

import numpy as np

from pmesh.core.ops.moments import Moments, cut_in_two, merge
from pmesh.errors import UsageError
from pmesh.torch.library import Tensor, dist, torch


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):  # type: ignore[misc] # noqa: SLF001 # torch has no types here
    """A BatchNorm that normalizes by the mean and variance of the batches of all ranks.

    It is torch's own SyncBatchNorm for the CPU and for a Mac's GPU too, where torch's refuses. The
    batches may differ in size, and a rank's may be empty; the result is that of one process with
    the joined batch. All ranks must call it in training, forward and backward, since one op gathers
    the statistics and one adds up the gradients. The running statistics are equal on all ranks. In
    evaluation it needs no other rank.

    Args:
        num_features: the number of channels, C of an input [N, C, ...].
        eps: added to the variance.
        momentum: the weight of the latest batch in the running statistics; None: all count alike.
        affine: learn a scale and an offset for each channel.
        track_running_stats: keep running statistics, for evaluation.
        process_group: the ranks; by default all, if `torch.distributed` is initialized, else this
            process alone.
        options: `device`, `dtype` and `bias`, as torch has them.
    """

    def __init__(  # noqa: PLR0917 - torch's signature
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        track_running_stats: bool = True,  # noqa: FBT001, FBT002 - as above
        process_group: Any = None,  # noqa: ANN401 - a torch.distributed.ProcessGroup
        **options: Any,  # noqa: ANN401 - torch's
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)  # pyright: ignore[reportUnknownMemberType]
        self.process_group = process_group

    @classmethod
    def convert(cls, module: Any, process_group: Any = None) -> Any:  # noqa: ANN401 - torch.nn.Modules
        """Return the module with a SyncBatchNorm in place of each BatchNorm, also of torch's own.

        Parameters, running statistics and mode are kept. The layers of `module` are replaced in
        place; if it is a BatchNorm itself, it stays as it is, and its replacement is returned.

        Args:
            module: a `torch.nn.Module`.
            process_group: as above.
        """
        norm = torch.nn.modules.batchnorm._BatchNorm  # noqa: SLF001
        made: dict[Any, Any] = {}
        for each in list(module.modules()):
            if isinstance(each, norm):
                made[each] = cls._like(each, process_group)
        for parent in list(module.modules()):
            for name, child in parent._modules.items():  # noqa: SLF001 - lists shared layers twice
                if child in made:
                    setattr(parent, name, made[child])
        return made.get(module, module)

    @classmethod
    def _like(cls, norm: Any, process_group: Any) -> "SyncBatchNorm":  # noqa: ANN401 - as above
        made = cls(
            norm.num_features,
            norm.eps,
            norm.momentum,
            norm.affine,
            norm.track_running_stats,
            process_group,
        )
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(made, name, getattr(norm, name))
        made.train(norm.training)
        return made

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - tensors
        """Normalize.

        Args:
            x: [N, C, ...], floating point; N may differ between ranks.

        Returns:
            A tensor of the same shape and dtype.

        Raises:
            UsageError: all ranks together have fewer than two values per channel.
        """
        self._check_input_dim(x)
        if not self.training:
            inner: Any = super()
            return inner.forward(x)
        shape = (1, -1, *[1] * (x.dim() - 2))
        wide = x if x.dtype == torch.float64 else x.float()
        group = self._group()
        whole = _gathered(_moments_of(wide.detach()), group)
        if self.track_running_stats:
            self._track(whole)
        normal = _Normalize.apply(wide, whole, self.eps, group)
        if self.weight is not None:
            normal = normal * self.weight.view(shape)
        if self.bias is not None:
            normal = normal + self.bias.view(shape)
        return normal.to(x.dtype)

    def _check_input_dim(self, input: Any) -> None:  # noqa: A002, ANN401 - torch's name
        if input.dim() < 2 or input.shape[1] != self.num_features:  # noqa: PLR2004 - [N, C, ...]
            raise UsageError(
                f"this SyncBatchNorm takes [N, {self.num_features}, ...], not {list(input.shape)}"
            )

    def _group(self) -> Any:  # noqa: ANN401 - a torch.distributed.ProcessGroup
        """Return the group, or None if this process is alone."""
        group = self.process_group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        return group if group is not None and group.size() > 1 else None

    def _track(self, whole: Moments) -> None:
        self.num_batches_tracked.add_(1)
        latest = self.momentum
        if latest is None:  # all batches count alike
            latest = 1 / int(self.num_batches_tracked)
        with torch.no_grad():
            for kept, value in (
                (self.running_mean, whole.mean),
                (self.running_var, whole.sample_variance),
            ):
                fresh = torch.from_numpy(value.copy()).to(kept.dtype).to(kept.device)
                kept.mul_(1 - latest).add_(fresh * latest)


class _Normalize(torch.autograd.Function):  # type: ignore[misc] # torch has no types here
    """(x - mean) / sqrt(variance + eps), where both depend on the values of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Moments, eps: float, group: Any) -> Tensor:  # noqa: ANN401 - torch's
        shape = (1, -1, *[1] * (x.dim() - 2))
        dtype = np.float64 if x.dtype == torch.float64 else np.float32
        inverse = (1 / np.sqrt(whole.variance + eps)).astype(dtype)
        high, low, scale = (
            torch.from_numpy(each).to(x.device).view(shape)
            for each in (*cut_in_two(whole.mean, dtype), inverse)
        )
        normal = ((x - high) - low) * scale
        ctx.save_for_backward(normal, scale)
        ctx.count, ctx.group = whole.count, group
        return normal

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator] # as above
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401 - torch's
        """Return the gradient for x: the mean and the variance depend on x, on all ranks."""
        normal, scale = ctx.saved_tensors
        dims = _all_but_channels(gradient)
        sums = torch.stack([gradient.sum(dims), (gradient * normal).sum(dims)])
        total = sums.cpu().double()
        if ctx.group is not None:
            dist.all_reduce(total, group=ctx.group)
        mean, along = (total / ctx.count).to(sums.dtype).to(sums.device).view(2, *scale.shape)
        return (gradient - mean - normal * along) * scale, None, None, None


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _moments_of(x: Tensor) -> Moments:
    """Return this rank's moments; the deviations are of small numbers, so they lose no digits."""
    channels = x.shape[1]
    if not x.numel():
        return Moments.of_none(channels)
    dims = _all_but_channels(x)
    about = x.mean(dims, keepdim=True)
    apart = x - about
    rest = apart.mean(dims, keepdim=True)
    deviation = (apart - rest).square().sum(dims)
    found = torch.stack([about.view(-1), rest.view(-1), deviation]).cpu().double().numpy()
    return Moments(x.numel() // channels, found[0] + found[1], found[2])


def _gathered(own: Moments, group: Any) -> Moments:  # noqa: ANN401 - a torch.distributed.ProcessGroup
    whole = own
    if group is not None:
        row = torch.from_numpy(own.row)
        rows = [torch.empty_like(row) for _ in range(group.size())]
        dist.all_gather(rows, row, group=group)
        whole = merge(Moments.of_row(each.numpy()) for each in rows)
    if whole.count < 2:  # noqa: PLR2004 - one value has no variance
        raise UsageError(
            "SyncBatchNorm needs at least two values per channel on all ranks together, not "
            f"{whole.count}"
        )
    return whole
