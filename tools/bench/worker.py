"""One rank of one system: makes the calls it is told, times each, and checks each result.

Orders come on standard input, answers go to standard output. Each system gets its own kind of
array and its own call, blocking, until the result can be read:

- pmesh: `mesh.all_reduce(x, copy=False)` of arrays made by `mesh.empty`, through the agent; and
  `mesh.all_reduce(x, out=x)` of ordinary numpy arrays.
- gloo: `torch.distributed.all_reduce`, which works in place too.
- mlx: `mx.distributed.all_sum` and `mx.eval`, on the CPU; its arrays can't be written to.

What is compressed, and the training, is in `tools.bench.compressed`.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from tools.bench.results import Order, RankAnswer

Values: TypeAlias = NDArray[np.float32]
PERIOD = 4099  # a prime: a segment that went astray changes the phase
# Inputs and results of so many bytes wait for each other's check; beyond, each call is checked.
GROUP_BYTES = 16 << 20
PIECE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The calls of one library, by one rank."""

    rank: int
    own: Callable[[Values], Any]
    """A new array of the library with these values."""
    all_reduce: Callable[[Any], Any]
    """The sum; returns when it can be read."""
    barrier: Callable[[], object]
    leave: Callable[[], object] = lambda: None
    cpu_s: Callable[[], float] = time.process_time
    """What this rank has used so far, in all its processes."""
    empty: Callable[[int], Values] | None = None
    """Arrays, one behind the other, that need not be copied to be reduced, where there are such."""
    all_reduce_shared: Callable[[Values], Values] | None = None
    """The sum of such an array."""
    average: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    """The mean of a tree of gradients, where the library has that call."""
    work: Callable[[Order], RankAnswer] | None = None
    """What it does of `tools.bench.compressed`."""


def join_pmesh(_: int, size: int) -> System:
    """Through the agent at PMESH_HOME."""
    import pmesh  # noqa: PLC0415 - a worker imports one library
    from tools.bench.compressed import Ours  # noqa: PLC0415 - it imports pmesh

    mesh = pmesh.connect(job="bench", wait_for=size, on_loss="raise")
    cpu_s = _with(int(os.environ["BENCH_AGENT"]))
    return System(
        rank=mesh.rank,
        own=np.copy,
        all_reduce=lambda x: mesh.all_reduce(x, out=x),
        barrier=mesh.barrier,
        leave=mesh.close,
        cpu_s=cpu_s,
        empty=mesh.empty,
        all_reduce_shared=lambda x: mesh.all_reduce(x, copy=False),
        average=lambda tree: mesh.average_gradients(list(tree), out=list(tree)),
        work=Ours(mesh, cpu_s).carry_out,
    )


def _with(agent: int) -> Callable[[], float]:
    """The CPU time of this process and of its agent."""
    # What clock_getcpuclockid(3) makes of a process number: nanoseconds, where /proc counts ticks.
    clock = ~agent << 3 | 2
    try:
        time.clock_gettime(clock)
    except OSError:  # not Linux
        process = psutil.Process(agent)
        return lambda: time.process_time() + sum(process.cpu_times()[:2])
    return lambda: time.process_time() + time.clock_gettime(clock)


def join_gloo(rank: int, size: int) -> System:
    """By a file that all ranks see; over the interface in GLOO_SOCKET_IFNAME."""
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    store = f"file://{os.environ['BENCH_STORE']}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)

    training: list[Any] = []

    def all_reduce(x: Any) -> Any:  # noqa: ANN401 - a tensor
        distributed.all_reduce(x)
        return x

    def train(order: Order) -> RankAnswer:
        from tools.bench.compressed import training_by_torch  # noqa: PLC0415 - it imports pmesh

        if not training:
            training.append(training_by_torch(rank, size))
        answer: RankAnswer = training[0].run(order.times)
        return answer

    return System(
        rank=rank,
        own=lambda values: torch.from_numpy(values.copy()),
        all_reduce=all_reduce,
        barrier=distributed.barrier,
        leave=distributed.destroy_process_group,
        work=train,
    )


def join_mlx(_: int, size: int) -> System:
    mx: Any = importlib.import_module("mlx.core")
    mx.set_default_device(mx.cpu)
    group = mx.distributed.init(strict=True, backend="ring")
    if group.size() != size:
        raise RuntimeError(f"MLX's ring has {group.size()} ranks, not {size}")

    def own(values: Values) -> Any:  # noqa: ANN401 - an array of MLX
        x = mx.array(values)
        mx.eval(x)
        return x

    def all_reduce(x: Any) -> Any:  # noqa: ANN401 - an array of MLX
        total = mx.distributed.all_sum(x, group=group)
        mx.eval(total)
        return total

    one = own(np.ones(1, np.float32))
    return System(
        rank=group.rank(), own=own, all_reduce=all_reduce, barrier=lambda: all_reduce(one)
    )


JOIN = {"pmesh": join_pmesh, "gloo": join_gloo, "mlx": join_mlx}


def pattern(count: int) -> Values:
    """Whole numbers, so that float32 adds up those of all ranks without rounding."""
    return np.resize(np.arange(PERIOD, dtype=np.float32), count)


def carry_out(system: System, size: int, order: Order) -> RankAnswer:
    """The calls of one order; every result is compared, value by value, with the right one."""
    base = pattern(order.count)
    mine = base * np.float32(system.rank + 1)
    right = base  # in place: the memory case counts the arrays of a caller
    total = size * (size + 1) // 2
    right *= np.float32(total / size if order.what == "average_gradients" else total)
    seconds: list[float] = []
    cpu_s = 0.0
    wrong = 0
    group = order.together or max(1, GROUP_BYTES // mine.nbytes)
    if order.what == "all_reduce_shared" and system.empty is not None:
        own = system.empty(order.count)
        own[:] = mine
        mine = own
    while len(seconds) < order.times:
        times = min(group, order.times - len(seconds))
        made = _make_calls(system, order, mine, right, times)
        seconds += made.seconds
        cpu_s += made.cpu_s
        wrong += made.wrong
    return RankAnswer(seconds=tuple(seconds), cpu_s=cpu_s, wrong=wrong)


def _make_calls(
    system: System, order: Order, mine: Values, right: Values, times: int
) -> RankAnswer:
    call, inputs = _prepare(system, order, mine, times)
    results: list[Any] = []
    seconds: list[float] = []
    is_lent = order.what == "all_reduce_shared" and times > 1
    kept = np.ones((times if is_lent else 0, order.count), np.float32)
    system.barrier()  # the check before took each rank another time
    cpu_s = system.cpu_s()
    for x in inputs:
        began = time.perf_counter()
        result = call(x)
        seconds.append(time.perf_counter() - began)
        if is_lent:  # a training, too, does not keep what it has read
            kept[len(results)] = result
            result = kept[len(results)]
        results.append(result)
    cpu_s = system.cpu_s() - cpu_s
    system.barrier()  # a rank that checks takes a core, and others may still wait for theirs
    wrong = sum(not _is(result, right) for result in results)
    return RankAnswer(seconds=tuple(seconds), cpu_s=cpu_s, wrong=wrong)


def _prepare(
    system: System, order: Order, mine: Values, times: int
) -> tuple[Callable[[Any], Any], list[Any]]:
    """What is called, and with what: new arrays if it writes into them, as gloo does."""
    if order.what == "all_reduce":
        return system.all_reduce, [system.own(mine) for _ in range(times)]
    if order.what == "all_reduce_shared" and system.all_reduce_shared:
        return system.all_reduce_shared, [mine] * times
    if order.what != "average_gradients" or system.average is None:
        raise ValueError(f"this system has no {order.what}")
    cuts = [order.count * i // order.arrays for i in range(1, order.arrays)]
    trees = [[system.own(x) for x in np.split(mine, cuts)] for _ in range(times)]
    return system.average, trees


def _is(result: Any, right: Values) -> bool:  # noqa: ANN401 - what the system calls an array
    """In pieces, whose comparison takes no memory to speak of."""
    place = 0
    for part in result if isinstance(result, list) else [result]:
        values = np.asarray(part)
        for start in range(0, values.size, PIECE):
            piece = values[start : start + PIECE]
            if not np.array_equal(piece, right[place : place + piece.size]):
                return False
            place += piece.size
    return place == right.size


def work(name: str, rank: int, size: int) -> None:
    """Be one rank of this system: see JOIN."""
    system = JOIN[name](rank, size)
    print(msgspec.json.encode(RankAnswer()).decode(), flush=True)
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        if order.what == "end":
            system.leave()
            return
        if order.what in {"compressed", "train"} and system.work is not None:
            answer = system.work(order)
        else:
            answer = carry_out(system, size, order)
        print(msgspec.json.encode(answer).decode(), flush=True)
