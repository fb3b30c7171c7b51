"""Elastic training with DDP, each function a program for every rank."""

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import pmesh.torch
from tests.torch.reported import reported
from tests.torch.start import fork
from tests.torch.starts import refused

ROWS = 120
"""Of a step of all ranks together, however many they are: a loss of a rank is none of rows."""
STEPS, KILLED_AT = 200, 40


def check_same(mesh: pmesh.Mesh, model: nn.Module) -> None:
    """Every rank has the same bits in weights and buffers."""
    held = mesh.all_gather_object(digest_of(model))
    assert held == held[:1] * mesh.size, held


def digest_of(model: nn.Module) -> str:
    hashed = hashlib.sha256()
    for each in model.state_dict().values():
        hashed.update(each.numpy().tobytes())
    return hashed.hexdigest()


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    return images.float() / 16, labels


def comes_back(rank: int, folder: str, kills: str) -> None:
    """Train digits; rank 1 is killed between two buckets of a backward pass, and starts again."""

    def end_of(*, will_die: bool) -> int:
        child = fork(rank, lambda rank: train_digits(rank, Path(folder), will_die=will_die))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    if kills == "killed" and rank == 1:
        assert end_of(will_die=True) == -signal.SIGKILL
    assert end_of(will_die=False) == 0


def train_digits(rank: int, folder: Path, *, will_die: bool) -> None:
    images, labels = digits()
    mesh = pmesh.torch.init(elastic=True)
    torch.manual_seed(1 + mesh.rank)  # both trainings begin with the weights of their rank 0
    entered_late = mesh.rank < 0
    first = nn.Linear(64, 32)
    net = nn.Sequential(first, nn.Tanh(), nn.Linear(32, 10))
    model = pmesh.torch.DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.Adam(model.parameters(), 0.02, weight_decay=1e-2)
    # Steps beyond these, while the killed one is away, change nothing.
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)

    def die(_: torch.Tensor) -> None:  # the gradients of the last layer are under way
        if mesh.step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    if will_die:
        first.weight.register_hook(die)
    sizes = set[int]()
    while mesh.step < STEPS or mesh.size < 3:  # the killed one may come back late
        pmesh.torch.sync(model, optimizer, schedule)
        mine = mesh.shard(len(images), epoch=mesh.step)[: ROWS // mesh.size]
        optimizer.zero_grad()
        cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        schedule.step()
        pmesh.torch.report(step=mesh.step)
        sizes.add(mesh.size)
    check_same(mesh, model)
    assert {"step": mesh.step} in reported(mesh._job)
    with torch.no_grad():
        loss = cross_entropy(model(images), labels).item()
    found = {"rank": mesh.rank, "size": mesh.size, "sizes": sizes, "late": entered_late}
    torch.save(found | {"loss": loss}, folder / f"{rank}.pt")
    mesh.close()


class NetWithOptionalLayer(nn.Module):
    """A net with a layer that is used only for an odd number of samples."""

    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(30) if normed else nn.Identity()
        self.first = nn.Sequential(nn.Linear(64, 30), norm, nn.Tanh())
        self.sometimes, self.last = nn.Linear(30, 30), nn.Linear(30, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(self.sometimes(y) if len(x) % 2 else y)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "int8": {"gradient_as_bucket_view": True, "compression": "int8"},
    "low rank": {"compression": pmesh.PowerSGD(rank=2, start_step=2)},
}


def enters_late(rank: int, folder: str) -> None:
    """Two train, and a third enters: DDP has laid out their buckets anew, but not yet its own."""
    for way in WAYS:
        enters_late_in(way, rank, Path(folder) / f"{way} begun")


def enters_late_in(way: str, rank: int, begun: Path) -> None:
    if rank == 2:
        begun.read_text()  # a named pipe: returns once the others have trained
    images, labels = digits()
    torch.manual_seed(rank)
    mesh = pmesh.torch.init(pmesh.torch.Options(job=way, wait_for=2), elastic=True)
    net = NetWithOptionalLayer(normed=True)
    model = pmesh.torch.DistributedDataParallel(net, bucket_cap_mb=0.005, **WAYS[way])
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    place = {"together": 0}
    while place["together"] < 4:
        pmesh.torch.sync(model, optimizer, schedule, place)
        samples = 17 + (mesh.rank % 2 if way == "unused" else 0)
        mine = mesh.shard(len(images), epoch=mesh.step)[:samples]
        model.gradient_weight = len(mine)
        optimizer.zero_grad()
        cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        schedule.step()
        place["together"] += mesh.size == 3
        if mesh.step == 4 and mesh.rank == 0:
            begun.write_text("3 steps are done")
    pmesh.torch.sync(model, optimizer, schedule, place)  # the means of BatchNorm
    check_same(mesh, model)
    assert schedule.last_epoch == mesh.step - 1
    assert {int(each["step"]) for each in optimizer.state.values()} == {mesh.step - 1}
    mesh.close()


def adds_up(rank: int) -> None:
    """Batches of several sizes, in two parts, one layer unused on a rank: the gradient of all."""
    images, labels = digits()
    torch.manual_seed(rank)
    mesh = pmesh.torch.init(elastic=True)
    net = NetWithOptionalLayer(normed=False)
    model = pmesh.torch.DistributedDataParallel(net, find_unused_parameters=True)
    for sizes in ([2, 5, 0], [4, 2, 6]):  # an odd number uses the layer; 0: no samples are left
        model.zero_grad()
        pmesh.torch.sync(model)
        ends = [sum(sizes[: each + 1]) for each in range(3)]
        parts = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        mine = list(parts[mesh.rank])
        model.gradient_weight = 2 * len(mine)
        with model.no_sync():
            cross_entropy(model(images[mine]), labels[mine]).backward()
        cross_entropy(model(images[mine]), labels[mine]).backward()
        alone = NetWithOptionalLayer(normed=False)
        alone.load_state_dict(net.state_dict())
        for part in parts:
            if part:
                loss = cross_entropy(alone(images[part]), labels[part], reduction="sum")
                (2 * loss / ends[-1]).backward()
        for own, expected in zip(net.parameters(), alone.parameters(), strict=True):
            if expected.grad is None:
                assert own.grad is None or not own.grad.any()
            else:
                assert own.grad is not None
                torch.testing.assert_close(own.grad, expected.grad)
    mesh.close()


class TwoParameters(nn.Module):
    """Two parameters, whose gradients are the input: each is a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * (self.first + self.last)).sum()

    def gradients(self) -> list[list[float]]:
        return [each.grad.tolist() for each in (self.first, self.last) if each.grad is not None]


def guards(_: int) -> None:
    """Rank 1 has a NaN in one of two buckets: it is left out there, or all ranks get an error."""
    mesh = pmesh.torch.init(elastic=True)
    mine, of_all, of_others = torch.full((2,), 4.0**mesh.rank), [7.0, 7.0], [8.5, 8.5]
    for mode in ("skip", "raise"):
        net = TwoParameters()
        model = pmesh.torch.DistributedDataParallel(net, bucket_cap_mb=1e-6, on_nonfinite=mode)
        spoilt = net.first.register_hook(lambda g: g * torch.nan if mesh.rank == 1 else g)
        pmesh.torch.sync(model)
        if mode == "skip":
            model(mine).backward()
            assert net.gradients() == [of_others, of_all]
        else:
            with refused(r"NonFiniteGradients: the gradients of rank 1 \(.*\) are NaN or infinite"):
                model(mine).backward()
        spoilt.remove()
        model.zero_grad()
        pmesh.torch.sync(model)
        model(mine).backward()  # the next step
        assert net.gradients() == [of_all, of_all]
    mesh.close()


def refuses(rank: int, folder: str) -> None:
    """What can't be elastic says so, on each rank, and nothing waits."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    net = nn.Linear(2, 2)
    with refused(r"call pmesh.torch.init\(elastic=True\) first"):
        pmesh.torch.DistributedDataParallel(net)
    with refused("AgentNotRunning.*pmesh up"):
        pmesh.torch.init(pmesh.torch.Options(home=f"{folder}/nobody"), elastic=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with refused("has a process group already"):
        pmesh.torch.init(elastic=True)
    dist.destroy_process_group()
    mesh = pmesh.torch.init(elastic=True)
    with refused("a process group has a fixed number of ranks"):
        dist.init_process_group("pmesh")
    with refused("a process group has a fixed number of ranks"):
        dist.init_process_group("pmesh", store=dist.HashStore(), rank=0, world_size=1)
    with refused("a process group has a fixed number of ranks"):
        fully_shard(net)
    with refused("Default process group has not been initialized"):
        nn.parallel.DistributedDataParallel(net)
    for norm in (nn.SyncBatchNorm(2), pmesh.torch.SyncBatchNorm(2)):
        with refused("SyncBatchNorm needs a fixed number of ranks"):
            pmesh.torch.DistributedDataParallel(nn.Sequential(net, norm))
    with refused("takes compression, on_nonfinite, device_ids.* not static_graph"):
        pmesh.torch.DistributedDataParallel(net, static_graph=True)
    with refused("on_nonfinite is one of .*, not 'ignore'"):
        pmesh.torch.DistributedDataParallel(net, on_nonfinite="ignore")
    model = pmesh.torch.DistributedDataParallel(net)
    with refused("join is for a fixed number of ranks"):
        model.join()
    with refused("sync takes modules.* not a generator"):
        pmesh.torch.sync(model.parameters())
    with refused(r"call pmesh.torch.sync\(model, optimizer\) at the top"):
        model(torch.ones(1, 2))
    with refused("only dense torch tensors with data"):
        pmesh.torch.sync(pmesh.torch.DistributedDataParallel(nn.Linear(2, 2, device="meta")))
    with torch.no_grad():
        model(torch.ones(1, 2))  # looks only at what this rank has
    mesh.close()


def disagree(_: int) -> None:
    """Ranks that do not do the same get an error, all of them."""
    mesh = pmesh.torch.init(elastic=True)
    rank = mesh.rank  # who connects first is rank 0: any of the processes
    of_rank = [
        nn.Linear(2, 3 if rank == 1 else 2),
        nn.Linear(2, 2, dtype=torch.float64 if rank else None),
    ]
    for net in of_rank:
        model = pmesh.torch.DistributedDataParallel(net)
        model._elastic.synced.add(model)  # sync would bring one shape to all
        with refused("OpMismatch"):
            model(torch.ones(1, 2, dtype=net.weight.dtype)).sum().backward()
    net = nn.Linear(2, 2)
    model = pmesh.torch.DistributedDataParallel(net)
    pmesh.torch.sync(model)
    with refused("OpMismatch"):
        if rank == 0:
            pmesh.torch.sync(model)
        else:
            model(torch.ones(1, 2)).sum().backward()
    pmesh.torch.sync(model)  # all start the step again
    model(torch.ones(1, 2)).sum().backward()
    with refused("2 parts to sync, and the job's state has 1" if rank else "nothing"):
        pmesh.torch.sync(*([model, {}] if rank else [model]))
        raise ValueError("nothing")
    mesh.close()
