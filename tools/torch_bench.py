"""Training by torch over pmesh beside gloo: the same processes, in turns.

With powersgd, torch's powerSGD_hook over gloo is measured, too.

Each rank has an agent of its own. The ways take turns in an order that is drawn for each round. A
row has a way's median, its ratio to gloo's, and the processor time of a rank and its agent.
"""

import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import cyclopts
import psutil

from tools.bench.cases import MEGABIT, PMESH, Case
from tools.bench.systems import AGENT_PID, place_of, start_agents, start_ranks
from tools.lab.call import words_for
from tools.lab.program import PATIENCE_S

MODELS = ("ResNet18", "transformer")
OPS = (("4 KiB", 1024, 1), ("100 of 4 KiB", 1024, 100), ("25 MB", 6_250_000, 1))
"""What is reduced: its name, how many float32, and how often in a row.

Between two calls of one way come those of the others and barriers: then caches and cores are cold.
"""
STRATEGIES = ("ring", "direct")
"""Each beside the one that pmesh chooses, which may not be the fastest."""
POWER_SGD = "powersgd"
OF_TORCH = "powerSGD_hook"
ONE_BUCKET_MB = 1024
Step = Callable[[], None]


class Times(NamedTuple):
    """What a way has taken, of each run."""

    seconds: list[float]
    cpu_s: list[float]
    """Of this rank and its agent."""


def ops(gloo: Any, mesh: Any) -> dict[str, dict[str, Step]]:
    """An all-reduce through torch, on gloo, and by pmesh itself."""
    import torch
    import torch.distributed as dist

    found: dict[str, dict[str, Step]] = {}
    for name, count, times in OPS:
        x = torch.ones(count)
        ways: dict[str, Step] = {
            "gloo": lambda x=x: dist.all_reduce(x, group=gloo),
            "pmesh": lambda x=x: dist.all_reduce(x),
            "mesh.all_reduce": lambda x=x: mesh.all_reduce(x, out=x),
        } | {
            f"mesh, {strategy}": lambda x=x, s=strategy: mesh.all_reduce(x, out=x, strategy=s)
            for strategy in STRATEGIES
        }
        found[name] = {way: _repeated(op, times) for way, op in ways.items()}
    return found


def _repeated(op: Step, times: int) -> Step:
    def step() -> None:
        for _ in range(times):
            op()

    return step


class _Nothing:
    """Calls of a mesh that does nothing."""

    rank, size = 0, 1

    def all_reduce(self, *_: object, **__: object) -> None:
        pass


def measure_python() -> None:
    """The processor time of an all_reduce through torch whose op takes none, beside gloo's."""
    import torch
    import torch.distributed as dist

    from pmesh.torch.process_group import ProcessGroup

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        ends: Any = lambda *_: None  # noqa: E731
        calls: Any = _Nothing()
        return ProcessGroup(calls, store, rank, size, timeout=timeout, split=ends, end=ends)

    torch.set_num_threads(1)
    dist.Backend.register_backend("nothing", make, devices=["cpu"])
    dist.init_process_group("nothing", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(OPS[0][1])
    groups = {"pmesh.torch, without its op": None, "gloo, one rank": dist.new_group(backend="gloo")}
    taken: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(15):
        for name, group in groups.items():
            begun = time.thread_time()
            _repeated(lambda group=group: dist.all_reduce(x, group=group), 1000)()
            taken[name].append((time.thread_time() - begun) * 1e3)
    for name, micros in taken.items():
        print(f"{name:28} {min(micros):6.1f} us, the least of {len(micros)} times 1,000 calls")


def ddp(gloo: Any, compression: Sequence[str], models: Sequence[str]) -> dict[str, dict[str, Step]]:
    from torch.nn.parallel import DistributedDataParallel

    found: dict[str, dict[str, Step]] = {}
    groups: dict[str, Any] = {"gloo": gloo, "pmesh": None}
    groups |= dict.fromkeys(compression)
    if POWER_SGD in compression:
        groups[OF_TORCH] = gloo
    for name in models:
        found[f"DDP of {name}"] = turns = {}
        for way, group in groups.items():
            # With several buckets a run hung: this hook waits for gloo inside gloo's callbacks.
            cap_mb = ONE_BUCKET_MB if way == OF_TORCH else None
            model = _model(name)
            parallel = DistributedDataParallel(
                model.network, process_group=group, bucket_cap_mb=cap_mb
            )
            _compress(parallel, way, gloo)
            turns[way] = _stepper(model, parallel)
    return found


def _compress(model: Any, way: str, gloo: Any) -> None:
    """Give the model the communication hook of the way, if it has one."""
    import pmesh.torch

    if way == OF_TORCH:
        hooks = import_module("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
        # It compresses from this iteration on, and allows no earlier one with feedback.
        state = hooks.PowerSGDState(gloo, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, hooks.powerSGD_hook)
    elif way not in {"gloo", "pmesh"}:
        scheme: Any = pmesh.PowerSGD(4, start_step=2) if way == POWER_SGD else way
        model.register_comm_hook(None, pmesh.torch.compression_hook(scheme))


def fsdp(gloo: Any, models: Sequence[str]) -> dict[str, dict[str, Step]]:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    found: dict[str, dict[str, Step]] = {}
    for name in models:
        found[f"FSDP2 of {name}"] = turns = {}
        for way, group in (("gloo", gloo), ("pmesh", torch.distributed.group.WORLD)):
            mesh = DeviceMesh.from_group(group, "cpu")
            model = _model(name)
            for part in (*model.parts, model.network):
                fully_shard(part, mesh=mesh)
            turns[way] = _stepper(model, model.network)
    return found


def _model(name: str) -> Any:
    import torch

    torch.manual_seed(0)
    return import_module("tools.torch_models").MODELS[name]()


def _stepper(model: Any, parallel: Any) -> Step:
    import torch

    optimizer = torch.optim.SGD(parallel.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model.loss(parallel).backward()
        optimizer.step()

    return step


def work(what: str, model: str, compression: Sequence[str], seconds: float) -> None:
    """A rank. Every rank takes as many rounds as rank 0 says."""
    import torch
    import torch.distributed as dist

    from pmesh.torch.ranks import WORLDS

    torch.set_num_threads(1)
    dist.init_process_group("pmesh")
    gloo = dist.new_group(backend="gloo")
    assert WORLDS.current is not None  # noqa: S101 - the group is pmesh's
    models = [name for name in MODELS if model in name]
    cases = {
        "ops": lambda: ops(gloo, WORLDS.current.mesh if WORLDS.current else None),
        "ddp": lambda: ddp(gloo, compression, models),
        "fsdp": lambda: fsdp(gloo, models),
    }[what]()
    for name, turns in cases.items():
        taken = {way: Times([], []) for way in turns}
        for step in (*turns.values(), *turns.values(), *turns.values()):
            step()
        ways = list(turns)
        order = random.Random(0)  # noqa: S311 - the same at all ranks
        until = time.monotonic() + seconds
        going = torch.ones(1)
        while going.item():
            order.shuffle(ways)
            for way in ways:
                dist.barrier()
                begun, cpu_s = time.perf_counter(), _cpu_s()
                turns[way]()
                taken[way].seconds.append(time.perf_counter() - begun)
                taken[way].cpu_s.append(_cpu_s() - cpu_s)
            going.fill_(time.monotonic() < until)
            dist.broadcast(going, 0)
        if dist.get_rank() == 0:
            print(json.dumps([name, taken]), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    print("end", flush=True)


def _cpu_s() -> float:
    processes = psutil.Process(), psutil.Process(int(os.environ[AGENT_PID]))
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def run(
    what: Literal["ops", "python", "ddp", "fsdp"],
    *,
    ranks: int = 4,
    mbit: int = 0,
    model: Literal["", "ResNet18", "transformer"] = "",
    compression: Annotated[list[str] | None, cyclopts.Parameter(consume_multiple=True)] = None,
    seconds: float = 15.0,
) -> None:
    """Measure all-reduces (ops), what Python adds to them (python), or steps of DDP or FSDP2.

    Args:
        what: Of these four.
        ranks: How many, each with an agent.
        mbit: Of each host's line in a network lab; 0: this machine's loopback.
        model: If not both.
        compression: What DDP is measured with, too: int8, powersgd.
        seconds: For each case.
    """
    if what == "python":
        measure_python()
        return
    speed = mbit * MEGABIT or None
    case = Case("torch", what, ranks, "peers", (PMESH,), in_lab=bool(mbit), link_bits_per_s=speed)
    with (
        tempfile.TemporaryDirectory(prefix="pmesh-") as name,
        place_of(case) as place,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        nodes = start_agents(place, folder, stack)
        command = ["-W", "ignore", *words_for(work, what, model, compression or [], seconds)]
        settings = {
            "PMESH_WAIT_FOR": str(place.ranks),
            "PMESH_JOB": "bench",
            "GLOO_SOCKET_IFNAME": place.interface,
            "OMP_NUM_THREADS": "1",
        }
        environments = [node.environment | settings | {AGENT_PID: str(node.pid)} for node in nodes]
        commands = [command] * place.ranks
        workers = start_ranks(
            place.hosts, "rank", commands, environments, folder=folder, stack=stack
        )
        for worker in workers:
            while (line := worker.hear(within_s=5 * PATIENCE_S)) != "end":
                _print_case(*json.loads(line))


def _print_case(name: str, taken: dict[str, list[list[float]]]) -> None:
    """The slowest rank decides how long a barrier takes, so any rank's time is that of all."""
    medians = {way: statistics.median(seconds) for way, (seconds, _) in taken.items()}
    for way, (seconds, cpu_s) in taken.items():
        ratio = medians[way] / medians["gloo"]
        text = f"{name:20} {way:16} {medians[way] * 1e3:10.3f} ms  {ratio:5.2f} x gloo"
        cpu_ms = statistics.mean(cpu_s) * 1e3  # its clock has steps of 10 ms
        # At once: who reads a file, or a run that is ended early, has all that was measured.
        print(f"{text}  {cpu_ms:8.2f} ms of processor  ({len(seconds)} runs)", flush=True)
