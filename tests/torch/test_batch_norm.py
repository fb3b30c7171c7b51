"""SyncBatchNorm beside one process that has the joined batch."""

from typing import Any

import pytest
import torch
from torch import nn

from pmesh.client.mesh import Mesh
from pmesh.errors import UsageError
from pmesh.testing import SimulatedMesh
from pmesh.torch import SyncBatchNorm
from tests.torch.groups import group_of

ROWS = (5, 0, 2)
"""Of each rank."""
CHANNELS = 4


def batches(shape: tuple[int, ...], dtype: torch.dtype, about: float) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    values = torch.rand(sum(ROWS), CHANNELS, *shape, generator=made, dtype=torch.float64)
    return list((about + 2 * values - 1).to(dtype).split(ROWS))


def weighed(normal: torch.Tensor, begin: int) -> torch.Tensor:
    """A loss in which every value counts differently."""
    weights = torch.arange(begin, begin + normal.numel(), dtype=torch.float64).reshape(normal.shape)
    return (normal.double() * torch.sin(weights)).sum()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize(
    ("dtype", "about"), [(torch.float32, 0.0), (torch.float32, 1e6), (torch.float64, 1e6)]
)
def test_ranks_with_unequal_batches_get_what_one_process_gets(
    shape: tuple[int, ...], dtype: torch.dtype, about: float
) -> None:
    given = batches(shape, dtype, about)

    def train(mesh: Mesh) -> tuple[torch.Tensor, ...]:
        norm = SyncBatchNorm(CHANNELS, momentum=0.3, process_group=group_of(mesh)).to(dtype)
        x = given[mesh.rank].clone().requires_grad_()
        begin = sum(part.numel() for part in given[: mesh.rank])
        y = norm(x)
        weighed(y, begin).backward()
        assert x.grad is not None
        return y, x.grad, norm.running_mean, norm.running_var, norm.weight.grad, norm.bias.grad

    found = SimulatedMesh(len(ROWS)).run(train)

    alone = nn.BatchNorm1d(CHANNELS, momentum=0.3, dtype=torch.float64)
    joined = torch.cat(given).double().requires_grad_()
    y = alone(joined.reshape(*joined.shape[:2], -1).squeeze(-1)).reshape(joined.shape)
    weighed(y, 0).backward()
    assert joined.grad is not None
    assert alone.weight.grad is not None

    def close(ours: torch.Tensor, one: torch.Tensor) -> None:
        torch.testing.assert_close(ours.double(), one.double(), rtol=1e-5, atol=1e-5)

    close(torch.cat([each[0] for each in found]), y)
    close(torch.cat([each[1] for each in found]), joined.grad)
    close(found[0][2], alone.running_mean)
    close(found[0][3], alone.running_var)
    close(sum((each[4] for each in found), torch.zeros(CHANNELS)), alone.weight.grad)
    assert all(torch.equal(each[i], found[0][i]) for each in found for i in (2, 3))


def op_after(mesh: Mesh) -> int:
    """The number of an op that is made now."""
    mesh.barrier()
    assert mesh.last_op is not None
    return mesh.last_op.op


def test_it_makes_one_op_forward_and_one_backward() -> None:
    def train(mesh: Mesh) -> tuple[int, int]:
        norm = SyncBatchNorm(CHANNELS, process_group=group_of(mesh))
        begun = op_after(mesh)
        y = norm(torch.rand(3, CHANNELS, requires_grad=True))
        halfway = op_after(mesh)
        y.sum().backward()
        return halfway - begun - 1, op_after(mesh) - halfway - 1

    assert SimulatedMesh(2).run(train) == [(1, 1)] * 2


def test_one_process_alone_needs_no_group() -> None:
    x = torch.rand(6, CHANNELS)
    norm, plain = SyncBatchNorm(CHANNELS, momentum=None), nn.BatchNorm1d(CHANNELS, momentum=None)
    for batch in (x, 3 * x):
        torch.testing.assert_close(norm(batch), plain(batch))
    torch.testing.assert_close(norm.state_dict(), plain.state_dict())
    torch.testing.assert_close(norm.eval()(x), plain.eval()(x))


def test_bfloat16_and_no_scale_or_statistics_work_too() -> None:
    x = torch.rand(6, CHANNELS).bfloat16()
    norm = SyncBatchNorm(CHANNELS, affine=False, track_running_stats=False)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float().mean(0), torch.zeros(CHANNELS), atol=0.02, rtol=0)
    torch.testing.assert_close(norm.eval()(x).float(), y.float(), atol=0.02, rtol=0)


def test_convert_keeps_parameters_statistics_and_mode_of_shared_layers() -> None:
    shared = nn.BatchNorm1d(3)
    frozen = nn.BatchNorm2d(5, eps=0.1, momentum=0.2, affine=False).eval()
    model: Any = nn.Sequential(
        shared, nn.Sequential(frozen, nn.ReLU()), shared, nn.SyncBatchNorm(2)
    )
    before = model.state_dict()
    names = [name for name, _ in model.named_parameters()]
    assert SyncBatchNorm.convert(model) is model
    assert model[0] is model[2]
    assert model[0].weight is shared.weight
    assert all(isinstance(model[i], SyncBatchNorm) for i in (0, 3))
    assert (model[1][0].eps, model[1][0].momentum, model[1][0].training) == (0.1, 0.2, False)
    assert [name for name, _ in model.named_parameters()] == names
    torch.testing.assert_close(dict(model.state_dict()), dict(before))
    assert isinstance(SyncBatchNorm.convert(shared), SyncBatchNorm)


def test_what_it_cannot_normalize_is_refused() -> None:
    with pytest.raises(UsageError, match=r"takes \[N, 4, ...\], not \[2, 3\]"):
        SyncBatchNorm(4)(torch.rand(2, 3))
    with pytest.raises(UsageError, match="at least two values per channel"):
        SyncBatchNorm(4)(torch.rand(1, 4))
