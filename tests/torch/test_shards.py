from collections.abc import Callable
from typing import Any

import pytest
import torch

import pmesh


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
        lambda p: torch.optim.Adagrad(p, 0.1),
        lambda p: torch.optim.Adadelta(p, 0.1),
        lambda p: torch.optim.AdamW(p, 0.1),
        lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
        lambda p: torch.optim.Adamax(p, 0.1),
        lambda p: torch.optim.NAdam(p, 0.1),
        lambda p: torch.optim.RAdam(p, 0.1),
    ],
)
def test_a_shard_names_the_bytes_that_torchs_optimizers_keep(
    make: Callable[[list[torch.Tensor]], Any],
) -> None:
    weights = torch.ones(100, requires_grad=True)
    weights.grad = torch.ones(100)
    optimizer = make([weights])
    optimizer.step()
    state = optimizer.state[weights].values()
    kept = sum(x.nbytes for x in state if torch.is_tensor(x) and x.numel() == 100)
    assert pmesh.Shard.of(0, 1, 100).bytes(optimizer) == kept
