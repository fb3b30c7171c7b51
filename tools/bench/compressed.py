"""The schemes, what a worker compresses, and the training that it does beside torch's PowerSGD.

Reduced are Gaussian values, the same in each run, as a matrix or as a model's arrays. Trained is a
perceptron of 4.3 M parameters on scikit-learn's digits, in torch. Weights, samples and the
optimizer are the same for both, so what differs is who averages the gradients:
DistributedDataParallel with torch's own powerSGD_hook over gloo, while it goes backward, or
`mesh.average_gradients` with PowerSGD afterwards.
"""

import importlib
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

import pmesh
from pmesh.compression.schemes import BF16, FP16, INT8, Auto, OneBit, PowerSGD, Scheme, TopK
from tools.bench.results import Layout, Order, RankAnswer
from tools.chaos.trainer import load

Values: TypeAlias = NDArray[np.float32]

UNCOMPRESSED = "none"
RATIO = 0.01
VALUES_SEED = 11
TURN = 7919  # a prime: ranks' values have nothing to do with each other's at any place
PIECE = 1 << 16
STAGES = ((64, 64), (64, 128), (128, 256), (256, 512))  # channels in and out of a ResNet18's
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


@dataclass(frozen=True, slots=True)
class NamedScheme:
    """One way to send the values of an all-reduce."""

    label: str
    """For the page."""
    scheme: Scheme | None
    most_error: float | None = 1.0
    """Relative L2 error of a mean of Gaussian values over up to 8 ranks; None: with feedback a
    result also holds what earlier calls had left out."""
    allowed: tuple[str, ...] = ()
    """What Auto may pick, among these names."""


def _fed_back(label: str, scheme: Scheme) -> NamedScheme:
    return NamedScheme(f"{label}, with feedback", scheme, None)


WAYS: Mapping[str, NamedScheme] = MappingProxyType(
    {
        UNCOMPRESSED: NamedScheme("uncompressed", None, 1e-6),
        "bf16": NamedScheme("bf16", BF16(), 0.01),
        "fp16": NamedScheme("fp16", FP16(), 0.002),
        "int8": NamedScheme("int8", INT8(), 0.015),  # the bar for 8 ranks
        "topk": NamedScheme("TopK 1 %", TopK(RATIO)),
        "topk-compact": NamedScheme("TopK 1 %, compact", TopK(RATIO, compact=True)),
        "onebit": NamedScheme("OneBit", OneBit()),
        "powersgd-1": NamedScheme("PowerSGD, rank 1", PowerSGD(rank=1)),
        "powersgd-2": NamedScheme("PowerSGD, rank 2", PowerSGD(rank=2)),
        "powersgd-4": NamedScheme("PowerSGD, rank 4", PowerSGD(rank=4)),
        "int8-feedback": _fed_back("int8", INT8(error_feedback=True, model="int8")),
        "topk-feedback": _fed_back("TopK 1 %", TopK(RATIO, error_feedback=True, model="topk")),
        "powersgd-4-feedback": _fed_back(
            "PowerSGD, rank 4", PowerSGD(rank=4, error_feedback=True, model="powersgd")
        ),
        "auto": NamedScheme(
            "Auto of bf16, int8",
            Auto(allow=("bf16", "int8"), model="auto"),
            allowed=(UNCOMPRESSED, "bf16", "int8"),
        ),
        "auto-any": NamedScheme(
            "Auto of bf16, int8, TopK 1 %, PowerSGD rank 4",
            Auto(allow=("bf16", "int8", TopK(RATIO), PowerSGD(rank=4)), model="any"),
            allowed=(UNCOMPRESSED, "bf16", "int8", "topk", "powersgd-4"),
        ),
    }
)


def find_way(name: str) -> NamedScheme:
    """Raises ValueError, naming those that there are."""
    if name not in WAYS:
        raise ValueError(f"no scheme {name!r}; there are: {', '.join(WAYS)}")
    return WAYS[name]


@dataclass(frozen=True, slots=True)
class CheckedArrays:
    layout: Layout
    side: int
    own: list[Values]
    out: list[Values]
    """For the results."""
    right: Values
    """The exact mean, of all arrays one after the other."""

    def are_for(self, order: Order) -> bool:
        return (self.layout, self.side) == (order.layout, order.side)

    def error(self) -> float:
        """Relative L2 error of what is in `out`."""
        wrong = whole = 0.0
        place = 0
        for out in self.out:
            flat = out.reshape(-1)
            for start in range(0, flat.size, PIECE):
                piece = flat[start : start + PIECE]
                right = self.right[place + start :][: piece.size]
                off = piece - right
                wrong += float(np.dot(off, off))
                whole += float(np.dot(right, right))
            place += flat.size
        return math.sqrt(wrong / whole)


def shapes_of(layout: Layout, side: int) -> list[tuple[int, ...]]:
    """Of the arrays.

    >>> sum(math.prod(shape) for shape in shapes_of("resnet18", 0))
    11173962
    """
    if layout == "matrix":
        return [(side, side)]
    norm = 2  # of each convolution: scale and shift
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), *[(64,)] * norm]
    for before, after in STAGES:
        for channels in (before, after, after, after):
            shapes += [(after, channels, 3, 3), *[(after,)] * norm]
        if before != after:
            shapes += [(after, before, 1, 1), *[(after,)] * norm]
    return [*shapes, (10, 512), (10,)]


def arrays_of(order: Order, rank: int, size: int) -> CheckedArrays:
    shapes = shapes_of(order.layout, order.side)
    count = sum(map(math.prod, shapes))
    base = np.random.default_rng(VALUES_SEED).standard_normal(count, np.float32)
    right = np.zeros(count, np.float32)
    for each in range(size):
        right += np.roll(base, each * TURN)
    right /= np.float32(size)
    own = _cut(np.roll(base, rank * TURN), shapes)
    return CheckedArrays(order.layout, order.side, own, [np.zeros_like(x) for x in own], right)


def _cut(values: Values, shapes: list[tuple[int, ...]]) -> list[Values]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    parts = np.split(values, ends)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


class Ours:
    def __init__(self, mesh: pmesh.Mesh, cpu_s: Callable[[], float] = time.process_time) -> None:
        self._mesh = mesh
        self._cpu_s = cpu_s
        self._training: Perceptron | None = None
        self._arrays: CheckedArrays | None = None

    def carry_out(self, order: Order) -> RankAnswer:
        if order.what == "train":
            self._training = self._training or training_by_pmesh(self._mesh, self._cpu_s)
            return self._training.run(order.times)
        if self._arrays is None or not self._arrays.are_for(order):
            self._arrays = arrays_of(order, self._mesh.rank, self._mesh.size)
        return self._all_reduce(order, self._arrays)

    def _all_reduce(self, order: Order, arrays: CheckedArrays) -> RankAnswer:
        way = find_way(order.scheme)
        seconds: list[float] = []
        cpu_s = 0.0
        for _ in range(order.times):
            self._mesh.barrier()  # the slowest rank's time is that of the call alone
            began_cpu, began = self._cpu_s(), time.perf_counter()
            self._mesh.all_reduce(arrays.own, "mean", out=arrays.out, compression=way.scheme)
            seconds.append(time.perf_counter() - began)
            cpu_s += self._cpu_s() - began_cpu
        last = self._mesh.last_op
        why = "" if last is None else last.why
        digest = xxhash.xxh3_128()
        for each in arrays.out:
            digest.update(each.data)
        return RankAnswer(
            seconds=tuple(seconds),
            cpu_s=cpu_s,
            digest=digest.hexdigest(),
            error=arrays.error(),
            picked=f"{last.compression}: {why}" if last and why else "",
            settled=not why.startswith("trial"),
        )


@dataclass(slots=True)
class Perceptron:
    torch: Any
    model: Any
    """What a batch goes through: the perceptron itself, or DDP around it."""
    average: Average | None
    """None: the model averages its gradients itself."""
    optimizer: Any
    rank: int
    size: int
    cpu_s: Callable[[], float] = time.process_time
    steps: int = 0

    def run(self, steps: int) -> RankAnswer:
        """So many steps; the loss over all samples and a digest of the weights afterwards."""
        pixels, labels = map(self.torch.from_numpy, load())
        seconds: list[float] = []
        cpu_s = self.cpu_s()
        for _ in range(steps):
            mine = self._samples(len(labels))
            began = time.perf_counter()
            self._step(pixels[mine], labels[mine])
            seconds.append(time.perf_counter() - began)
        cpu_s = self.cpu_s() - cpu_s
        with self.torch.no_grad():
            loss = float(self._loss(pixels, labels))
        weights = [p.detach().numpy() for p in self.model.parameters()]
        digest = xxhash.xxh3_128()
        for each in weights:
            digest.update(np.ascontiguousarray(each).data)
        return RankAnswer(
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


def training_by_pmesh(mesh: pmesh.Mesh, cpu_s: Callable[[], float]) -> Perceptron:
    torch, model = _perceptron()
    scheme = PowerSGD(rank=RANK, start_step=START_STEP)

    def average(gradients: list[Any]) -> list[Any]:
        means: list[Any] = mesh.average_gradients(gradients, compression=scheme)
        return means

    return Perceptron(torch, model, average, _optimizer(torch, model), mesh.rank, mesh.size, cpu_s)


def training_by_torch(rank: int, size: int) -> Perceptron:
    """Gradients go through powerSGD_hook, within `torch.distributed`, which is initialized."""
    torch, model = _perceptron()
    hook: Any = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
    state = hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=RANK, start_powerSGD_iter=START_STEP
    )
    wrapped.register_comm_hook(state, hook.powerSGD_hook)
    return Perceptron(torch, wrapped, None, _optimizer(torch, wrapped), rank, size)


def _optimizer(torch: Any, model: Any) -> Any:  # noqa: ANN401 - torch's are open
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def _perceptron() -> tuple[Any, Any]:
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)  # ranks share the machine's cores, as torchrun has it too
    torch.manual_seed(SEED)
    layers: list[Any] = []
    for before, after in itertools.pairwise(LAYERS):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch, torch.nn.Sequential(*layers[:-1])
