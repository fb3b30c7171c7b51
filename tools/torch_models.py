"""The models that `tools.torch_bench` trains, with a batch of real data for each.

The batches are small, so that most of a step is communication.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, interpolate


class TorchModel(NamedTuple):
    """A network, its parts that FSDP2 shards one by one, and the loss of a batch."""

    network: nn.Module
    parts: list[nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]


class _Residual(nn.Module):
    """The basic block of ResNet (He et al. 2015, arXiv 1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride > 1:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.residual(x) + self.shortcut(x))


def resnet18() -> TorchModel:
    """ResNet18 for small images, 11.2 M parameters, on 8 of scikit-learn's digits."""
    blocks: list[nn.Module] = []
    inputs = 64
    for outputs in (64, 128, 256, 512):
        blocks += [
            _Residual(inputs, outputs, stride=1 if outputs == inputs else 2),
            _Residual(outputs, outputs, stride=1),
        ]
        inputs = outputs
    network = nn.Sequential(
        *(nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *blocks,
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)),
    )
    images, labels = (torch.from_numpy(each[:8]) for each in load_digits(return_X_y=True))
    x = interpolate(images.float().view(8, 1, 8, 8) / 16, scale_factor=2)
    return TorchModel(network, blocks, lambda network: cross_entropy(network(x), labels))


def transformer() -> TorchModel:
    """A transformer that reads bytes, 25 M parameters, on 64 bytes of the standard library."""
    layers: list[nn.Module] = [
        nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(8)
    ]
    network = nn.Sequential(nn.Embedding(256, 512), *layers, nn.Linear(512, 256))
    text = torch.tensor(list(Path(inspect.__file__).read_bytes()[:65]))
    before, after = text[None, :-1], text[1:]
    return TorchModel(network, layers, lambda network: cross_entropy(network(before)[0], after))


MODELS: dict[str, Callable[[], TorchModel]] = {"ResNet18": resnet18, "transformer": transformer}
