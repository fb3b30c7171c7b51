"""What shares by measured speed are worth: three ranks held to 1 : 2 : 4 of a core's time.

Each rank trains the same classifier of handwritten digits, in a control group of its own. Its speed
alone is measured first, then that of all together: with even shares, with measured ones, and after
the fastest rank has been throttled to a quarter. Needs root on Linux.
"""

import hashlib
import itertools
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import pmesh
from pmesh.testing import agent_in_a_thread
from tools.lab.call import fork_for
from tools.lab.commands import LabError
from tools.lab.mesh import inherited
from tools.lab.program import LabProgram, await_that
from tools.lab.warm import Warm

CORES = (0.2, 0.4, 0.8)
"""What each rank may use of one core."""
ROWS = 6720
RATE = 0.05
PERIOD_US = 10_000  # short beside a step, so that all steps take as long
ADAPTS = 10  # steps
MOST_APART = 1e-5

Floats: TypeAlias = NDArray[np.float32]
Library: TypeAlias = Literal["numpy", "torch"]


class ControlGroup:
    """Processes that may use so much of a core; both versions of Linux's control groups."""

    def __init__(self, name: str) -> None:
        first = Path("/sys/fs/cgroup/cpu")
        self._is_first = first.is_dir()
        self._path = (first if self._is_first else Path("/sys/fs/cgroup")) / name

    def __enter__(self) -> Self:
        self._path.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self._path.rmdir()

    def hold(self, cores: float) -> None:
        """Let its processes use this much of one core, all together."""
        quota_us = round(cores * PERIOD_US)
        if self._is_first:
            (self._path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._path / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (self._path / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")

    def add(self, pid: int) -> None:
        (self._path / "cgroup.procs").write_text(str(pid))


def digits() -> tuple[Floats, Floats]:
    """Scikit-learn's digits as they are, and moved by a pixel in each direction."""
    images, labels = load_digits(return_X_y=True)
    square: Floats = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    moves = itertools.product((-1, 0, 1), repeat=2)
    x = np.concatenate([np.roll(square, move, (1, 2)).reshape(-1, 64) for move in moves])
    return x, np.tile(np.eye(10, dtype=np.float32)[labels], (9, 1))


def train(job: str, ranks: int, steps: int, hidden: int, out: str) -> None:
    """One rank; prints the time of each step and a hash of the weights, which rank 0 saves."""
    x, y = digits()
    dice = np.random.default_rng(0)
    w1 = dice.normal(0, 0.1, (64, hidden)).astype(np.float32)
    w2 = dice.normal(0, 0.1, (hidden, 10)).astype(np.float32)
    with pmesh.connect(job, ranks) as mesh:
        weights = [w1, w2]
        while mesh.step < steps:
            w1, w2 = weights = mesh.sync(weights)
            mine = mesh.batch(len(x), ROWS, epoch=mesh.step)
            active = np.maximum(x[mine] @ w1, 0)
            scores = np.exp(active @ w2)
            error = scores / scores.sum(1, keepdims=True) - y[mine]
            back = (error @ w2.T) * (active > 0)
            gradients = [x[mine].T @ back / len(mine), active.T @ error / len(mine)]
            mean = mesh.average_gradients(gradients, weight=len(mine))
            weights = [w - RATE * g for w, g in zip(weights, mean, strict=True)]
            print(f"step {mesh.step} {time.monotonic()} {len(mine)}", flush=True)
        values = np.concatenate([w.reshape(-1) for w in weights])
        if mesh.rank == 0:
            np.save(out, values)
        print("hash", hashlib.sha256(values.tobytes()).hexdigest(), flush=True)


def train_torch(job: str, ranks: int, steps: int, hidden: int, out: str) -> None:
    """The same by torch's own DDP, whose rows `DistributedBatchSampler` deals."""
    os.environ |= {"PMESH_JOB": job, "PMESH_WAIT_FOR": str(ranks)}
    import torch  # noqa: PLC0415 - the other training needs none

    from pmesh.torch import DistributedBatchSampler  # noqa: PLC0415 - imports torch

    torch.set_num_threads(1)
    x, y = map(torch.from_numpy, digits())
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10)
    )
    torch.distributed.init_process_group("pmesh")
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
    sampler = DistributedBatchSampler(x, ROWS)
    for step, mine in enumerate(itertools.islice(forever(sampler), steps)):
        scale = sampler.begin_step(len(mine))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(x[mine]), y[mine])
        (loss * scale).backward()
        optimizer.step()
        print(f"step {step} {time.monotonic()} {len(mine)}", flush=True)
    values = torch.cat([each.detach().reshape(-1) for each in net.parameters()]).numpy()
    if torch.distributed.get_rank() == 0:
        np.save(out, values)
    print("hash", hashlib.sha256(values.tobytes()).hexdigest(), flush=True)
    torch.distributed.destroy_process_group()


def forever(batches: Iterable[list[int]]) -> Iterator[list[int]]:
    """Epoch after epoch."""
    while True:
        yield from batches


TRAININGS = {"numpy": train, "torch": train_torch}
IMPORTED = {
    "numpy": ("tools.shares",),
    "torch": ("tools.shares", "torch._dynamo", "pmesh.torch"),  # DDP needs _dynamo
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""A process that forks may have no others."""


class Trial:
    """Trainings, each rank in a control group."""

    def __init__(
        self,
        home: Path,
        groups: Sequence[ControlGroup],
        warm: Warm,
        library: Library,
        hidden: int,
    ) -> None:
        self._home = home
        self._groups = groups
        self._warm = warm
        self._train = TRAININGS[library]
        self._hidden = hidden
        self._count = 0

    def run(
        self, who: Sequence[int], steps: int, *, shares: str, throttled: bool = False
    ) -> tuple[list[float], Path]:
        """Train; return when each step ended, and where the weights are."""
        self._count += 1
        out = self._home / f"weights {self._count}.npy"
        settings = {"PMESH_HOME": str(self._home), "PMESH_SHARES": shares}
        job = f"trial-{self._count}"
        environment = inherited() | settings | ONE_THREAD
        order = fork_for(self._train, environment, job, len(who), steps, self._hidden, str(out))
        for rank in who:
            self._groups[rank].hold(1.0)  # until it trains
        with ExitStack() as stack:
            programs = list[LabProgram]()
            for rank in who:
                started = LabProgram(f"rank {rank}", *self._warm.start(order))
                programs.append(stack.enter_context(started))
                self._groups[rank].add(started.pid)
            await_that(lambda: all(p.lines for p in programs), "steps", of=programs)
            for rank in who:
                self._groups[rank].hold(CORES[rank])
            if throttled:
                await_that(lambda: len(programs[0].lines) >= steps // 2, "steps", of=programs)
                self._groups[who[-1]].hold(CORES[who[-1]] / 4)
            for program in programs:
                program.join(within_s=600)
            if not all(program.last_line("hash").text for program in programs):
                raise LabError("\n".join(program.shown for program in programs))
        hashes = {program.last_line("hash").text for program in programs}
        assert len(hashes) == 1, "the ranks have different weights"  # noqa: S101 - a finding
        steps_of = [line.split() for line in programs[0].printed() if line.startswith("step")]
        return [float(at) for _, _, at, _ in steps_of], out


def rate(ends: Sequence[float]) -> float:
    """Rows a second, by the median step."""
    return ROWS / median(after - before for before, after in itertools.pairwise(ends))


def run(
    *, library: Library = "numpy", steps: int = 200, alone: int = 20, hidden: int = 4096
) -> int:
    """Three ranks held to 1 : 2 : 4 of a core's time; exits with 1 if their weights are wrong.

    Args:
        library: "numpy" with `mesh.batch`, or "torch" with its own DDP and pmesh's batch sampler.
        steps: Of each training of all three.
        alone: The steps of each rank alone; with 0 nothing but the weights is looked at.
        hidden: The units of the hidden layer: how much there is to compute.
    """
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pmesh-")))
        stack.enter_context(agent_in_a_thread(home))
        names = [f"pmesh-shares-{home.name}-{rank}" for rank in range(len(CORES))]
        groups = [stack.enter_context(ControlGroup(name)) for name in names]
        warm = stack.enter_context(closing(Warm(IMPORTED[library], inherited() | ONE_THREAD)))
        trial = Trial(home, groups, warm, library, hidden)
        everyone = range(len(CORES))
        singles = [rate(trial.run([r], alone, shares="even")[0][3:]) for r in everyone if alone]
        even_ends, even_weights = trial.run(everyone, steps, shares="even")
        ends, weights = trial.run(everyone, steps, shares="measured")
        apart = float(np.abs(np.load(weights) - np.load(even_weights)).max())
        print(f"weights after {steps} steps differ by at most {apart:.1e}")
        if alone:
            print(f"alone: {', '.join(f'{single:.0f}' for single in singles)} rows a second")
            whole = sum(singles)
            reached = rate(ends[ADAPTS:]) / whole
            print(
                f"even shares: {rate(even_ends[3:]) / whole:.2f} of the sum, measured {reached:.2f}"
            )
            ends, _ = trial.run(everyone, steps, shares="measured", throttled=True)
            whole -= singles[-1] * 3 / 4
            throttled = rate(ends[steps // 2 + ADAPTS :]) / whole
            print(
                f"the fastest throttled to a quarter: {throttled:.2f} of the sum, "
                f"{ADAPTS} steps later"
            )
    return int(apart > MOST_APART)
