"""Training by torch over pmesh beside gloo: the same processes, in turns.

    python -m tools.torch_bench ops                       # all_reduce, on this machine's loopback
    python -m tools.torch_bench ddp --ranks 4             # steps of DDP
    python -m tools.torch_bench fsdp --mbit 1000          # in hosts of a network lab (root)
    python -m tools.torch_bench ddp --mbit 100 --compression int8

Each rank has an agent of its own. Rank 0 prints the median of each way, and its ratio to gloo's.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.bench.systems import PATIENCE_S, ROOT, Place, Process, start_agents
from tools.lab.net import NetLab

MODELS = {"11.2 M": (1024, 10), "25.2 M": (1024, 24)}
"""Width of a layer, and how many: perceptrons, as torchvision's ResNet18 is not installed."""
Step = Callable[[], None]


def ops(gloo: Any, mesh: Any) -> dict[str, dict[str, Step]]:
    """An all-reduce through torch, on gloo, and by pmesh itself."""
    import torch
    import torch.distributed as dist

    found: dict[str, dict[str, Step]] = {}
    for name, count in (("4 KiB", 1024), ("25 MB", 6_250_000)):
        x = torch.ones(count)
        found[f"all_reduce of {name}"] = {
            "gloo": lambda x=x: dist.all_reduce(x, group=gloo),
            "pmesh": lambda x=x: dist.all_reduce(x),
            "mesh.all_reduce": lambda x=x: mesh.all_reduce(x, out=x),
        }
    return found


def ddp(gloo: Any, compression: str) -> dict[str, dict[str, Step]]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import pmesh.torch

    found: dict[str, dict[str, Step]] = {}
    for name in MODELS:
        found[f"DDP of {name}"] = turns = {}
        for way, group in (("gloo", gloo), ("pmesh", None), (compression, None)):
            if way:
                model = DistributedDataParallel(_perceptron(name), process_group=group)
                if way == compression:
                    scheme: Any = pmesh.PowerSGD(4) if way == "powersgd" else way
                    model.register_comm_hook(None, pmesh.torch.compression_hook(scheme))
                turns[way] = _stepper(model, torch.optim.SGD(model.parameters(), 1e-3))
    return found


def fsdp(gloo: Any) -> dict[str, dict[str, Step]]:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    found: dict[str, dict[str, Step]] = {}
    for name in MODELS:
        found[f"FSDP2 of {name}"] = turns = {}
        for way, group in (("gloo", gloo), ("pmesh", torch.distributed.group.WORLD)):
            mesh = DeviceMesh.from_group(group, "cpu")
            model = _perceptron(name)
            for layer in model:
                if isinstance(layer, torch.nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            turns[way] = _stepper(model, torch.optim.SGD(model.parameters(), 1e-3))
    return found


def _perceptron(name: str) -> Any:
    import torch

    width, layers = MODELS[name]
    parts = [
        part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())
    ]
    torch.manual_seed(0)
    return torch.nn.Sequential(*parts, torch.nn.Linear(width, 1))


def _stepper(model: Any, optimizer: Any) -> Step:
    import torch

    x = torch.randn(8, MODELS["11.2 M"][0])

    def step() -> None:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    return step


def work(what: str, compression: str, seconds: float) -> None:
    """A rank. Every rank takes as many rounds as rank 0 says."""
    import torch
    import torch.distributed as dist

    from pmesh.torch.ranks import WORLDS

    torch.set_num_threads(1)
    dist.init_process_group("pmesh")
    gloo = dist.new_group(backend="gloo")
    assert WORLDS.current is not None  # noqa: S101 - the group is pmesh's
    cases = {
        "ops": lambda: ops(gloo, WORLDS.current.mesh if WORLDS.current else None),
        "ddp": lambda: ddp(gloo, compression),
        "fsdp": lambda: fsdp(gloo),
    }[what]()
    for name, turns in cases.items():
        taken: dict[str, list[float]] = {way: [] for way in turns}
        for step in (*turns.values(), *turns.values(), *turns.values()):
            step()
        ways = list(turns)
        until = time.monotonic() + seconds
        going = torch.ones(1)
        while going.item():
            ways.append(ways.pop(0))  # none goes always right after the same other
            for way in ways:
                dist.barrier()
                begun = time.perf_counter()
                turns[way]()
                taken[way].append(time.perf_counter() - begun)
            going.fill_(time.monotonic() < until)
            dist.broadcast(going, 0)
        if dist.get_rank() == 0:
            print(json.dumps([name, taken]), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    print("end", flush=True)


@contextlib.contextmanager
def _place(ranks: int, mbit: int) -> Iterator[Place]:
    if not mbit:
        yield Place(ranks=ranks)
        return
    with NetLab(ranks) as lab:
        for host in lab.hosts:
            lab.shape(host, bits_per_s=mbit * 1_000_000)
        yield Place(ranks=ranks, hosts=lab.hosts)


def measure(options: argparse.Namespace) -> None:
    """Start agents and ranks, and print what rank 0 has measured."""
    with (
        tempfile.TemporaryDirectory(prefix="pmesh-") as name,
        _place(options.ranks, options.mbit) as place,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        _, ours = start_agents(place, folder, stack)
        command = [sys.executable, "-W", "ignore", "-m", "tools.torch_bench", options.what]
        command += ["--worker", "--seconds", str(options.seconds)]
        command += ["--compression", options.compression]
        workers = [
            stack.enter_context(
                Process(
                    place,
                    rank,
                    command,
                    environment=environment
                    | {
                        "PMESH_WAIT_FOR": str(place.ranks),
                        "PMESH_JOB": "bench",
                        "GLOO_SOCKET_IFNAME": place.interface,
                        "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
                    },
                    log=folder / f"rank-{rank}.log",
                )
            )
            for rank, (_, environment) in enumerate(ours)
        ]
        for worker in workers:
            while (line := worker.hear(timeout_s=5 * PATIENCE_S).strip()) != "end":
                _print_case(*json.loads(line))


def _print_case(name: str, taken: dict[str, list[float]]) -> None:
    """The slowest rank decides how long a barrier takes, so any rank's time is that of all."""
    medians = {way: statistics.median(times) for way, times in taken.items()}
    for way, seconds in medians.items():
        ratio = seconds / medians["gloo"]
        runs = len(taken[way])
        print(f"{name:24} {way:16} {seconds * 1e3:10.3f} ms  {ratio:5.2f} x gloo  ({runs} runs)")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["ops", "ddp", "fsdp"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mbit", type=int, default=0, help="of each host's line; 0: loopback")
    parser.add_argument("--compression", default="", help="DDP also with int8, powersgd, ...")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each case")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.what, options.compression, options.seconds)
    else:
        measure(options)


if __name__ == "__main__":
    main()
