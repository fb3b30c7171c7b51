"""What three ranks of `torch.distributed` do, on gloo and on pmesh: a program, run once for each.

Each function is a scenario, and returns what must be the same on both.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.torch.gloo import begin_gloo

Result = dict[str, Any]
RANKS = 3


def train(model: Any, optimizer: Any, steps: int = 4) -> list[float]:
    torch.manual_seed(100 + dist.get_rank())
    losses: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(5, 7)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 5), nn.ReLU(), nn.Linear(5, 1))


def full(parameters: Any) -> list[torch.Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in parameters]


def ddp(folder: Path) -> Result:
    model = nn.parallel.DistributedDataParallel(net(), bucket_cap_mb=0.0001)
    losses = train(model, torch.optim.Adam(model.parameters(), 0.01))
    return {"losses": losses, "weights": full(model.parameters())}


def power_sgd(folder: Path) -> Result:
    """torch's own hook, which makes calls where a call of its own has ended, and waits for them."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    model = nn.parallel.DistributedDataParallel(net())  # one bucket: with several gloo hangs
    state = power.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, power.powerSGD_hook)
    losses = train(model, torch.optim.SGD(model.parameters(), 0.01))
    return {"losses": losses, "weights": full(model.parameters())}


def ddp_unused(folder: Path) -> Result:
    class NetOfEachRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = net(), net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.one(x) if dist.get_rank() else self.two(x)
            return y

    model = nn.parallel.DistributedDataParallel(NetOfEachRank(), find_unused_parameters=True)
    losses = train(model, torch.optim.SGD(model.parameters(), 0.01))
    return {"losses": losses, "weights": full(model.parameters())}


def zero(folder: Path) -> Result:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    losses = train(model, optimizer)
    return {"losses": losses, "weights": full(model.parameters())}


def fsdp2(folder: Path) -> Result:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plain, mixed = net(), net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for model, options in ((plain, {}), (mixed, {"mp_policy": policy})):
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, **options)
        fully_shard(model, **options)
    losses = train(plain, torch.optim.Adam(plain.parameters(), 0.01))
    losses += train(mixed, torch.optim.Adam(mixed.parameters(), 0.01))
    return {"losses": losses, "weights": full(plain.parameters()) + full(mixed.parameters())}


def dtensor(folder: Path) -> Result:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (RANKS,))
    x = torch.arange(70.0).reshape(7, 10)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = (rows @ distribute_tensor(x.T.contiguous(), mesh, [Replicate()])).full_tensor()
    partial = (columns @ columns.T.redistribute(mesh, [Shard(0)])).full_tensor()
    return {"rows": rows.to_local(), "columns": columns.to_local(), "sums": [product, partial]}


def tensor_parallel(folder: Path) -> Result:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(5)
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = (model(torch.randn(4, 6)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sequence = nn.Sequential(nn.LayerNorm(6))
    parallelize_module(sequence, mesh, {"0": SequenceParallel()})
    normed = sequence(torch.randn(2, 6, 6)).full_tensor()
    return {"losses": losses, "weights": full(model.parameters()), "normed": normed}


def hsdp(folder: Path) -> Result:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    model = net()
    fully_shard(model, mesh=mesh)
    losses = train(model, torch.optim.SGD(model.parameters(), 0.01))
    return {"losses": losses, "weights": full(model.parameters())}


def checkpoint(folder: Path) -> Result:
    """Saved by three ranks, loaded by two of them."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (RANKS,))
    x = torch.arange(40.0).reshape(10, 4)
    state = {"x": distribute_tensor(x, mesh, [Shard(0)]), "n": torch.tensor(7)}
    dcp.save(state, checkpoint_id=folder / "checkpoint")
    two = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return {}
    fresh = {"x": torch.zeros(10, 4), "n": torch.tensor(0)}
    dcp.load(fresh, checkpoint_id=folder / "checkpoint", process_group=two)
    return fresh


def pipeline(folder: Path) -> Result:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    losses: list[float] = []
    weights: list[torch.Tensor] = []
    rank = dist.get_rank()
    for kind in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(rank)
        part = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))
        schedule = kind(stage, 4, loss_fn=lambda y, target: ((y - target) ** 2).mean())
        optimizer = torch.optim.SGD(part.parameters(), 0.1)
        for step in range(2):
            torch.manual_seed(step)
            x, target = torch.randn(8, 6), torch.randn(8, 6)
            optimizer.zero_grad()
            found: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(x)
            elif rank == RANKS - 1:
                schedule.step(target=target, losses=found)
            else:
                schedule.step()
            optimizer.step()
            losses += [loss.item() for loss in found]
        weights += full(part.parameters())
    return {"losses": losses, "weights": weights}


def objects(folder: Path) -> Result:
    rank = dist.get_rank()
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, {"rank": rank, "set": {rank, 7}})
    told = [("of", rank), None]
    dist.broadcast_object_list(told, src=1)
    gathered: list[Any] | None = [None] * RANKS if rank == 2 else None
    dist.gather_object((rank, "x" * rank), gathered, dst=2)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [{"for": i} for i in range(RANKS)] if not rank else None)
    return {"objects": [everyone, told, gathered, mine]}


def messages(folder: Path) -> Result:
    rank = dist.get_rank()
    found: Result = {}
    if rank == 0:
        x, sources = torch.zeros(3), set[int]()
        for _ in range(RANKS - 1):
            source = dist.recv(x, tag=4)
            assert x.tolist() == [source] * 3
            sources.add(source)
        found["sources"] = sorted(sources)
    else:
        dist.send(torch.full((3,), float(rank)), 0, tag=4)
    came = torch.zeros(2, 2)
    pairs = [
        dist.P2POp(dist.isend, torch.full((2, 2), float(rank)), (rank + 1) % RANKS),
        dist.P2POp(dist.irecv, came, (rank - 1) % RANKS),
    ]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    return {**found, "came": came}


ADDED_BY_GLOO = "float64 float32 float16 bfloat16 int64 int32 int8 uint8".split()


def dtypes(folder: Path) -> Result:
    """Each dtype that gloo adds."""
    rank, found = dist.get_rank(), dict[str, Any]()
    for name in ADDED_BY_GLOO:
        x = torch.tensor([[1, 2, 3], [4, 5, 6]]).to(getattr(torch, name)) + rank
        sums = x.clone().T  # not in one piece
        dist.all_reduce(sums)
        least = x[0, 0].clone()  # no dimension
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        told = x.clone()
        dist.broadcast(told, 2)
        everyone = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(everyone, x)
        nothing = x[:0].clone()
        dist.all_reduce(nothing)
        found[name] = [sums.contiguous(), least, told, *everyone, nothing]
    bits = torch.tensor([5, 6, 12]) << rank
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        combined = bits.clone()
        dist.all_reduce(combined, op=op)
        found[str(op)] = combined
    return found


def groups(folder: Path) -> Result:
    rank, found = dist.get_rank(), dict[str, Any]()
    pairs = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (1, 2), (0, 2))}
    for pair, group in pairs.items():
        if rank in pair:
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=group)
            dist.broadcast(x, pair[1], group=group)
            found[str(pair)] = [x, dist.get_rank(group), dist.get_process_group_ranks(group)]
    return found


def many_forms(folder: Path) -> Result:
    rank = dist.get_rank()
    x = torch.arange(6.0) + 10 * rank
    gathered = torch.zeros(18)
    dist.all_gather_single(gathered, x)
    part = torch.zeros(2)
    dist.reduce_scatter_single(part, x)
    listed = torch.zeros(2)
    dist.reduce_scatter(listed, list(x.clone().chunk(3)))
    swapped = torch.zeros(6)
    dist.all_to_all_single(swapped, x)
    counts = [[1, 2, 3], [0, 4, 2], [3, 3, 0]]
    uneven = torch.zeros(sum(row[rank] for row in counts))
    dist.all_to_all_single(uneven, x, [row[rank] for row in counts], counts[rank])
    outs = [torch.zeros(2) for _ in range(RANKS)]
    dist.gather(x[:2], outs if rank == 1 else None, dst=1)
    mine = torch.zeros(2)
    dist.scatter(mine, list(x.chunk(3)) if rank == 2 else None, src=2)
    at_one = x.clone()
    dist.reduce(at_one, 1, op=dist.ReduceOp.MAX)
    with dist._coalescing_manager(async_ops=True) as manager:
        a, b = torch.ones(2), torch.ones(3)
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    late = torch.ones(4)
    work = dist.all_reduce(late, async_op=True)
    then = work.get_future().then(lambda future: future.value()[0] * 2)
    work.wait()
    dist.barrier()
    forms = [gathered, part, listed, swapped, uneven, mine, a, b, late, then.wait()]
    return {"forms": forms, "rooted": [outs, at_one] if rank == 1 else []}


def asynchronous_checkpoint(folder: Path) -> Result:
    """A save in a thread, which needs a group of its own that takes tensors of the CPU."""
    import torch.distributed.checkpoint as dcp

    own = dist.new_group(list(range(RANKS)))
    kept = {"x": torch.arange(4.0)}
    saving: Any = dcp.async_save(kept, checkpoint_id=folder / "later", process_group=own)
    saving.result(60)
    came = {"x": torch.zeros(4)}
    dcp.load(came, checkpoint_id=folder / "later")
    return {"came": came["x"], "on cpu": "cpu" in dist.distributed_c10d._device_capability()}


def state_of_one_rank(folder: Path) -> Result:
    """Only rank 0 has the weights of a sharded model."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(3, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    whole = {"weight": torch.ones(4, 3), "bias": torch.zeros(4)} if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    return {"weights": full(model.parameters())}


def compiled(folder: Path) -> Result:
    """torch.compile around DDP, as most training scripts have it."""
    model = torch.compile(nn.parallel.DistributedDataParallel(net()), backend="aot_eager")
    losses = train(model, torch.optim.SGD(model.parameters(), 0.01))
    return {"losses": losses, "weights": full(model.parameters())}


def resized(folder: Path) -> Result:
    """FSDP1 frees the storage of a tensor after each use, and allocates it again."""
    rank, after, before = (
        dist.get_rank(),
        (dist.get_rank() + 1) % RANKS,
        (dist.get_rank() - 1) % RANKS,
    )
    given, taken = [torch.ones(4 * RANKS) for _ in range(2)]
    halves = torch.ones(4, dtype=torch.bfloat16)
    come, out, sent = torch.ones(4), torch.ones(4), torch.ones(4)
    dist.all_reduce(given)
    dist.all_reduce(halves, async_op=True).wait()
    dist.broadcast(come, 0)
    dist.all_gather_into_tensor(taken, out)
    dist.reduce_scatter_tensor(out, given)
    sending: Any = dist.isend(sent, after)
    dist.recv(come, before)
    sending.wait()
    for each in (given, taken, halves, come, out, sent):
        storage = each.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(nbytes)
    return {"rank": rank}


SAME: dict[str, Callable[[Path], Result]] = {
    each.__name__: each
    for each in (
        ddp,
        power_sgd,
        ddp_unused,
        zero,
        fsdp2,
        hsdp,
        dtensor,
        tensor_parallel,
        checkpoint,
        asynchronous_checkpoint,
        state_of_one_rank,
        compiled,
        resized,
        pipeline,
        objects,
        messages,
        dtypes,
        groups,
        many_forms,
    )
}


def run_all(rank: int, folder: str, backend: str) -> None:
    """Run every scenario on one rank, and save what it has found."""
    if backend == "gloo":
        begin_gloo(folder, rank, RANKS)
    else:
        import pmesh.torch  # noqa: F401

        dist.init_process_group(backend)
    found: dict[str, Result] = {}
    for name, scenario in SAME.items():
        try:
            found[name] = scenario(Path(folder))
        except BaseException as e:
            e.add_note(f"in the scenario {name}")
            raise
    torch.save(found, f"{folder}/rank-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
