"""The functions of `mx.distributed`, which run at once, and their gradients.

A transformation of MLX would take a result that is computed at once for a constant. So each op is
an `mx.custom_function` with the vjp and the jvp that MLX defines for it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias, cast

import mlx.core as mx
import numpy as np

from pmesh.client.collective.bucketed import OnNonfinite, take_apart
from pmesh.client.collective.guard import check_mode, culprits_of, given_by
from pmesh.client.trees.arrays import flatten
from pmesh.errors import UsageError
from pmesh.mlx.groups import Group, NativeGroup, init

AnyGroup: TypeAlias = Group | NativeGroup
Stream: TypeAlias = Any  # MLX's Stream, Device, DeviceType or None; ignored here
Eager: TypeAlias = Callable[[Any], Any]
Scalar: TypeAlias = bool | int | float | complex

_native = {
    name: getattr(mx.distributed, name)
    for name in ("all_sum", "all_max", "all_min", "all_gather", "sum_scatter", "send", "recv")
}
_BUCKET_BYTES = 32 * 1024 * 1024  # as in MLX

calls = [0]
"""The number of ops that this process has run; a compiled function must not run any."""


def all_sum(
    x: mx.array | Scalar, *, group: AnyGroup | None = None, stream: Stream = None
) -> mx.array:
    """Return the sum of all ranks' arrays; of bools, True where any is true. Arguments: see MLX."""
    return _reduced("all_sum", "sum", x, group, stream)


def all_max(
    x: mx.array | Scalar, *, group: AnyGroup | None = None, stream: Stream = None
) -> mx.array:
    """Return the elementwise maximum of all ranks' arrays."""
    return _reduced("all_max", "max", x, group, stream)


def all_min(
    x: mx.array | Scalar, *, group: AnyGroup | None = None, stream: Stream = None
) -> mx.array:
    """Return the elementwise minimum of all ranks' arrays."""
    return _reduced("all_min", "min", x, group, stream)


def all_gather(
    x: mx.array | Scalar, *, group: AnyGroup | None = None, stream: Stream = None
) -> mx.array:
    """Return the rows of all ranks in the order of ranks. Raises RankLost once a rank is lost."""
    among = group or init()
    array = _array(x)
    if not isinstance(among, Group):
        return cast("mx.array", _native["all_gather"](array, group=among, stream=stream))
    if among.size() == 1:
        return array
    return cast("mx.array", _function(among, "all_gather", _make_gather)(array))


def sum_scatter(
    x: mx.array | Scalar, *, group: AnyGroup | None = None, stream: Stream = None
) -> mx.array:
    """Return this rank's rows of the sum of all ranks' arrays.

    Raises:
        ValueError: the number of rows is not a multiple of the number of ranks.
        RankLost: a rank is lost.
    """
    among = group or init()
    array = _array(x)
    if not isinstance(among, Group):
        return cast("mx.array", _native["sum_scatter"](array, group=among, stream=stream))
    if among.size() == 1:
        return array
    if array.ndim == 0 or array.shape[0] % among.size():
        raise ValueError(
            f"[sum_scatter] the first dimension of an array of shape {array.shape} can't be "
            f"divided among {among.size()} ranks"
        )
    return cast("mx.array", _function(among, "sum_scatter", _make_scatter)(array))


def send(
    x: mx.array | Scalar, dst: int, *, group: AnyGroup | None = None, stream: Stream = None
) -> mx.array:
    """Send an array to one rank; return the array without waiting for the receiver.

    Raises:
        ValueError: there is no such rank, or the group has only one rank.
        RankLost: the receiver of this or of an earlier message is lost.
    """
    among = group or init()
    array = _array(x)
    if not isinstance(among, Group):
        return cast("mx.array", _native["send"](array, dst, group=among, stream=stream))
    _check_peer(among, dst, "send to", "destination")
    sent = _function(among, f"send {dst}", partial(_make_send, dst=dst))(array)
    return cast("mx.array", sent)


def recv(
    shape: Sequence[int],
    dtype: mx.Dtype,
    src: int,
    *,
    group: AnyGroup | None = None,
    stream: Stream = None,
) -> mx.array:
    """Wait for an array of this shape and dtype from one rank, and return it.

    Raises:
        ValueError: there is no such rank, or the group has only one rank.
        UsageError: the array that arrived has another shape or dtype.
        RankLost: the sender is lost.
    """
    among = group or init()
    if not isinstance(among, Group):
        return cast("mx.array", _native["recv"](shape, dtype, src, group=among, stream=stream))
    _check_peer(among, src, "recv from", "source")
    _count()
    source, like = among.place_of(src), mx.zeros((), dtype)
    came = cast("mx.array", among.run(lambda mesh: mesh.recv(source, like=like)))
    if (came.shape, came.dtype) != (tuple(shape), dtype):
        raise UsageError(
            f"rank {src} has sent {came.dtype} of shape {came.shape}, not {dtype} of {tuple(shape)}"
        )
    return came


def recv_like(
    x: mx.array, src: int, *, group: AnyGroup | None = None, stream: Stream = None
) -> mx.array:
    """Receive an array of the shape and dtype of `x` from one rank; see `recv`."""
    return recv(x.shape, x.dtype, src, group=group, stream=stream)


def average_gradients(
    gradients: Any,  # noqa: ANN401 - a tree
    group: AnyGroup | None = None,
    all_reduce_size: int = _BUCKET_BYTES,
    communication_stream: Stream = None,
    *,
    on_nonfinite: OnNonfinite = "keep",
) -> Any:  # noqa: ANN401 - a tree like it
    """Return the mean of the remaining ranks' gradients; see `Mesh.average_gradients`.

    Args:
        gradients: a tree. Pass it unevaluated: then it is computed while parts of it travel.
        group: the group of ranks; None is the global group.
        all_reduce_size: the most bytes in one op; with 0 or less each array is an op of its own.
        communication_stream: ignored, except by a group that MLX made.
        on_nonfinite: as for `Mesh.average_gradients`; MLX's own function does not have it.

    Raises:
        UsageError: `on_nonfinite` is not "keep", and MLX made the group, or a gradient has whole
            numbers.
        NonFiniteGradients: as `on_nonfinite` says.
    """
    check_mode(on_nonfinite)
    among, guarded = group or init(), on_nonfinite != "keep"
    if not isinstance(among, Group):
        if guarded:
            raise UsageError("on_nonfinite needs a group of pmesh, and MLX made this one")
        present = import_module("mlx.nn.utils").average_gradients
        native = getattr(present, "__wrapped__", present)  # it may be ours, which wraps it
        return native(gradients, among, all_reduce_size, communication_stream)
    arrays = flatten(gradients).leaves
    inexact = all(_is_inexact(x) for x in arrays)
    if guarded and not inexact:
        raise UsageError("on_nonfinite is for gradients of floating-point numbers only")
    if among.size() == 1:
        if guarded:
            given = given_by(take_apart(gradients, reduction="mean"), None)
            culprits_of([given], ["this machine"], on_nonfinite)
        return gradients
    if not inexact:
        each = partial(all_sum, group=among)
        tree = flatten(gradients)
        return tree.rebuild([each(cast("mx.array", x)) / among.size() for x in tree.leaves])
    make = partial(_make_average, bucket_bytes=max(1, all_reduce_size), on_nonfinite=on_nonfinite)
    if not arrays:  # MLX crashes in a custom function without arrays
        return make(among)[0](gradients)
    return _function(among, f"average {all_reduce_size} {on_nonfinite}", make)(gradients)


def _is_inexact(x: object) -> bool:
    return isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.inexact)


def _array(x: mx.array | Scalar) -> mx.array:
    return x if isinstance(x, mx.array) else mx.array(x)


def _check_peer(group: Group, rank: int, what: str, name: str) -> None:
    if group.size() == 1:
        raise ValueError(f"Cannot {what} a singleton group")
    if not 0 <= rank < group.size():
        raise ValueError(f"Invalid {name}={rank} for a group of size {group.size()}")


def _count() -> None:
    calls[0] += 1


def _reduced(
    name: str, reduction: str, x: mx.array | Scalar, group: AnyGroup | None, stream: Stream
) -> mx.array:
    among = group or init()
    array = _array(x)
    if not isinstance(among, Group):
        return cast("mx.array", _native[name](array, group=among, stream=stream))
    if among.size() == 1:
        return array
    reduced = _function(among, name, partial(_make_reduce, reduction=reduction))(array)
    return cast("mx.array", reduced)


def _function(
    group: Group, name: str, make: Callable[[Group], tuple[Eager, Callable[..., Any], Eager]]
) -> Eager:
    """Return the group's differentiable function of that name; make it if there is none."""
    made = group.functions.get(name)
    if made is None:
        forward, vjp, jvp = make(group)

        def filled_jvp(primals: object, tangents: object) -> object:
            return jvp(_filled(primals, tangents))

        custom: Any = mx.custom_function(partial(_run_now, name, forward))
        custom.vjp(vjp)
        custom.jvp(filled_jvp)
        custom.vmap(partial(_refuse_vmap, name))
        made = group.functions[name] = cast("Eager", custom)
    return made


def _filled(primals: object, tangents: object) -> object:
    """Return the tangents, with zeros for arrays that have none."""
    tree = flatten(tangents, with_none=True)
    pairs = zip(flatten(primals).leaves, tree.leaves, strict=True)
    return tree.rebuild([mx.zeros_like(cast("mx.array", x)) if t is None else t for x, t in pairs])


def _run_now(name: str, forward: Eager, x: Any) -> Any:  # noqa: ANN401 - an array or a tree
    _count()
    try:
        return forward(x)
    except (RuntimeError, ValueError) as e:
        if "transformations like compile or vmap" not in str(e):
            raise
        raise UsageError(
            f"{name} waits for the network at once, which a function inside mx.compile or mx.vmap "
            "can't: compile what comes before and after it"
        ) from None


def _refuse_vmap(name: str, *_: object) -> None:
    raise UsageError(f"{name} can't be vectorized by mx.vmap: call it outside, for all at once")


def _make_reduce(group: Group, reduction: str) -> tuple[Eager, Callable[..., Any], Eager]:
    def forward(x: mx.array) -> mx.array:
        return cast("mx.array", group.run(lambda mesh: mesh.all_reduce(x, reduction)))

    return forward, _pass_on, forward


def _pass_on(_: object, cotangent: mx.array, __: object) -> mx.array:
    return cotangent


def _make_gather(group: Group) -> tuple[Eager, Callable[..., Any], Eager]:
    def forward(x: mx.array) -> mx.array:
        return _gathered(group, x)

    def vjp(x: mx.array, cotangent: mx.array, _: object) -> mx.array:
        rows = x.shape[0] if x.ndim else 1
        own = cotangent[group.rank() * rows : (group.rank() + 1) * rows]
        return own if x.ndim else own.squeeze(0)

    return forward, vjp, forward


def _gathered(group: Group, x: mx.array) -> mx.array:
    group.check_complete("all_gather")
    # MLX requires the same shape on all ranks, so this needs one op; mesh.all_gather needs two.
    gathered = np.empty((group.size(), x.nbytes), np.uint8)
    group.run(lambda mesh: mesh.all_gather_into(list(gathered), x))
    rows = (group.size() * x.shape[0], *x.shape[1:]) if x.ndim else (group.size(),)
    flat: Any = mx.array(gathered.reshape(-1))
    return cast("mx.array", flat.view(x.dtype).reshape(rows))


def _make_scatter(group: Group) -> tuple[Eager, Callable[..., Any], Eager]:
    def forward(x: mx.array) -> mx.array:
        group.check_complete("sum_scatter")
        return cast("mx.array", group.run(lambda mesh: mesh.reduce_scatter(x)))

    def vjp(_: object, cotangent: mx.array, __: object) -> mx.array:
        return _gathered(group, cotangent)

    return forward, vjp, forward


def _make_send(group: Group, dst: int) -> tuple[Eager, Callable[..., Any], Eager]:
    def forward(x: mx.array) -> mx.array:
        to = group.place_of(dst)
        group.note_sending(group.run(lambda mesh: mesh.send(x, to, async_op=True)))
        return x

    def refuse(*_: object) -> None:
        raise ValueError("send has no gradient, as in MLX")

    return forward, refuse, refuse


def _make_average(
    group: Group, bucket_bytes: int, on_nonfinite: OnNonfinite
) -> tuple[Eager, Callable[..., Any], Eager]:
    def forward(tree: object) -> object:
        return group.run(
            lambda mesh: mesh.average_gradients(
                tree,
                bucket_bytes=bucket_bytes,
                compression=group.compression,
                on_nonfinite=on_nonfinite,
            )
        )

    def vjp(_: object, cotangents: object, __: object) -> object:
        tree = flatten(cotangents)
        return tree.rebuild([cast("mx.array", x) / group.size() for x in tree.leaves])

    return forward, vjp, forward
