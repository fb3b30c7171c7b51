"""Ranks of one job with tensors on different devices: one on a GPU, where there is one, two not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from pmesh.torch.process_group import ProcessGroup
from tests.torch.groups import reducing, run

GPUS: dict[str, Callable[[], bool]] = {
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
}
DEVICES = ["cpu", *(name for name, is_there in GPUS.items() if is_there())]
HAS_GPU = 1  # the rank


@pytest.mark.parametrize("device", DEVICES)
def test_collectives_take_and_give_tensors_of_each_rank_s_device(device: str) -> None:
    def at_home(rank: int, *values: float) -> torch.Tensor:
        return torch.tensor(values, device=device if rank == HAS_GPU else "cpu")

    def program(group: ProcessGroup) -> Any:
        rank = group.rank()
        own, other = at_home(rank, rank, 1), [at_home(rank, 0, 0) for _ in range(3)]
        found = dict[str, list[torch.Tensor]]()

        found["all_reduce"] = [own.clone()]
        group.allreduce(found["all_reduce"], reducing(ReduceOp.SUM)).wait()
        found["broadcast"] = [own.clone()]
        options = dist.BroadcastOptions()
        options.rootRank = HAS_GPU
        group.broadcast(found["broadcast"], options).wait()
        found["all_gather"] = other
        group.allgather([other], [own]).wait()
        found["all_to_all"] = [at_home(rank, 0, 0) for _ in range(3)]
        group.alltoall(found["all_to_all"], [own + 10 * to for to in range(3)]).wait()
        found["reduce_scatter"] = [at_home(rank, 0, 0)]
        group.reduce_scatter(found["reduce_scatter"], [[own + 10 * to for to in range(3)]]).wait()
        found["recv"] = [at_home(rank, 0, 0)]
        sent = group.send([own], (rank + 1) % 3, 5)
        group.recv(found["recv"], (rank + 2) % 3, 5).wait()
        sent.wait()

        assert {x.device for xs in found.values() for x in xs} == {own.device}
        return {name: [x.tolist() for x in xs] for name, xs in found.items()}

    assert run(program) == [
        {
            "all_reduce": [[3, 3]],
            "broadcast": [[HAS_GPU, 1]],
            "all_gather": [[0, 1], [1, 1], [2, 1]],
            "all_to_all": [[giver + 10 * rank, 1 + 10 * rank] for giver in range(3)],
            "reduce_scatter": [[3 + 30 * rank, 3 + 30 * rank]],
            "recv": [[(rank + 2) % 3, 1]],
        }
        for rank in range(3)
    ]
