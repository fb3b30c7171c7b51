"""One rank of pmesh, of gloo or of MLX's ring; prints JSON lines, each with its rank and pid.

`at` is the monotonic clock, which all processes of a machine share.
"""

import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pmesh.compression.schemes import BF16, INT8, PowerSGD, TopK

Values: TypeAlias = NDArray[np.float32]
CLASSES = 10
RATE = 0.05
ROWS = 32
PAUSE_S = 0.02  # what a step imitates of computing: a print for each millisecond helps nobody
SIDE = 1024
"""Of the matrix whose gradient is counted on the wire: 4 MiB."""
WARM_CALLS = 12  # pmesh's PowerSGD compresses from call 10 on
COUNTED_CALLS = 10
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def say(**facts: object) -> None:
    names = ("COMPARE_RANK", "RANK", "MLX_RANK")  # ours, torchrun's, mlx.launch's
    rank = next(int(os.environ[name]) for name in names if name in os.environ)
    print(
        json.dumps({"rank": rank, "pid": os.getpid(), "at": time.monotonic()} | facts), flush=True
    )


def hash_of(values: Values) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class JoinedRank:
    """One rank that has met the others."""

    rank: int
    size: int
    total: Callable[[Values], Values]
    """The sum over all ranks."""
    mesh: Any = None
    """pmesh's, if it is that."""


def join(system: str, size: int, wait_s: float = 300.0) -> JoinedRank:
    """Meet the others as the launcher's environment says; raises what the library raises."""
    if system == "pmesh":
        pmesh: Any = importlib.import_module("pmesh")
        mesh = pmesh.connect("compare", wait_for=size, timeout_s=wait_s)
        return JoinedRank(mesh.rank, mesh.size, mesh.all_reduce, mesh)
    if system == "gloo":
        torch: Any = importlib.import_module("torch")
        distributed: Any = importlib.import_module("torch.distributed")
        torch.set_num_threads(1)
        distributed.init_process_group("gloo")

        def total(x: Values) -> Values:
            tensor = torch.from_numpy(x.copy())
            distributed.all_reduce(tensor)
            out: Values = tensor.numpy()
            return out

        return JoinedRank(distributed.get_rank(), distributed.get_world_size(), total)
    mx: Any = importlib.import_module("mlx.core")
    mx.set_default_device(mx.cpu)
    group = mx.distributed.init(strict=True, backend="ring")
    return JoinedRank(
        group.rank(), group.size(), lambda x: np.array(mx.distributed.all_sum(mx.array(x)))
    )


@contextmanager
def reporting() -> Iterator[None]:
    """An error becomes a line, and the exit code 1."""
    try:
        yield
    except Exception as e:  # noqa: BLE001 - what a library raises is what is compared
        say(error=" ".join(f"{type(e).__name__}: {e}".split())[:300])
        sys.stdout.flush()
        os._exit(1)  # some libraries wait for the others at the end


def train(system: str, size: int, data: str) -> None:
    """Train a linear classifier until it is killed; print each step, and the weights' hash."""
    with reporting():
        read = np.load(data)
        x, y = read["x"], np.eye(CLASSES, dtype=np.float32)[read["y"]]
        joined = join(system, size)
        weights = np.zeros((x.shape[1], CLASSES), np.float32)
        step = 0
        while True:
            if joined.mesh is not None:
                (weights,) = joined.mesh.sync([weights])
                step = joined.mesh.step
            say(step=step, weights=hash_of(weights))
            start = (step * size + joined.rank) * ROWS % (len(x) - ROWS)
            rows, labels = x[start : start + ROWS], y[start : start + ROWS]
            scores = np.exp(rows @ weights)
            gradient = rows.T @ (scores / scores.sum(1, keepdims=True) - labels) / ROWS
            time.sleep(PAUSE_S)
            if joined.mesh is not None:
                (gradient,) = joined.mesh.average_gradients([gradient])
            else:
                gradient = joined.total(gradient) / joined.size
            weights = weights - RATE * gradient
            step += 1


def reduce_once(system: str, size: int, counts: list[int], wait_s: float) -> None:
    """Add up arrays of so many values, each rank's its rank plus one; print what comes."""
    with reporting():
        joined = join(system, size, wait_s)
        say(ready=True)
        total = joined.total(np.full(counts[joined.rank], joined.rank + 1.0, np.float32))
        values = sorted({float(x) for x in total})[:5]
        say(size=int(total.size), values=values)


def count_bytes(system: str, size: int) -> None:
    """Average a gradient of 4 MiB in each way the library has; print what a call has sent."""
    with reporting():
        joined = join(system, size)
        gradient = np.random.default_rng(joined.rank).normal(size=(SIDE, SIDE)).astype(np.float32)
        for name, call in _ways(system, joined, gradient).items():
            for _ in range(WARM_CALLS):
                call()
            before = int(SENT.read_text())
            for _ in range(COUNTED_CALLS):
                call()
            sent = (int(SENT.read_text()) - before) / COUNTED_CALLS
            say(way=name, sent=sent)
        joined.total(np.ones(1, np.float32))  # nobody leaves before all have counted


def _ways(system: str, joined: JoinedRank, gradient: Values) -> dict[str, Callable[[], object]]:
    if system == "pmesh":
        average = joined.mesh.average_gradients
        schemes = {"bf16": BF16(), "int8": INT8(), "TopK 1 %": TopK(0.01), "PowerSGD": PowerSGD(1)}
        return {"plain": lambda: average([gradient])} | {
            name: lambda scheme=scheme: average([gradient], compression=scheme)
            for name, scheme in schemes.items()
        }
    if system == "mlx":
        mx: Any = importlib.import_module("mlx.core")
        nn: Any = importlib.import_module("mlx.nn")

        def average_as(dtype: Any) -> Callable[[], object]:  # noqa: ANN401 - MLX's
            tree = {"w": mx.array(gradient).astype(dtype)}
            return lambda: mx.eval(nn.average_gradients(tree))

        return {"plain": average_as(mx.float32), "cast to float16": average_as(mx.float16)}
    return {"plain": _ddp(None), "fp16 hook": _ddp("fp16"), "PowerSGD hook": _ddp("powersgd")}


def _ddp(hook: str | None) -> Callable[[], object]:
    """A step of torch's DDP on one matrix; torch's own hooks compress."""
    torch: Any = importlib.import_module("torch")
    hooks: Any = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks")
    model = torch.nn.Linear(SIDE, SIDE, bias=False)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    if hook == "fp16":
        ddp.register_comm_hook(None, hooks.default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = hooks.powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=10
        )
        ddp.register_comm_hook(state, hooks.powerSGD_hook.powerSGD_hook)
    x = torch.randn(1, SIDE)
    return lambda: ddp(x).square().sum().backward()
