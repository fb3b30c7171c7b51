"""A step of `pmesh.mlx.Pipeline` beside one of torch's `Schedule1F1B`, over a slow line.

Two hosts have a stage each. The same two processes train the same model with both, in turns, so
that other programs on this machine disturb both alike. MLX multiplies matrices on a CPU 14 times
slower than torch, so the computation is imitated: a forward pass sleeps, and little is computed.
Each keeps its activations. Torch's messages go by gloo.
"""

import json
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import torch.distributed as dist
from mlx import nn
from torch.distributed import pipelining

import pmesh
from pmesh.mlx import Pipeline, split_layers
from pmesh.mlx.pipeline.pipeline import ScheduleName, SendAs
from tools.lab.call import words_for
from tools.lab.commands import LabError
from tools.lab.mesh import LabMesh
from tools.lab.net import NetLab
from tools.lab.program import LabProgram

RANKS = 2
WIDTH, LAYERS = 512, 4
ROWS, MICRO_BATCHES = 256, 8
"""Of a micro-batch, and how many there are: each message has half a MB."""
PORT = 29_511
PATIENCE_S = 600.0
Weights = list[np.ndarray[Any, Any]]
STEP_BAR, BUBBLE_BAR = 1.0, 0.1
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
TORCH = "Schedule1F1B on gloo"
PMESH, EAGER, INT8 = "pmesh", "pmesh, eager 1F1B", "pmesh, eager 1F1B, int8"
WAYS = (TORCH, PMESH, EAGER, INT8)


class TorchLayer(torch.nn.Module):
    """Little computation, and a sleep."""

    def __init__(self, weight: np.ndarray[Any, Any], sleeps_s: float) -> None:
        super().__init__()
        self.sleeps_s = sleeps_s
        self.weight = torch.nn.Parameter(torch.tensor(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.sleeps_s)
        return x * self.weight


class SleepingLayer(nn.Module):  # type: ignore[misc] # MLX's modules have no types
    """The same in MLX."""

    def __init__(self, weight: np.ndarray[Any, Any], sleeps_s: float) -> None:
        super().__init__()
        self.sleeps_s = sleeps_s
        self.weight = mx.array(weight)

    def __call__(self, x: mx.array) -> mx.array:
        time.sleep(self.sleeps_s)
        found: mx.array = x * self.weight
        return found


def work(rank: int, address: str, rounds: int, sleeps_s: float) -> None:
    """Be one rank; print the seconds of each step, its loss, and what our pipeline reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{address}:{PORT}", rank=rank, world_size=RANKS)
    random = np.random.default_rng(0)
    weights = [random.normal(1, 0.05, WIDTH).astype(np.float32) for _ in range(LAYERS)]
    x = random.normal(size=(ROWS * MICRO_BATCHES, WIDTH)).astype(np.float32)
    y = np.sin(x)
    with pmesh.connect(job="pipeline-speed", wait_for=RANKS) as mesh:
        plain, eager, narrow = (
            _pipeline(mesh, weights, sleeps_s, schedule="1f1b"),
            _pipeline(mesh, weights, sleeps_s),
            _pipeline(mesh, weights, sleeps_s, send_as="int8"),
        )
        batch = mx.array(x), mx.array(y)
        ways: dict[str, Callable[[], float]] = {
            TORCH: _torch_step(rank, weights, sleeps_s, torch.tensor(x), torch.tensor(y)),
            PMESH: lambda: plain.step(*batch)[0],
            EAGER: lambda: eager.step(*batch)[0],
            INT8: lambda: narrow.step(*batch)[0],
        }
        for step in ways.values():
            step()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        losses: dict[str, float] = {}
        reports = list[list[float]]()
        for _ in range(rounds):
            for name, step in ways.items():
                dist.barrier()
                began = time.perf_counter()
                losses[name] = step()
                dist.barrier()
                seconds[name].append(time.perf_counter() - began)
            of = eager.report()
            reports.append([of.bubble, of.schedule_bubble, of.stages[mesh.rank].compute_s])
    print(json.dumps({"seconds": seconds, "losses": losses, "reports": reports}), flush=True)
    dist.destroy_process_group()


def _torch_step(
    rank: int, weights: Weights, sleeps_s: float, x: torch.Tensor, y: torch.Tensor
) -> Callable[[], float]:
    """Return a function that makes a step; it returns the loss on the last rank, 0 on the first."""
    part = weights[rank * LAYERS // RANKS : (rank + 1) * LAYERS // RANKS]
    module = torch.nn.Sequential(*(TorchLayer(weight, sleeps_s) for weight in part))
    stage = pipelining.PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, MICRO_BATCHES, torch.nn.functional.mse_loss)

    def step() -> float:
        module.zero_grad()
        losses = list[torch.Tensor]()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        return float(sum(losses)) / MICRO_BATCHES

    return step


def _pipeline(
    mesh: pmesh.Mesh,
    weights: Weights,
    sleeps_s: float,
    *,
    schedule: ScheduleName = "eager_1f1b",
    send_as: SendAs | None = None,
) -> Pipeline:
    each = [LAYERS // RANKS] * RANKS
    stage = split_layers([SleepingLayer(weight, sleeps_s) for weight in weights], mesh, by=each)
    return Pipeline(
        stage,
        mesh,
        nn.losses.mse_loss,
        micro_batch_size=ROWS,
        schedule=schedule,
        recompute=False,
        send_as=send_as,
    )


def measure(*, rounds: int = 20, mbit: int = 200, sleeps_ms: float = 20.0) -> int:
    """Compare the medians of a step; exits with 1 if a bar is missed.

    Args:
        rounds: how many steps each makes.
        mbit: the speed of each host's line.
        sleeps_ms: what the forward pass of a layer takes.
    """
    lab = NetLab(RANKS)
    address = lab.hosts[0].ipv4
    with slow_mesh(lab, mbit) as mesh:
        ranks = [
            mesh.start_program(
                node, *words_for(work, i, address, rounds, sleeps_ms / 1e3), variables=ONE_THREAD
            )
            for i, node in enumerate(mesh.nodes)
        ]
        first, last = map(result_of, ranks)
    medians = {name: statistics.median(first["seconds"][name]) for name in WAYS}
    for name, median_s in medians.items():
        times = first["seconds"][name]
        print(f"{name}: {median_s:.3f} s a step, {min(times):.3f} to {max(times):.3f}")
    bubble, by_schedule, _ = (
        statistics.median(each) for each in zip(*first["reports"], strict=True)
    )
    compute_s = [statistics.median(r[2] for r in each["reports"]) for each in (first, last)]
    ratios = [medians[name] / medians[TORCH] for name in (PMESH, EAGER)]
    print(f"of which pmesh computes {' and '.join(f'{s:.3f}' for s in compute_s)} s")
    print(f"a step over torch's: {ratios[0]:.2f}, eager {ratios[1]:.2f} (bar {STEP_BAR})")
    print(f"eager bubble {bubble:.2f}, by the schedule {by_schedule:.2f} (bar {BUBBLE_BAR} more)")
    print(f"int8 over float32: {medians[INT8] / medians[EAGER]:.2f}")
    torchs, own = (last["losses"][name] for name in (TORCH, PMESH))
    if abs(own / torchs - 1) > 1e-3:  # noqa: PLR2004 - of float32
        raise LabError(f"they train other models: loss {torchs} by torch, {own} by pmesh")
    return int(max(ratios) > STEP_BAR or bubble > by_schedule + BUBBLE_BAR)


@contextmanager
def slow_mesh(lab: NetLab, mbit: int) -> Generator[LabMesh]:
    """Agents on all hosts, each with a line of this speed, that agree on a view."""
    with LabMesh(lab) as mesh:
        for host in lab.hosts:
            lab.shape(host, bits_per_s=mbit * 1_000_000)
        mesh.start_agents()
        mesh.await_view()
        yield mesh


def result_of(rank: LabProgram) -> dict[str, Any]:
    """What the rank has printed last, at its end. Raises LabError if it failed."""
    if rank.join(within_s=PATIENCE_S) or not rank.reports:
        raise LabError(rank.shown)
    return rank.reports[-1]
