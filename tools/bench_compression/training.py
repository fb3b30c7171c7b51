"""The model that both train: a perceptron of 4.3 M parameters on scikit-learn's digits, in torch.

Weights, samples and the optimizer are the same for both, so what differs is who averages the
gradients: DistributedDataParallel with torch's own powerSGD_hook over gloo, while it goes backward,
or `mesh.average_gradients` with PowerSGD afterwards.
"""

import importlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from pmesh.compression.schemes import PowerSGD
from tools.bench_compression.orders import Answer
from tools.chaos.digits import load

WIDTH = 2048
LAYERS = (64, WIDTH, WIDTH, 10)
PARAMETERS = sum((before + 1) * after for before, after in itertools.pairwise(LAYERS))
BATCH = 32  # samples of each rank
LEARNING_RATE = 0.2
RANK = 4
START_STEP = 10
"""Of both: pmesh's default; torch's is 1000."""
SEED = 7
# powerSGD_hook waits for its second all-reduce in a thread of gloo's, which has two: with two
# buckets nothing is left to run it, and it hangs (pytorch issue 48478).
ONE_BUCKET_MB = 100

Average = Callable[[list[Any]], list[Any]]
"""The mean of all ranks' gradients."""


@dataclass(slots=True)
class Training:
    """One rank's, from step to step."""

    torch: Any
    model: Any
    """What a batch goes through: the perceptron itself, or DDP around it."""
    average: Average | None
    """None: the model averages its gradients itself."""
    optimizer: Any
    rank: int
    size: int
    steps: int = 0

    def run(self, steps: int) -> Answer:
        """So many steps; the loss over all samples and a digest of the weights afterwards."""
        pixels, labels = map(self.torch.from_numpy, load())
        seconds: list[float] = []
        cpu_s = time.process_time()
        for _ in range(steps):
            mine = self._samples(len(labels))
            began = time.perf_counter()
            self._step(pixels[mine], labels[mine])
            seconds.append(time.perf_counter() - began)
        cpu_s = time.process_time() - cpu_s
        with self.torch.no_grad():
            loss = float(self._loss(pixels, labels))
        weights = [p.detach().numpy() for p in self.model.parameters()]
        digest = xxhash.xxh3_128()
        for each in weights:
            digest.update(np.ascontiguousarray(each).data)
        return Answer(
            seconds=tuple(seconds), cpu_s=cpu_s, digest=digest.hexdigest(), loss=round(loss, 7)
        )

    def _step(self, pixels: Any, labels: Any) -> None:  # noqa: ANN401 - tensors
        self.optimizer.zero_grad()
        self._loss(pixels, labels).backward()
        if self.average is not None:
            parameters = list(self.model.parameters())
            means = self.average([p.grad for p in parameters])
            for parameter, mean in zip(parameters, means, strict=True):
                parameter.grad = mean
        self.optimizer.step()
        self.steps += 1

    def _loss(self, pixels: Any, labels: Any) -> Any:  # noqa: ANN401 - tensors
        return self.torch.nn.functional.cross_entropy(self.model(pixels), labels)

    def _samples(self, count: int) -> Any:  # noqa: ANN401 - a tensor
        """This rank's part of the step's batch, which is drawn alike everywhere."""
        drawn = np.random.default_rng([SEED, self.steps]).permutation(count)
        return self.torch.from_numpy(drawn[self.rank * BATCH :][:BATCH])


def training_by_pmesh(mesh: Any) -> Training:  # noqa: ANN401 - a Mesh
    """Gradients go through `mesh.average_gradients`."""
    torch, model = _perceptron()
    scheme = PowerSGD(rank=RANK, start_step=START_STEP)

    def average(gradients: list[Any]) -> list[Any]:
        means: list[Any] = mesh.average_gradients(gradients, compression=scheme)
        return means

    return _training(torch, model, average, mesh.rank, mesh.size)


def training_by_torch(rank: int, size: int) -> Training:
    """Gradients go through powerSGD_hook, within `torch.distributed`, which is initialized."""
    torch, model = _perceptron()
    hook: Any = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
    state = hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=RANK, start_powerSGD_iter=START_STEP
    )
    wrapped.register_comm_hook(state, hook.powerSGD_hook)
    return _training(torch, wrapped, None, rank, size)


def _training(
    torch: Any,  # noqa: ANN401 - a module
    model: Any,  # noqa: ANN401 - a module of torch
    average: Average | None,
    rank: int,
    size: int,
) -> Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return Training(torch, model, average, optimizer, rank, size)


def _perceptron() -> tuple[Any, Any]:
    """Of the same weights at each call."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)  # ranks share the machine's cores, as torchrun has it too
    torch.manual_seed(SEED)
    layers: list[Any] = []
    for before, after in itertools.pairwise(LAYERS):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch, torch.nn.Sequential(*layers[:-1])
