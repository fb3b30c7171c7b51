# ruff: noqa: ANN401 - MLX's functions and modules have no types here
"""One rank that calls each function of `mx.distributed`, MLX's own or ours, and prints the results.

python -m tests.e2e.mlx_cases [native]
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

CASES = "cases "
"""What the line with the results begins with."""

INTEGERS = ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
DTYPES = ["bool_", *INTEGERS, "float16", "bfloat16", "float32", "float64", "complex64"]


def shown(x: Any) -> Any:
    """An array with its dtype, shape and values, as JSON has them."""
    if isinstance(x, mx.array):
        values = np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)
        return [str(x.dtype), list(x.shape), values.tobytes().hex()]
    if isinstance(x, dict | list | tuple):
        return [[key, shown(value)] for key, value in tree_flatten(x)]
    return x


def cases(dist: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each thing that is compared, by name; all ranks run them in the same order."""
    group = dist.init()
    rank, size = group.rank(), group.size()
    yield "rank and size", lambda: [rank, size]
    for name in DTYPES:
        yield from functions(dist, name, rank, size)
    x = mx.array([0.5, -1.25, 3.0]) * (rank + 1)
    w = mx.array([[2.0, 3.0, 5.0]] * size).reshape(-1)
    for name in ("all_sum", "all_max", "all_min", "all_gather", "sum_scatter"):
        rows = mx.arange(2.0 * size) * (rank + 1) if name == "sum_scatter" else x
        yield from transformations(name, getattr(dist, name), rows, w)
    yield "vmap all_sum", lambda: mx.vmap(dist.all_sum)(mx.ones((2, 3)))
    for name, bad in {
        "sum_scatter of odd rows": lambda: dist.sum_scatter(mx.ones(2 * size + 1)),
        "send to nobody": lambda: dist.send(x, size),
        "recv from nobody": lambda: dist.recv((1,), mx.float32, -1),
    }.items():
        yield name, bad
    yield "of a number", lambda: [dist.all_sum(2), dist.all_sum(0.5), dist.all_gather(True)]  # noqa: FBT003
    yield "empty", lambda: [dist.all_sum(mx.zeros((0, 3))), dist.all_gather(mx.zeros((0, 3)))]
    yield "unevaluated", partial(out_of_order, dist, rank)
    yield "checkpoint", lambda: mx.grad(lambda x: mx.checkpoint(dist.all_sum)(x * x).sum())(x)
    yield from averages(rank)
    yield from layers(rank, size)


def functions(
    dist: Any, name: str, rank: int, size: int
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each function of one dtype, with values that wrap around and are rounded."""
    on_cpu = partial(mx.array, np.array([1, 0, 3, 200]) * (1 + 50 * rank) % 251)
    x = on_cpu().astype(getattr(mx, name), stream=mx.cpu)
    if name in {"float16", "bfloat16", "float32", "float64", "complex64"}:
        x = mx.divide(x, mx.array(3, x.dtype), stream=mx.cpu)
    for function in ("all_sum", "all_max", "all_min", "all_gather"):
        yield f"{function} {name}", partial(getattr(dist, function), x, stream=mx.cpu)
    rows = mx.concatenate([x[:2]] * size, stream=mx.cpu)
    yield f"sum_scatter {name}", lambda: dist.sum_scatter(rows, stream=mx.cpu)

    def messages() -> Any:
        mx.eval(dist.send(x, (rank + 1) % size, stream=mx.cpu))
        return dist.recv_like(x, (rank - 1) % size, stream=mx.cpu)

    yield f"send and recv {name}", messages


def transformations(
    name: str, call: Callable[[mx.array], mx.array], x: mx.array, w: mx.array
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The function in what MLX makes of functions."""

    def loss(x: mx.array) -> mx.array:
        reduced = call(x * x)
        return (reduced * w[: reduced.size]).sum()

    yield f"vjp {name}", lambda: mx.grad(loss)(x)
    yield f"jvp {name}", lambda: mx.jvp(lambda x: call(x * x), [x], [x + 1])
    yield f"compile {name}", lambda: mx.compile(lambda x: call(x) * 2)(x)


def out_of_order(dist: Any, rank: int) -> Any:
    """The results of two calls, asked for in the reverse order."""
    first, second = dist.all_sum(mx.array([1.0 + rank])), dist.all_sum(mx.array([10.0 + rank]))
    mx.eval(second)
    return [first, second]


def averages(rank: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    average = nn.average_gradients
    ints: Any = {"b": mx.array([3, 5]) + rank, "a": [mx.array([1, 2]) * rank]}
    floats: Any = {"b": mx.array([0.5, 3.0]) * rank, "a": [mx.array([[7.0]]) + rank]}
    mixed: Any = {"b": floats["b"].astype(mx.bfloat16), "a": floats["a"]}
    yield "average_gradients", lambda: average(floats)
    yield "average_gradients, each by itself", lambda: average(floats, all_reduce_size=0)
    yield "average_gradients of several dtypes", lambda: average(mixed)
    yield "average_gradients of integers", lambda: average(ints)
    yield "vjp average_gradients", lambda: mx.grad(lambda t: average(t)["b"].sum())(floats)
    yield (
        "jvp average_gradients",
        lambda: mx.jvp(lambda b: average({"b": b})["b"], [mx.ones(2)], [mx.ones(2) * rank]),
    )


def layers(rank: int, size: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What MLX builds of these functions; `mx.distributed` has ours where they take its place."""
    mx.random.seed(7)
    net = nn.Sequential(nn.Linear(4, 4 * size), nn.ReLU(), nn.Linear(4 * size, 2))
    x = mx.random.normal((3, 4))
    sharded = nn.Sequential(
        nn.layers.distributed.shard_linear(net.layers[0], "all-to-sharded"),
        nn.ReLU(),
        nn.layers.distributed.shard_linear(net.layers[2], "sharded-to-all"),
    )

    def step(net: Any, x: mx.array) -> Any:
        loss, grads = nn.value_and_grad(net, lambda net, x: net(x).square().mean())(net, x)
        optimizer = optim.SGD(0.1)
        optimizer.update(net, grads)
        return [loss, net.parameters()]

    yield "shard_linear", lambda: step(sharded, x)
    yield (
        "clip_grad_norm_sharded",
        lambda: nn.utils.clip_grad_norm_sharded({"w": mx.array([3.0, 4.0]) * (rank + 1)}, 1.0),
    )


def result_of(call: Callable[[], Any]) -> Any:
    """What it returns, or its error."""
    try:
        result = call()
        mx.eval(result)
        return shown(result)
    except Exception as e:  # noqa: BLE001 - errors are compared too
        return type(e).__name__


def sum_and_cut(x: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
    """What MLX says that its `sum_scatter` returns; its ring refuses it."""
    group = group or mx.distributed.init()
    rows = x.shape[0] // group.size()
    if x.shape[0] % group.size():
        raise ValueError(x.shape)
    total = mx.distributed.all_sum(x, group=group, stream=stream)
    return total[group.rank() * rows : (group.rank() + 1) * rows]


def main(*, native: bool) -> None:
    """Print the results; all but MLX's own are those of a program that `pmesh mlx` has started."""
    if native:
        mx.distributed.sum_scatter = sum_and_cut
    found = {name: result_of(call) for name, call in cases(mx.distributed)}
    print(CASES + json.dumps(found), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(native=sys.argv[1:] == ["native"])
