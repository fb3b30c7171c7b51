"""One rank: makes the calls, or the steps of training, that it is told, and times each.

    python -m tools.bench_compression.worker pmesh|gloo RANK SIZE

Orders come on standard input, answers go to standard output.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

import pmesh
from tools.bench_compression.arrays import Arrays, arrays_of
from tools.bench_compression.orders import Answer, Order
from tools.bench_compression.schemes import find_way
from tools.bench_compression.training import Training, training_by_pmesh, training_by_torch

Values: TypeAlias = NDArray[np.float32]
Work = Callable[[Order], Answer]


class Ours:
    """A rank of pmesh."""

    def __init__(self, mesh: pmesh.Mesh) -> None:
        self._mesh = mesh
        self._training: Training | None = None
        self._arrays: Arrays | None = None

    def carry_out(self, order: Order) -> Answer:
        """The calls of one order, or the steps."""
        if order.what == "train":
            self._training = self._training or training_by_pmesh(self._mesh)
            return self._training.run(order.times)
        if self._arrays is None or not self._arrays.are_for(order):
            self._arrays = arrays_of(order, self._mesh.rank, self._mesh.size)
        return self._all_reduce(order, self._arrays)

    def _all_reduce(self, order: Order, arrays: Arrays) -> Answer:
        way = find_way(order.scheme)
        seconds: list[float] = []
        cpu_s = 0.0
        for _ in range(order.times):
            self._mesh.barrier()  # the slowest rank's time is that of the call alone
            began_cpu, began = time.process_time(), time.perf_counter()
            self._mesh.all_reduce(arrays.own, "mean", out=arrays.out, compression=way.scheme)
            seconds.append(time.perf_counter() - began)
            cpu_s += time.process_time() - began_cpu
        last = self._mesh.last_op
        why = "" if last is None else last.why
        digest = xxhash.xxh3_128()
        for each in arrays.out:
            digest.update(each.data)
        return Answer(
            seconds=tuple(seconds),
            cpu_s=cpu_s,
            digest=digest.hexdigest(),
            error=arrays.error(),
            picked=f"{last.compression}: {why}" if last and why else "",
            settled=not why.startswith("trial"),
        )


def join_ours(_: int, size: int) -> tuple[Work, Callable[[], object]]:
    """Through the agent at PMESH_HOME; returns what does the work, and what ends it."""
    mesh = pmesh.connect(job="bench", wait_for=size, on_loss="raise")
    return Ours(mesh).carry_out, mesh.close


def join_torch(rank: int, size: int) -> tuple[Work, Callable[[], object]]:
    """By a file that all ranks see; over the interface in GLOO_SOCKET_IFNAME."""
    distributed: Any = importlib.import_module("torch.distributed")
    store = f"file://{os.environ['BENCH_STORE']}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    training = training_by_torch(rank, size)
    return lambda order: training.run(order.times), distributed.destroy_process_group


JOIN = {"pmesh": join_ours, "gloo": join_torch}


def main() -> None:
    """Join, say so, and do what comes."""
    name, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    work, leave = JOIN[name](rank, size)
    print(msgspec.json.encode(Answer()).decode(), flush=True)
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        if order.what == "end":
            leave()
            return
        print(msgspec.json.encode(work(order)).decode(), flush=True)


if __name__ == "__main__":
    main()
