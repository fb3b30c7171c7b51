"""Batch normalization over the values of all ranks."""

import importlib
import math
from collections.abc import Callable
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np

from pmesh.client.calls.queue import check_timeout
from pmesh.client.calls.reducing import DEFAULT_TIMEOUT_S
from pmesh.client.group import Collectives
from pmesh.client.trees.mlx import evaluate
from pmesh.core.ops.moments import Doubles, Moments, cut_in_two, merge
from pmesh.errors import RosterChanged, UsageError

nn: Any = importlib.import_module("mlx.nn")  # it has no types
utils: Any = importlib.import_module("mlx.utils")


class SyncBatchNorm(nn.BatchNorm):  # type: ignore[misc] # MLX's modules have no types
    """A BatchNorm that normalizes by the mean and variance of the batches of all ranks.

    The batches may differ in size, and a rank's may be empty; the result is that of one process
    with the joined batch. All ranks must call it in training, forward and backward, since one op
    gathers the statistics and one adds up the gradients. The running statistics are equal on all
    ranks. In evaluation it needs no other rank.

    It evaluates its input, so it does not work within `mx.compile`. If a rank is lost in the
    forward pass, the statistics are those of the ranks that are left.

    Args:
        num_features: the number of channels, the last dimension of the input.
        mesh: this rank's mesh, or a group.
        eps: added to the variance.
        momentum: the weight of the latest batch in the running statistics.
        affine: learn a scale and an offset for each channel.
        track_running_stats: keep running statistics, for evaluation.
        timeout_s: the timeout of each op, in seconds.
    """

    def __init__(
        self,
        num_features: int,
        mesh: Collectives,
        *,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)  # pyright: ignore[reportUnknownMemberType]
        self._mesh = mesh
        self._timeout_s = check_timeout(timeout_s)

    @classmethod
    def convert(cls, module: Any, mesh: Collectives) -> Any:  # noqa: ANN401 - MLX's modules
        """Return the module with a SyncBatchNorm in place of each BatchNorm.

        Parameters, running statistics and mode are kept. The layers of `module` are replaced in
        place; if it is a BatchNorm itself, it stays as it is, and its replacement is returned.

        Args:
            module: an `mlx.nn.Module`.
            mesh: as above.
        """
        found = {path: m for path, m in module.named_modules() if isinstance(m, nn.BatchNorm)}
        made = {id(norm): cls._like(norm, mesh) for norm in found.values()}
        if "" in found:
            return made[id(module)]
        layers = [(path, made[id(norm)]) for path, norm in found.items()]
        module.update_modules(utils.tree_unflatten(layers))
        return module

    @classmethod
    def _like(cls, norm: Any, mesh: Collectives) -> "SyncBatchNorm":  # noqa: ANN401 - as above
        made = cls(
            norm.num_features,
            mesh,
            eps=norm.eps,
            momentum=norm.momentum,
            affine="weight" in norm,
            track_running_stats=norm.track_running_stats,
        )
        made.update(norm.parameters())
        trained = norm.trainable_parameters()
        made.freeze(recurse=False, keys=[key for key in norm.parameters() if key not in trained])
        made.train(norm.training)
        return made

    def __call__(self, x: mx.array) -> mx.array:
        """Normalize.

        Args:
            x: [N, ..., C], floating point, of 2 to 4 dimensions; N may differ between ranks.

        Returns:
            An array of the same shape and dtype.

        Raises:
            UsageError: another shape, or all ranks together have fewer than two values per channel.
            PmeshError: as for `all_gather`, but never RosterChanged.
        """
        if not 2 <= x.ndim <= 4 or x.shape[-1] != self.num_features:  # noqa: PLR2004 - as MLX's
            raise UsageError(
                f"this SyncBatchNorm takes [N, ..., {self.num_features}] of 2 to 4 dimensions, not "
                f"{list(x.shape)}"
            )
        if not self.training:
            normal = cast("mx.array", super().__call__(x))  # pyright: ignore[reportUnknownMemberType]
            return normal.astype(x.dtype)
        wide = x.astype(mx.float32)
        whole = self._gathered(_moments_of(mx.stop_gradient(wide)))
        if self.track_running_stats:
            self._track(whole)
        normal = _normalize(wide, whole, self.eps, self._added)
        if "weight" in self:
            normal = self.weight * normal + self.bias
        return normal.astype(x.dtype)

    def _gathered(self, own: Moments) -> Moments:
        row, rows = own.row, list[Doubles]()
        while not rows:
            rows = [np.empty_like(row) for _ in range(self._mesh.size)]
            try:
                self._mesh.all_gather_into(rows, row, self._timeout_s)  # one op: all know the sizes
            except RosterChanged:
                rows = []  # on all ranks alike: then the statistics of those that are left
        whole = merge(Moments.of_row(each) for each in rows)
        if whole.count < 2:  # noqa: PLR2004 - one value has no variance
            raise UsageError(
                "SyncBatchNorm needs at least two values per channel on all ranks together, not "
                f"{whole.count}"
            )
        return whole

    def _added(self, sums: Doubles) -> Doubles:
        return self._mesh.all_reduce(sums, "sum", self._timeout_s)

    def _track(self, whole: Moments) -> None:
        latest, kept = self.momentum, 1 - self.momentum
        for name, value in (
            ("running_mean", whole.mean),
            ("running_var", whole.sample_variance),
        ):
            fresh, before = mx.array(value.astype(np.float32)), getattr(self, name)
            setattr(self, name, (kept * before + latest * fresh).astype(before.dtype))


class _CustomFunction(Protocol):
    """`mx.custom_function`, which has no types."""

    def __call__(self, x: mx.array) -> mx.array: ...

    def vjp(self, f: Callable[[mx.array, mx.array, mx.array], mx.array]) -> object: ...


def _normalize(
    x: mx.array, whole: Moments, eps: float, added: Callable[[Doubles], Doubles]
) -> mx.array:
    """Return (x - mean) / sqrt(variance + eps), where both depend on the values of all ranks."""
    high, low = (mx.array(part) for part in cut_in_two(whole.mean, np.float32))
    scale = mx.array((1 / np.sqrt(whole.variance + eps)).astype(np.float32))
    function: Any = mx.custom_function

    def normalize(x: mx.array) -> mx.array:
        return ((x - high) - low) * scale

    def gradient_of(_: mx.array, gradient: mx.array, normal: mx.array) -> mx.array:
        axes = tuple(range(gradient.ndim - 1))
        sums = mx.stack([gradient.sum(axes), (gradient * normal).sum(axes)])
        evaluate([sums])
        means = added(np.array(sums).astype(np.float64)) / whole.count
        mean, along = (mx.array(each) for each in means.astype(np.float32))
        return (gradient - mean - normal * along) * scale

    made = cast("_CustomFunction", function(normalize))
    made.vjp(gradient_of)
    return made(x)


def _moments_of(x: mx.array) -> Moments:
    """Return this rank's moments; the deviations are of small numbers, so they lose no digits."""
    channels = x.shape[-1]
    if not x.size:
        return Moments.of_none(channels)
    axes = tuple(range(x.ndim - 1))
    about = x.mean(axes)
    apart = x - about
    rest = apart.mean(axes)
    deviation = mx.square(apart - rest).sum(axes)
    evaluate([about, rest, deviation])
    mean, more, squares = (np.array(each).astype(np.float64) for each in (about, rest, deviation))
    return Moments(math.prod(x.shape[:-1]), mean + more, squares)
